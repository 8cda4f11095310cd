"""DeepSeek's model in stages: its losses, its gradients, its counts, against the paper's formulas."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from dualpipe_jax import Pipeline
from dualpipe_jax.arguments import UnfitError
from dualpipe_jax.contract import At
from dualpipe_jax.engine.reference import reference_loss, reference_value_and_grad
from dualpipe_jax.functional import num_params
from dualpipe_jax.parallel import make_mesh
from dualpipe_jax.schedule import dualpipe, dualpipe_v, interleaved_1f1b_overlap, one_f_one_b
from dualpipe_jax.split import split_backward
from models.attention import Attend, causal_attention
from models.config import moe_67b, tiny, v2, v2_lite, v3
from models.kernels import Kernels
from models.transformer import (
    deepseek,
    figures,
    recompute_keys,
    recompute_local,
    recompute_wide,
    update_routing,
)
from tests.jaxprs import applied
from tests.models import plain
from tests.models.decode.small_models import QUICK, random_params

CONFIG = tiny(
    dim=16, num_layers=2, num_heads=2, q_lora_rank=0, kv_lora_rank=8, dense_hidden=16, expert_hidden=8, num_experts=4,
    top_k=2, num_groups=1, top_groups=1, vocab=32, num_mtp_layers=1,
)  # fmt: skip
TIED = dataclasses.replace(CONFIG, tie_embeddings=True)
PLAN = (1, 1, 0)
"""Three kinds: the embedding and a dense layer; a layer with experts; a module ahead and the head."""


@dataclasses.dataclass(frozen=True)
class Lanes(Kernels):
    """Attention as on a CPU, of heads as on a TPU."""

    def attend(self, platform: str) -> Attend:
        return Attend(causal_attention, 128)


SPREAD = {"kernels": Lanes(), "remat": recompute_wide}
DROPLESS = {"kernels": Lanes(matmul="ragged"), "remat": recompute_local, "dispatch": "dropless"}
"""As on a TPU, too: matrices turned over once a step."""
NUM, SIZE, SEQ = 2, 4, 8
ALPHA = 0.05


def a_batch(**more):
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 32, (2, NUM, SIZE, SEQ)).astype(np.int32)
    return {"inputs": tokens[0], "targets": tokens[1]} | more


def packed():
    """Documents of uneven lengths, padding at the end, targets that do not count, a weight of its own.

    Of the first of four microbatches no target counts.
    """
    rng = np.random.default_rng(1)
    valid = np.arange(SEQ) < rng.integers(4, SEQ + 1, (NUM, SIZE, 1))
    segments = np.cumsum(rng.random((NUM, SIZE, SEQ)) < 0.25, -1).astype(np.int32)
    mask = rng.random((NUM, SIZE, SEQ)) < 0.7
    mask[0, : SIZE // 2] = False
    weight = rng.uniform(0.1, 0.9, (NUM, SIZE)).astype(np.float32)
    return a_batch(segment_ids=segments, valid=valid, mask=mask, mtp_weight=weight)


@functools.cache
def built(config=CONFIG, plan=PLAN, **options):
    return deepseek(config, plan, balance_factor=ALPHA, **{"dispatch": "capacity"} | options)


def a_params(config=CONFIG, plan=PLAN):
    """As init makes them in shape, with norms that are not all one and biases that matter."""
    return jax.device_get(random_params(config, 2, 0.2, plan))


def quick(function):
    return jax.jit(function, compiler_options=QUICK)


def floats(tree):
    """Gradients of what has some."""
    return [
        (jax.tree_util.keystr(path), leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        if leaf.dtype != jax.dtypes.float0
    ]


def same_gradients(got, wanted):
    got, wanted = floats(got), floats(wanted)
    assert [name for name, _ in got] == [name for name, _ in wanted]
    for (name, g), (_, w) in zip(got, wanted, strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-4, atol=1e-6 * max(1, np.abs(w).max()), err_msg=name)


@functools.cache
def wanted_from_packed(config=CONFIG):
    run = functools.partial(plain.loss, model=built(config), mtp_weight=None, balance_factor=ALPHA)
    return quick(jax.value_and_grad(run, has_aux=True, allow_int=True))(a_params(config), packed())


@pytest.mark.slow
def test_losses_gradients_and_counts_are_the_papers_on_one_device():
    """Rematerialised; the mean over all that counts, however unevenly it lies in microbatches and parts."""
    model = built(remat=jax.checkpoint_policies.nothing_saveable, loss_block=3)
    (loss, report), grads = quick(reference_value_and_grad(model.staged, num_parts=2))(a_params(), packed())
    check_papers(loss, report)
    same_gradients(grads, wanted_from_packed()[1])


def check_papers(loss, report, config=CONFIG):
    wanted, (terms, counts) = wanted_from_packed(config)[0]
    np.testing.assert_allclose(loss, wanted, rtol=1e-5)
    assert set(report.losses) == set(terms) == {"lm", "mtp_1", "balance"}
    for name in terms:
        np.testing.assert_allclose(report.losses[name], terms[name], rtol=1e-5, err_msg=name)
    np.testing.assert_array_equal(report.metrics["counts"], counts)
    assert report.metrics["counts"].dtype == jnp.int32 and report.metrics["dropped"] == 0


def test_the_same_with_tied_embeddings_and_what_published_weights_want():
    config = dataclasses.replace(CONFIG, tie_embeddings=True, num_mtp_layers=2)
    model, params, batch = built(config, (2,), mtp_after_norm=True), a_params(config, (2,)), a_batch()
    assert "lm_head" not in params["shared"] and model.layout.kinds == ("only",)
    run = functools.partial(plain.loss, model=model, mtp_weight=0.3, balance_factor=ALPHA, after_norm=True)
    wanted, (terms, _) = quick(run)(params, batch)
    loss, report = quick(reference_loss(model.staged))(params, batch)
    np.testing.assert_allclose(loss, wanted, rtol=1e-5)
    found = figures(report.losses, report.metrics)
    np.testing.assert_allclose(found["lm"], terms["lm"], rtol=1e-5)
    np.testing.assert_allclose(found["mtp"] * 0.3 / 2, [terms["mtp_1"], terms["mtp_2"]], rtol=1e-5)
    np.testing.assert_allclose(found["balance"] * 3 * ALPHA, terms["balance"], rtol=1e-5)
    counted = {
        name: np.asarray(report.metrics[name]).tolist() for name in ("tokens", "mtp_tokens", "sequences")
    }
    assert counted == {"tokens": 64, "mtp_tokens": [56, 48], "sequences": 8}


def by_row(tree, layout):
    """Stages' layers and biases in model order, whatever the plan; and what is shared."""
    tree, rows = jax.device_get(tree), []
    for row in range(layout.rows.max() + 1):
        stage, slot = layout.slot_of(row)
        layer = jax.tree.map(lambda w, stage=stage: w[stage], tree["stages"]["layers"][slot])
        rows.append({"layer": layer, "bias": tree["stages"]["routing"]["bias"][stage, slot]})
    return {"rows": rows, "shared": tree["shared"]}


def in_stages(rows, layout):
    """The inverse, empty slots filled with what must not matter."""
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves)[np.maximum(layout.rows, 0)], *rows["rows"])
    slots = range(layout.rows.shape[1])
    layers = [jax.tree.map(lambda w, slot=slot: w[:, slot], stacked["layer"]) for slot in slots]
    routing = {"bias": stacked["bias"], "row": layout.rows}
    return {"stages": {"layers": layers, "routing": routing}, "shared": rows["shared"]}


@pytest.mark.parametrize(
    "schedule, plan, options, config",
    [
        (one_f_one_b(3, 4), PLAN, SPREAD, CONFIG),
        pytest.param(dualpipe(2, 4), (1, 1), SPREAD, TIED, marks=pytest.mark.slow),
        pytest.param(dualpipe_v(2, 4), (1, 0, 1, 0), {}, CONFIG, marks=pytest.mark.slow),
        pytest.param(interleaved_1f1b_overlap(2, 4, 3), (1, 0, 0, 1, 0, 0), {}, TIED, marks=pytest.mark.slow),
        (dualpipe(2, 4), (1, 1), DROPLESS, CONFIG),
        pytest.param(
            dualpipe(2, 4), (1, 1), DROPLESS | {"remat": recompute_keys}, CONFIG, marks=pytest.mark.slow
        ),
    ],
    ids=[
        "1f1b-spread",
        "dualpipe-spread-tied",
        "dualpipe_v",
        "interleaved-3-tied",
        "dualpipe-dropless",
        "dualpipe-keys",
    ],
)
def test_losses_gradients_and_counts_are_the_papers(schedule, plan, options, config):
    """Experts, words and the embedding's width over two devices; a module ahead on another rank's embedding.

    Where that is the head, too, it is whole on each.
    """
    model = built(config, plan, ep_axis="ep", loss_block=3, **options)
    params = in_stages(by_row(a_params(config), built(config).layout), model.layout)
    batch = jax.tree.map(lambda a: a.reshape(4, 2, *a.shape[2:]), packed())
    mesh = make_mesh(1 + max(schedule.placement.pipes[0]), 2)
    pipeline = Pipeline(model.staged, schedule, mesh, param_specs=model.param_specs)
    step = quick(lambda *args: pipeline.value_and_grad(*args))
    (loss, report), grads = jax.device_get(step(params, batch))
    check_papers(loss, report, config)
    same_gradients(by_row(grads, model.layout), by_row(wanted_from_packed(config)[1], built(config).layout))
    for slot, layer in enumerate(grads["stages"]["layers"]):
        assert not any(np.any(w[model.layout.rows[:, slot] < 0]) for w in jax.tree.leaves(layer))


def test_a_step_turns_matrices_over_once_and_sums_no_gradient_of_that():
    config = dataclasses.replace(CONFIG, dim=24)
    model = built(config, (1, 1), ep_axis="ep", **DROPLESS)
    pipeline = Pipeline(model.staged, dualpipe(2, 4), make_mesh(2, 2), param_specs=model.param_specs)
    params = jax.eval_shape(model.init, jax.random.key(0))
    batch = jax.tree.map(lambda a: a.reshape(4, 2, *a.shape[2:]), packed())
    D, F, num_mine = config.dim, config.expert_hidden, config.num_experts // 2
    # Stages of a rank; layers of the second stage, one of them of the module ahead. The first has one, a dense one.
    stages, layers = 2, 2
    H, N, R, C = config.num_heads, config.qk_nope_dim, config.qk_rope_dim, config.kv_lora_rank
    heads = [(H, N + 2 * R, D), (C + R, H, N + 2 * R), (C, H, config.v_head_dim)]  # queries, keys, values
    values = [leaf.shape for leaf in jax.tree.leaves(pipeline.sketch(params, batch).values) if leaf.ndim == 3]
    experts = [(num_mine, 2 * F, D), (num_mine, D, F)] * layers
    assert sorted(values) == sorted((experts + heads * layers) * stages), "what the stage with most needs"
    sums = {total.shape for total in pipeline.state(params, batch).own.values()}
    added_to = {(num_mine, D, 2 * F), (C, H, N + config.v_head_dim), (H * config.v_head_dim, D)}
    assert added_to <= sums and not sums & set(values)


def test_what_is_made_again_of_heads_and_of_what_was_dispatched():
    """By hand: q (not with keys) and kv of their latents, scores; wide, of two all_to_alls one. No weight's gradient.

    Rotations are no products but on TPU.
    """
    config = dataclasses.replace(CONFIG, q_lora_rank=12, num_mtp_layers=0)
    batch = jax.tree.map(lambda a: a[0], a_batch())
    at = At(batch, jnp.int32(0), jnp.int32(0), None)
    x = jnp.ones((SIZE, SEQ, config.dim))
    counts = []

    def stage(remat):
        model = built(config, PLAN, remat=remat, ep_axis="ep")
        return lambda own, x: model.staged.kinds[model.layout.kinds[1]](own, {}, x, at).x

    def run(own):
        for remat in (None, recompute_keys, recompute_local, recompute_wide):
            plan = split_backward(stage(remat)).trace(own, x)
            counts.append((plan.flops, applied(plan, "backward")["all_to_all"]))
        return jnp.zeros(2)

    model = built(config, PLAN, ep_axis="ep")
    own = jax.eval_shape(lambda: jax.tree.map(lambda w: w[1], model.init(jax.random.key(0))["stages"]))
    in_specs = (model.param_specs["stages"],)
    jax.eval_shape(
        jax.shard_map(run, mesh=make_mesh(1, 2), in_specs=in_specs, out_specs=P("ep"), check_vma=False), own
    )
    (none, exchanges), (keys, no_more), (local, as_many), (wide, more) = counts
    H, N, R, V = config.num_heads, config.qk_nope_dim, config.qk_rope_dim, config.v_head_dim
    queries = config.q_lora_rank * H * (N + R)
    again = queries + config.kv_lora_rank * H * (N + V) + SEQ * H * (N + R)
    assert wide.backward - none.backward == 2 * SIZE * SEQ * again
    assert (wide.forward, wide.weight, more) == (none.forward, none.weight, exchanges + 1)
    assert (local, as_many) == (wide, exchanges)
    assert local.backward - keys.backward == 2 * SIZE * SEQ * queries
    assert (keys.forward, keys.weight, no_more) == (none.forward, none.weight, exchanges)


def test_without_targets_the_last_stage_gives_what_the_final_norm_returns():
    model, params = built(CONFIG, (2,)), a_params(CONFIG, (2,))
    own = jax.tree.map(lambda leaf: leaf[0], params["stages"])
    at = At({"inputs": a_batch()["inputs"][0]}, jnp.int32(0), jnp.int32(0), None)
    out = jax.eval_shape(
        lambda own, shared: model.staged.kinds["only"](own, shared, None, at), own, params["shared"]
    )
    assert out.x.shape == (SIZE, SEQ, CONFIG.dim) and set(out.losses) == {"balance"}
    assert out.metrics["counts"].shape == (2, 4)


def test_a_factor_of_0_leaves_the_balance_loss_out():
    model = deepseek(CONFIG, PLAN, dispatch="capacity", balance_factor=0)
    _, report = jax.eval_shape(reference_loss(model.staged), a_params(), a_batch())
    assert set(report.losses) == {"lm", "mtp_1"}
    assert set(report.metrics) == {"tokens", "mtp_nll", "mtp_tokens", "counts", "dropped"}


def test_init_makes_the_same_weights_for_every_plan_and_zeros_in_empty_slots():
    key = jax.random.key(0)  # not rbg: under vmap its numbers depend on the neighbours
    config = dataclasses.replace(CONFIG, num_layers=4, num_mtp_layers=1)

    def weights(model):
        params = model.init(key)
        slots = [slot["mlp"]["experts"]["gate_up_proj"] for slot in params["stages"]["layers"]]
        return jnp.stack(slots, 1), params["stages"]["routing"], params["shared"]

    one, two = built(config, (4,)), built(config, (2, 2))
    made = quick(lambda: (weights(one), weights(two)))()
    (all_in_one, routing, shared), (in_two, _, shared_in_two) = made
    assert all_in_one.shape == (1, 4, 4, 16, 16) and in_two.shape == (2, 3, 4, 16, 16)
    for row in range(4):
        np.testing.assert_array_equal(in_two[two.layout.slot_of(row)], all_in_one[one.layout.slot_of(row)])
    assert not np.any(in_two[two.layout.rows < 0]) and (two.layout.rows < 0).sum() == 2
    np.testing.assert_allclose(all_in_one.std((0, 2, 3, 4)), config.init_std, rtol=0.15)
    np.testing.assert_array_equal(routing["bias"], np.zeros((1, 4, 4)))
    np.testing.assert_array_equal(shared["norm"]["weight"], np.ones(config.dim))
    for matrix in (shared["embed_tokens"], *shared["lm_head"].values()):
        np.testing.assert_allclose(matrix.std(), config.init_std, rtol=0.15)
    jax.tree.map(np.testing.assert_array_equal, shared, shared_in_two)
    sizes = jax.eval_shape(one.init, key), jax.eval_shape(two.init, key)
    assert num_params(sizes[1]) - num_padding(two) == num_params(sizes[0]) + 2 * 4  # two biases more


def num_padding(model):
    """Parameters of empty slots: zeros that ``num_params`` counts and the model does not have."""
    slots = jax.eval_shape(model.init, jax.random.key(0))["stages"]["layers"]
    return num_params(slots) // model.layout.rows.size * int((model.layout.rows < 0).sum())


def test_parameter_counts_are_the_published_ones():
    for config, billions, tolerance in [
        (v3(num_mtp_layers=1), 671.03 + 11.61, 0.01),
        (v2(), 235.7, 0.05),
        (v2_lite(), 15.71, 0.005),
        (moe_67b(), 67, 0.7),
    ]:
        model = deepseek(config, 16)
        params = jax.eval_shape(model.init, jax.random.key(0))
        found = (num_params(params) - num_padding(model)) / 1e9
        assert abs(found - billions) <= tolerance, (billions, found)
        assert all(leaf.shape[0] == 16 for leaf in jax.tree.leaves(params["stages"]))


def test_experts_and_words_are_shared_out():
    flat = jax.tree_util.tree_flatten_with_path(
        built(ep_axis="ep").param_specs, is_leaf=lambda s: isinstance(s, P)
    )[0]
    sharded = {jax.tree_util.keystr(path): spec for path, spec in flat if spec != P()}
    experts = {
        f"['stages']['layers'][0]['mlp']['experts']['{name}_proj']": P("ep") for name in ("gate_up", "down")
    }
    ends = {f"['shared']{name}": P(None, "ep") for name in ("['embed_tokens']", "['lm_head']['kernel']")}
    assert sharded == experts | ends
    alone = jax.tree.leaves(built().param_specs, is_leaf=lambda s: isinstance(s, P))
    assert all(spec == P() for spec in alone)


@pytest.mark.parametrize("center", [False, True])
def test_update_routing_moves_each_layers_bias_by_its_own_row(center):
    params, layout = a_params(), built().layout
    counts = np.random.default_rng(3).integers(0, 50, (2, 4)).astype(np.int32)
    new = update_routing(params, jnp.asarray(counts), 0.5, center=center)
    step = np.asarray(new["stages"]["routing"]["bias"] - params["stages"]["routing"]["bias"])
    wanted = np.zeros_like(step)
    for row in range(2):
        moves = 0.5 * np.sign(counts[row].mean() - counts[row])
        wanted[layout.slot_of(row)] = moves - (moves.mean() if center else 0)
    np.testing.assert_allclose(step, wanted, atol=1e-6)
    assert not np.any(step[layout.rows < 0])
    new["stages"]["routing"] = params["stages"]["routing"]
    assert jax.tree.all(jax.tree.map(lambda a, b: a is b, new, params))


def test_a_last_stage_of_nothing_but_the_head():
    """Whose experts are all elsewhere: the paper's loss, and figures that know how many sequences there were."""
    config = dataclasses.replace(CONFIG, num_layers=2, num_dense_layers=0, num_mtp_layers=0)
    model, params = built(config, (1, 1, 0)), a_params(config, (1, 1, 0))
    batch = jax.tree.map(lambda a: a[:1], packed())
    run = functools.partial(plain.loss, model=model, mtp_weight=0.0, balance_factor=ALPHA)
    wanted, (terms, _) = quick(run)(params, batch)
    loss, report = quick(reference_loss(model.staged))(params, batch)
    np.testing.assert_allclose(loss, wanted, rtol=1e-5)
    found = figures(report.losses, report.metrics)
    np.testing.assert_allclose(found["balance"], terms["balance"] / ALPHA / config.num_moe_layers, rtol=1e-5)


def test_sequences_too_short_for_a_depth_are_refused():
    batch = jax.tree.map(lambda a: a[..., :1], a_batch())
    with pytest.raises(
        UnfitError, match="sequences of 1 tokens have no target for 1 tokens ahead; give longer"
    ):
        jax.eval_shape(reference_loss(built().staged), a_params(), batch)
