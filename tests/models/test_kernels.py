"""Attention and grouped matmuls for accelerators, against the plain ones: values and gradients.

Pallas kernels run in interpret mode. cuDNN's attention needs a GPU: here its calls are compared with those of
``jax.nn.dot_product_attention``.
"""

import functools
import json

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec as P

from dualpipe_jax.arguments import UnfitError
from dualpipe_jax.engine import At
from dualpipe_jax.parallel import make_mesh, plan_dropless
from dualpipe_jax.parallel.expert_groups import KERNELS_BY_DEVICE, grouped_matmul
from dualpipe_jax.parallel.kernel_cost import sums_as_additions
from dualpipe_jax.split import split_backward
from models import Kernels, deepseek, tiny, v3
from models.attention import Attend, causal_attention
from models.cudnn import _MASKED_SCORE, config, cudnn_attention, cudnn_supports
from models.kernels import KERNEL_VMEM, splash_attention, this_gpu_kind
from tests.jaxprs import named
from tests.models.decode.small_models import random_params

SHAPE = 1, 2, 128  # batch, heads, sequence
SPLASH = functools.partial(splash_attention, interpret=True)


def heads(dtype=jnp.float32, length=128):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=(1, 2, length, width)), dtype) for width in (24, 24, 16, 16)]


def out_and_gradients(attend, q, k, v, d):
    def run(q, k, v, d):
        out, pull = jax.vjp(lambda *qkv: attend(*qkv, 0.3), q, k, v)
        return out, pull(d)

    return jax.jit(run)(q, k, v, d)


@pytest.mark.parametrize(
    "attend, dtype, length, tolerance",
    [
        (SPLASH, jnp.float32, 128, 1e-5),
        (SPLASH, jnp.float32, 384, 1e-5),
        pytest.param(SPLASH, jnp.bfloat16, 128, 0.05, marks=pytest.mark.slow),
    ],
    ids=["splash-float32", "splash-of-three-blocks", "splash-bfloat16"],
)
def test_attention_is_the_plain_one(attend, dtype, length, tolerance):
    given = heads(dtype, length)
    wanted = out_and_gradients(causal_attention, *(a.astype(jnp.float32) for a in given))
    got = out_and_gradients(attend, *given)
    assert all(leaf.dtype == dtype for leaf in jax.tree.leaves(got))
    got = jax.tree.map(lambda a: a.astype(jnp.float32), got)
    chex.assert_trees_all_close(got, wanted, rtol=tolerance, atol=tolerance)


DOCUMENTS = ((0, 50), (50, 51), (51, 128))


@functools.cache
def documents_alone():
    parts = [out_and_gradients(causal_attention, *(x[:, :, a:b] for x in heads())) for a, b in DOCUMENTS]
    return jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=2), *parts)


@pytest.mark.parametrize("attend", [causal_attention, SPLASH], ids=["plain", "splash"])
def test_documents_do_not_hear_each_other(attend):
    segments = jnp.repeat(jnp.asarray([3, 1, 2]), jnp.asarray([b - a for a, b in DOCUMENTS]))[None]
    got = out_and_gradients(functools.partial(attend, segment_ids=segments), *heads())
    chex.assert_trees_all_close(got, documents_alone(), rtol=1e-5, atol=1e-5)


ON_GPU = pytest.mark.skipif(jax.default_backend() != "gpu", reason="cuDNN's attention runs on a GPU only")


@ON_GPU
@pytest.mark.parametrize("width", [16, 24], ids=["values-narrower", "values-as-wide"])
@pytest.mark.parametrize("documents", [1, 3])
def test_cudnn_attention_is_the_plain_one(width, documents):
    """Of two layers alike, too: XLA compiles the second by what it knows of the first."""
    q, k, v, d = heads(jnp.bfloat16)
    v, d = (jnp.pad(a, ((0, 0), (0, 0), (0, 0), (0, width - 16))) for a in (v, d))
    segments = None if documents == 1 else jnp.arange(SHAPE[-1])[None] // 50

    def twice(attend):
        def run(q, k, v, scale):
            again = attend(q * 2, k, v, scale, segment_ids=segments)
            return attend(q, k, v, scale, segment_ids=segments) + again

        got = out_and_gradients(run, q, k, v, d)
        return jax.tree.map(lambda a: a.astype(jnp.float32), got)

    chex.assert_trees_all_close(twice(cudnn_attention), twice(causal_attention), atol=0.1, rtol=0.05)


def as_cudnn_defines_it(scale, operands, mask, results, extra_operands=(), *, backward):
    """What the custom calls compute, in plain JAX: operands are B S H X, results and the mask have heads first."""
    q, k, v, *of_backward = (a.astype(jnp.float32) for a in operands)
    seen = jnp.tril(jnp.ones((q.shape[1],) * 2, bool))
    scores = scale * jnp.einsum("bqhx,bkhx->bhqk", q, k) + (0 if mask is None else mask.astype(jnp.float32))
    scores = jnp.where(seen, scores, -jnp.inf)
    if backward:
        (sums, d), (out,) = of_backward, (a.astype(jnp.float32) for a in extra_operands)
        probs = jnp.exp(scores - sums[..., None])
        d_probs = jnp.einsum("bqhv,bkhv->bhqk", d, v)
        d_scores = scale * probs * (d_probs - jnp.einsum("bqhv,bqhv->bhq", d, out)[..., None])
        made = (
            jnp.einsum("bhqk,bkhx->bhqx", d_scores, k),
            jnp.einsum("bhqk,bqhx->bhkx", d_scores, q),
            jnp.einsum("bhqk,bqhv->bhkv", probs, d),
        )
    else:
        sums = jax.nn.logsumexp(scores, axis=-1)
        made = jnp.einsum("bhqk,bkhv->bhqv", jnp.exp(scores - sums[..., None]), v), sums
    return [a.astype(result.dtype) for a, result in zip(made, results, strict=backward)]


@pytest.mark.parametrize("capability, documents", [((9, 0), 3), ((8, 0), 1)], ids=["H100", "A100"])
def test_what_cudnn_is_given_and_gives_back_is_the_plain_attention(capability, documents, monkeypatch):
    """Without a GPU: which operand is where, the mask of documents, values filled up before Hopper."""
    monkeypatch.setattr("models.cudnn._call", as_cudnn_defines_it)
    monkeypatch.setattr("models.cudnn.compute_capability", lambda: capability)
    given = heads(jnp.bfloat16)
    segments = None if documents == 1 else jnp.arange(SHAPE[-1])[None] // 50
    found, wanted = (
        jax.tree.map(
            lambda a: a.astype(jnp.float32),
            out_and_gradients(functools.partial(attend, segment_ids=segments), *given),
        )
        for attend in (cudnn_attention, causal_attention)
    )
    chex.assert_trees_all_close(found, wanted, atol=0.03, rtol=0.03)


def calls(function, *args):
    """Of each of cuDNN's calls the name, the operands' shapes, the results' shapes and layouts, and the config.

    A layout is told from the dim whose numbers are neighbours on.
    """
    jaxpr = jax.make_jaxpr(function)(*args).jaxpr
    return [
        (
            eqn.params["target_name"],
            [var.aval.shape for var in eqn.invars],
            [
                (var.aval.shape, lie)
                for var, lie in zip(eqn.outvars, eqn.params["output_layouts"], strict=True)
            ],
            json.loads(eqn.params["legacy_backend_config"])["cudnn_fmha_backend_config"],
        )
        for eqn in named(jaxpr, "ffi_call")
    ]


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="a GPU here is the one that runs the program")
def test_cudnn_attention_is_traced_where_no_gpu_is():
    """Ahead of time: recomputed, one call more; the softmax' sums and results in the order that cuDNN leaves them."""
    q, k, v, d = heads(jnp.bfloat16)
    run = jax.checkpoint(lambda *qkv: cudnn_attention(*qkv, 0.3))
    first, second, backward = calls(lambda q, k, v, d: jax.vjp(run, q, k, v)[1](d), q, k, v, d)
    (B, H, S), lie = SHAPE, (3, 1, 2, 0)
    qkv = [(B, S, H, 24), (B, S, H, 24), (B, S, H, 16)]
    sums, room = ((B, H, S), (2, 1, 0)), ((0,), (0,))
    assert first == second
    assert first[:3] == ("__cudnn$fmhaSoftmax", qkv, [((B, H, S, 16), lie), sums, room])
    wide, narrow = ((B, H, S, 24), lie), ((B, H, S, 16), lie)
    operands = [*qkv, (B, H, S), (B, S, H, 16), (B, S, H, 16)]
    assert backward[:3] == ("__cudnn$fmhaSoftmaxBackward", operands, [wide, wide, narrow, room])
    (alone,) = calls(lambda *qkv: cudnn_attention(*qkv, 0.3), q, k, v)
    assert alone[2] == [narrow, room], "without gradients no sums"
    apart, _ = calls(
        lambda *qkv: jax.vjp(lambda *x: cudnn_attention(*x, 0.3, jnp.zeros((B, S), int)), *qkv)[1](d), q, k, v
    )
    assert apart[:2] == ("__cudnn$fmhaScaleBiasSoftmax", [*qkv, (B, 1, S, S)])


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_cudnn_is_told_what_jax_tells_it(backward):
    """But for what has the value that it has unsaid."""
    from jax._src.cudnn import fused_attention_stablehlo as internal
    from jax._src.interpreters import mlir
    from jax._src.lib.mlir import ir

    def said(tree):
        if not isinstance(tree, dict):
            return tree
        unsaid = {"tuning_knobs": {"17": "1", "24": "0"}}  # of convolutions
        pairs = {key: said(value) for key, value in tree.items() if unsaid.get(key) != value}
        empty = (0, 0.0, False, "0", [], {}, "PRIMITIVE_TYPE_INVALID")
        return {key: value for key, value in pairs.items() if value not in empty}

    with mlir.make_ir_context():
        theirs = internal.create_dot_product_attention_backend_config(
            2,
            4,
            64,
            64,
            ir.BF16Type.get(),
            0.3,
            42,
            0.0,
            internal.MaskType.CAUSAL,
            0,
            None,
            1,
            False,
            backward,
        )
    ours = config((2, 4, 64), jnp.bfloat16, 0.3, backward=backward)
    assert said(ours) == said(json.loads(theirs))


@pytest.mark.parametrize("on", ["", "=1", "=true"])
def test_where_sums_have_one_order_the_backward_call_says_so(monkeypatch, on):
    """Left to XLA, it says so of the first call alone, and does not know a second one of the same."""
    monkeypatch.setenv("XLA_FLAGS", f"--xla_other=1 --xla_gpu_deterministic_ops{on}")
    said = [
        config((1, 2, 8), jnp.bfloat16, 1.0, backward=backward)["cudnn_fmha_backend_config"].get(
            "force_deterministic"
        )
        for backward in (False, True)
    ]
    assert said == [None, True]


def test_cudnn_says_what_it_does_not_take():
    q, k, v, _ = heads(jnp.float32)
    with pytest.raises(
        UnfitError,
        match="heads are 24 wide and float32, values 16 wide; cuDNN takes 16 bits .* take attention",
    ):
        cudnn_attention(q, k, v, 0.3)


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="stands in for cuDNN, which a GPU here would run")
def test_documents_of_an_odd_length_are_filled_up_by_one_token(monkeypatch):
    """cuDNN's mask needs an even length; what the token adds must reach neither results nor gradients."""

    def in_place_of_cudnn(scale, q_BSHX, k_BSHX, v_BSHV, mask_BHQK):
        scores = jnp.einsum("bqhx,bkhx->bhqk", q_BSHX, k_BSHX) * scale + mask_BHQK
        assert scores.shape[-2:] == (128, 128)
        scores = jnp.where(np.tril(np.ones((128, 128), bool)), scores, -jnp.inf)
        return jnp.einsum("bhqk,bkhv->bhqv", jax.nn.softmax(scores), v_BSHV)

    monkeypatch.setattr("models.cudnn._attention", in_place_of_cudnn)
    monkeypatch.setattr("models.cudnn.cudnn_supports", lambda q, v: True)
    monkeypatch.setitem(_MASKED_SCORE, "float32", -(2.0**41))
    q, k, v, d = (a[:, :, :127] for a in heads(jnp.float32))
    documents = jnp.asarray(np.arange(127) // 40)[None].repeat(len(q), 0)

    def run(attend):
        out, pull = jax.vjp(lambda *qkv: attend(*qkv, 0.3, segment_ids=documents), q, k, v)
        return out, pull(d)

    chex.assert_trees_all_close(run(cudnn_attention), run(causal_attention), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype, width, takes", [("bfloat16", 192, True), ("float32", 192, False),
    ("bfloat16", 20, False), ("bfloat16", 264, False)])  # fmt: skip
def test_what_cudnn_takes(dtype, width, takes):
    asked = jax.ShapeDtypeStruct((1, 8, 2, width), dtype)
    assert cudnn_supports(asked, asked) is takes


@pytest.mark.parametrize(
    "kind, width, takes",
    [
        ("A100-SXM4-80GB", 128, True),
        ("A100-SXM4-80GB", 192, False),
        ("H100 80GB HBM3", 192, True),
        ("B200", 192, True),
    ],
)
@pytest.mark.skipif(jax.default_backend() == "gpu", reason="a GPU here is the one that runs the program")
def test_the_widths_that_cudnn_takes_are_those_of_the_gpu_to_compile_for(kind, width, takes):
    """And values are filled up before Hopper."""
    device = jax.sharding.AbstractDevice(f"NVIDIA {kind}", 100, "gpu")
    mesh = jax.sharding.AbstractMesh((2,), ("ep",), abstract_device=device)
    asked = jax.ShapeDtypeStruct((1, 8, 2, width), jnp.bfloat16)
    with jax.sharding.use_abstract_mesh(mesh):
        assert cudnn_supports(asked, asked) is takes
        run = functools.partial(cudnn_attention, scale=0.3)
        if not takes:
            with pytest.raises(ValueError, match="on this GPU 128 at most"):
                jax.eval_shape(run, asked, asked, asked)
            return
        values = jax.ShapeDtypeStruct((1, 8, 2, 64), jnp.bfloat16)
        assert jax.eval_shape(run, asked, asked, values).shape == (1, 8, 2, 64)
        (call,) = calls(run, asked, asked, values)
        assert call[1][2][-1] == (width if "A100" in kind else 64)
        wider = jax.ShapeDtypeStruct((1, 8, 2, width + 8), jnp.bfloat16)  # nothing can fill keys up
        chosen = Kernels().attend("gpu")
        assert len(calls(lambda q, k, v: chosen(q, k, v, 0.3), asked, asked, wider)) == ("A100" not in kind)


def test_splash_says_what_it_costs_and_how_much_memory_it_takes():
    q, k, v, d = heads()
    jaxpr = jax.make_jaxpr(lambda q, k, v, d: jax.vjp(lambda *a: SPLASH(*a, 0.3), q, k, v)[1](d))(q, k, v, d)
    calls = named(jaxpr.jaxpr, "pallas_call")
    assert {eqn.params["compiler_params"].vmem_limit_bytes for eqn in calls} == {KERNEL_VMEM}
    forward, backward = (eqn.params["cost_estimate"].flops for eqn in calls)
    half = 128 * 128 // 2 * 2  # pairs below the diagonal, of two heads
    assert forward == 2 * half * (24 + 16)
    assert backward == 2 * half * (3 * 24 + 2 * 16)


@pytest.mark.parametrize("length, blocks", [(4096, 2), (3072, 3)])
def test_blocks_of_queries_gradients_are_added(length, blocks):
    """Splash makes one for each block of keys, and sums them as XLA does worst."""
    q, v = (jax.ShapeDtypeStruct((1, 2, length, dim), jnp.bfloat16) for dim in (192, 128))

    def gradient(q, v):
        return jax.vjp(lambda q: splash_attention(q, q, v, 0.1, True), q)[1](v)

    jaxpr = jax.make_jaxpr(gradient)(q, v).jaxpr
    (split,) = named(jaxpr, "split")
    (made,) = {var.aval.shape[-4:] for var in split.invars}
    assert made == (blocks, 2, length, 192)
    summed = [eqn.invars[0].aval.shape for eqn in named(jaxpr, "reduce_sum")]
    assert not [shape for shape in summed if shape[-3:] == made[-3:]]


@pytest.mark.parametrize(
    "shape, axis, is_added",
    [((2, 3, 4, 5), 0, True), ((3, 8, 4, 5), 1, True), ((9, 3, 4, 5), 0, False), ((3, 3, 2, 5), 2, False)],
)
def test_sums_of_few_blocks_are_additions(shape, axis, is_added):
    """But not along the last two dims, which lie in a TPU's registers, and not of many."""
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    summed = jax.jit(lambda x: 1.0 + jnp.sum(x, axis))
    function = sums_as_additions(lambda x: summed(2 * x))
    jaxpr = jax.make_jaxpr(function)(x).jaxpr
    assert (len(named(jaxpr, "split")), len(named(jaxpr, "reduce_sum"))) == (is_added, not is_added)
    np.testing.assert_allclose(function(x), 1 + 2 * x.sum(axis), rtol=1e-5, atol=1e-6)


def test_sums_inside_a_kernel_stay():
    def kernel(x_ref, out_ref):
        out_ref[...] = jnp.sum(x_ref[...], axis=0)

    shape = jax.ShapeDtypeStruct((8, 128), jnp.float32)
    run = pl.pallas_call(kernel, out_shape=shape, interpret=True)
    jaxpr = jax.make_jaxpr(sums_as_additions(run))(jax.ShapeDtypeStruct((2, 8, 128), jnp.float32)).jaxpr
    assert len(named(jaxpr, "reduce_sum")) == 1 and not named(jaxpr, "split")


def test_splash_says_which_lengths_it_takes():
    with pytest.raises(UnfitError, match="128 must divide the sequence of 200, as it does 256"):
        SPLASH(*(jnp.ones((1, 1, 200, 8)) for _ in range(3)), 1.0)


SIZES = {"even": [64, 64, 64, 64], "uneven": [0, 100, 3, 70], "none": [0, 0, 0, 0]}


@pytest.mark.parametrize("kernel, gradient", [("ragged", None), ("megablox", None), ("ragged", "megablox")])
def test_grouped_matmul_is_the_plain_one(kernel, gradient):
    rng = np.random.default_rng(0)

    def run(x, w, d, sizes, **how):
        y, pull = jax.vjp(lambda x, w: grouped_matmul(x, w, sizes, **how), x, w)
        return y, pull(d)

    ours, plain = (
        jax.jit(functools.partial(run, **how))
        for how in (dict(kernel=kernel, gradient=gradient, interpret=True), {})
    )
    for name, sizes in SIZES.items():
        x, w, d = (rng.normal(size=size).astype(np.float32) for size in [(256, 16), (4, 16, 8), (256, 8)])
        x[sum(sizes) :], d[sum(sizes) :] = np.nan, np.nan  # rows of no group
        got, wanted = (step(x, w, d, np.asarray(sizes, np.int32)) for step in (ours, plain))
        chex.assert_trees_all_close(got, wanted, rtol=1e-5, atol=1e-5, custom_message=name)


def test_where_megablox_takes_no_such_buffer_a_tpu_does_without():
    rng = np.random.default_rng(0)
    x, w, d = (rng.normal(size=shape).astype(np.float32) for shape in [(100, 4), (2, 4, 3), (100, 3)])
    rows = np.arange(100) < 60
    sizes = jnp.asarray([60, 40], jnp.int32)
    how = dict(zip(("kernel", "gradient"), KERNELS_BY_DEVICE["tpu"], strict=True), interpret=True)
    y, pull = jax.vjp(lambda w: grouped_matmul(jnp.asarray(x), w, sizes, **how), w)
    np.testing.assert_allclose(y, np.where(rows[:, None], x @ w[0], x @ w[1]), rtol=1e-5, atol=1e-5)
    wanted = [x[rows].T @ d[rows], x[~rows].T @ d[~rows]]
    np.testing.assert_allclose(pull(jnp.asarray(d))[0], wanted, rtol=1e-5, atol=1e-5)


def test_megablox_says_which_buffers_it_takes():
    with pytest.raises(ValueError, match="multiples of 128 rows, not 100; try 128"):
        grouped_matmul(jnp.ones((100, 4)), jnp.ones((2, 4, 4)), jnp.asarray([50, 50]), kernel="megablox")


CONFIG = tiny(
    dim=16, num_heads=2, q_lora_rank=0, kv_lora_rank=8, dense_hidden=16, expert_hidden=8, vocab=32,
    num_layers=2, num_experts=4, top_k=2, num_groups=1, top_groups=1, init_std=0.2,
)  # fmt: skip


@pytest.mark.parametrize(
    "dispatch, kernels",
    [
        ("capacity", Kernels("splash", "ragged", interpret=True)),
        pytest.param("dropless", Kernels("plain", "megablox", interpret=True), marks=pytest.mark.slow),
    ],
)
def test_a_stage_split_in_a_shard_map_has_the_plain_gradients(dispatch, kernels):
    """Attention has no weights: its backward is I's. Of the experts' kernels W keeps its own."""
    options = dict(ep_axis="ep", dispatch=dispatch)
    plan = (1, 1, 0)  # the dense layer, the one with experts, the head
    model, plain = deepseek(CONFIG, plan, kernels=kernels, **options), deepseek(CONFIG, plan, **options)
    params = jax.tree.map(lambda w: w[1], jax.device_get(random_params(CONFIG, 0, 0.2, plan))["stages"])
    x, dy = np.random.default_rng(1).normal(size=(2, 2, 128, 16)).astype(np.float32)  # one sequence a device

    def stage_of(model):
        def stage(params, x):
            out = model.staged.kinds["middle"](params, {}, x, At({}, jnp.int32(1), jnp.int32(0), None))
            return out.x, dict(out.metrics)

        return stage

    def split(params, x, dy):
        stage = split_backward(stage_of(model), has_aux=True)
        (y, _), residuals = stage.forward(params, x)
        dx, stash = stage.backward_input(params, x, residuals, dy)
        return y, dx, stage.backward_weight(params, x, residuals, stash)["layers"]

    def whole(params, x, dy):
        y, pull, _ = jax.vjp(stage_of(plain), params, x, has_aux=True)
        gradients, dx = pull(dy)
        return y, dx, gradients["layers"]

    specs = plain.param_specs["stages"]
    weights = jax.tree.map(lambda s: s if "ep" in s else P("ep"), specs["layers"])
    how = dict(
        mesh=make_mesh(1, 2), in_specs=(specs, P("ep"), P("ep")), out_specs=(P("ep"), P("ep"), weights)
    )
    run = functools.partial(jax.shard_map, check_vma=False, **how)
    got, wanted = (jax.jit(run(f))(params, x, dy) for f in (split, whole))
    chex.assert_trees_all_close(got, wanted, rtol=1e-3, atol=1e-4)


def test_auto_is_plain_on_cpu_and_where_the_kernel_does_not_fit():
    assert Kernels().attend("cpu") == Attend(causal_attention)
    assert Kernels().multiply("cpu").keywords["kernel"] == "plain"
    tpu = Kernels().multiply("tpu").keywords
    assert (tpu["kernel"], tpu["gradient"]) == ("ragged", "megablox")
    q, k, v, _ = heads(length=6)
    for platform in ("tpu", "gpu"):  # a length that splash does not take; no GPU here
        for segments in (None, jnp.asarray([[1, 1, 2, 2, 2, 0]])):
            found = Kernels().attend(platform)(q, k, v, 0.3, segment_ids=segments)
            np.testing.assert_array_equal(found, causal_attention(q, k, v, 0.3, segment_ids=segments))
    long = jnp.ones((1, 1, 128, 8))
    jaxpr = jax.make_jaxpr(lambda q: Kernels().attend("tpu")(q, q, q, 1.0))(long)
    assert len(named(jaxpr.jaxpr, "pallas_call")) == 1


KINDS = {
    "V100-SXM2-32GB": ("old_gpu", "old_gpu"),
    "A100-SXM4-80GB": ("gpu", "gpu"),
    "H100 80GB HBM3": ("hopper", "gpu"),
    "H200": ("hopper", "gpu"),
    "B200": ("blackwell", "gpu"),
    "GB200": ("blackwell", "gpu"),
}


@pytest.mark.parametrize("kind, wanted", KINDS.items())
@pytest.mark.skipif(jax.default_backend() == "gpu", reason="a GPU here is the one that runs the program")
def test_groups_are_multiplied_by_the_kernels_of_the_gpu_to_compile_for(kind, wanted):
    mesh = jax.sharding.AbstractMesh(
        (1,), ("x",), abstract_device=jax.sharding.AbstractDevice(f"NVIDIA {kind}", 100, "gpu")
    )
    with jax.sharding.use_abstract_mesh(mesh):
        assert (this_gpu_kind(jnp.bfloat16), this_gpu_kind(jnp.float32)) == wanted


SAYS = {
    ("H100 80GB HBM3", "bfloat16", "dropless"): "attention cudnn; experts hopper",
    ("H100 80GB HBM3", "bfloat16", "capacity"): "attention cudnn; experts one batched product",
    (
        "H100 80GB HBM3",
        "float32",
        "dropless",
    ): "cuDNN takes 16 bits and heads of multiples of 8 up to 256, before Hopper no wider values; these "
    "are float32, 192 and 128 wide; experts triton; --precision bfloat16 has a faster kernel",
    (
        "A100-SXM4-80GB",
        "bfloat16",
        "dropless",
    ): "up to 128, before Hopper no wider values; these are bfloat16, 192 and 128 wide; experts triton",
    (
        "V100-SXM2-32GB",
        "bfloat16",
        "dropless",
    ): "experts ragged, slow: each of a device's experts multiplies all rows; --dispatch capacity is faster",
}


@pytest.mark.parametrize("case", SAYS, ids="-".join)
@pytest.mark.skipif(jax.default_backend() == "gpu", reason="a GPU here is the one that runs the program")
def test_a_run_on_a_gpu_is_told_its_kernels(case):
    kind, dtype, dispatch = case
    # Which has a kernel for eight bits, whatever the dispatch.
    in_eight_bits = "dropless" if "H100" in kind and dtype == "bfloat16" else dispatch
    device = jax.sharding.AbstractDevice(f"NVIDIA {kind}", 100, "gpu")
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((1,), ("x",), abstract_device=device)):
        told, exact, rounded = (
            Kernels(matmul=matmul).describe("gpu", v3(compute_dtype=jnp.dtype(dtype)), by)
            for matmul, by in (("auto", dispatch), ("auto", in_eight_bits), ("float8", dispatch))
        )
    assert told.endswith(SAYS[case])
    assert rounded == f"{exact}; what they multiply in eight bits"


@pytest.mark.parametrize("capability", [(8, 0), (7, 0)], ids=["A100", "V100"])
def test_experts_are_multiplied_by_what_a_gpu_has(capability, monkeypatch):
    """Rows of two experts, on this CPU."""
    handle = plan_dropless(jnp.asarray([[0, 1], [0, 1]]), num_experts=2)
    rows, w = (
        jnp.arange(8.0).reshape(4, 2),
        jnp.asarray(np.random.default_rng(0).normal(size=(2, 2, 3)), jnp.float32),
    )
    monkeypatch.setattr("models.kernels.compute_capability", lambda: capability)
    found = Kernels(interpret=True).multiply("gpu")(rows, w, handle)
    np.testing.assert_allclose(found, np.concatenate([rows[:2] @ w[0], rows[2:] @ w[1]]), rtol=1e-6)


@pytest.mark.parametrize(
    "platform, capability, dtype, row",
    [
        ("gpu", (9, 0), jnp.bfloat16, "hopper"),
        ("gpu", (9, 0), jnp.float32, "gpu"),
        ("gpu", (8, 9), jnp.bfloat16, "gpu"),
        ("gpu", (10, 0), jnp.bfloat16, "blackwell"),
        ("gpu", (12, 0), jnp.bfloat16, "gpu"),
        ("tpu", None, jnp.bfloat16, "tpu"),
        ("cpu", None, jnp.bfloat16, "cpu"),
    ],
)
def test_eight_bits_are_multiplied_by_what_multiplies_all_else(platform, capability, dtype, row, monkeypatch):
    asked = []
    monkeypatch.setattr("models.kernels.compute_capability", lambda: capability)
    monkeypatch.setattr("models.kernels.expert_matmul", lambda *args, **how: asked.append(how))
    for matmul in ("auto", "float8"):
        Kernels(matmul=matmul).multiply(platform)(jnp.ones((4, 2), dtype), None, None)
    product, gradient = KERNELS_BY_DEVICE[row]
    wanted = {"kernel": product, "gradient": gradient, "interpret": False}
    assert asked == [wanted | {"float8": False}, wanted | {"float8": True}]


@pytest.mark.parametrize("kernels, ask, says", [
    (Kernels("splash"), Kernels.attend, "attention 'splash' is a kernel for TPUs, and this is to run on a CPU; 'auto'"),
    (Kernels("cudnn"), Kernels.attend, "attention 'cudnn' is a kernel for GPUs, and this is to run on a CPU"),
    (Kernels(matmul="hopper"), Kernels.multiply, "matmul 'hopper' is a kernel for GPUs, and this is to run on a CPU"),
])  # fmt: skip
def test_a_kernel_for_another_platform_is_refused(kernels, ask, says):
    with pytest.raises(ValueError, match=says):
        ask(kernels, "cpu")


def test_unknown_kernels_are_refused():
    with pytest.raises(ValueError, match="attention is 'flash', must be one of auto, plain, splash, cudnn"):
        Kernels("flash")
    with pytest.raises(ValueError, match="matmul is 'gmm', must be one of auto, plain, ragged, megablox"):
        Kernels(matmul="gmm")
