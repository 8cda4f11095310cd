"""The model against Hugging Face transformers: states, logits, router choices, loss and every gradient."""

import dataclasses
import functools
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dualpipe_jax.contract import At
from dualpipe_jax.functional import pure_nnx
from dualpipe_jax.parallel import make_mesh
from models import logits, tiny, weights
from models import moe as moe_module
from models.attention import RMSNorm
from models.blocks import Block, DenseBlock
from models.moe import Dispatch
from models.plan import lay_out
from models.stages import head_kernel
from models.transformer import deepseek
from models.weights.names import entries
from models.weights.tree import columns_of, rotary_order
from tests.models.hugging_face import libraries, make, run, saved, tensors, yarn

TOKENS = np.random.default_rng(0).integers(0, 96, (2, 20))

CASES = {
    "v3, queries compressed, groups, biases, halves rotated, YaRN of unequal mscales": dict(
        rope_interleave=False, attention_bias=True, rope_parameters=yarn(40, 32, mscale=1.0, mscale_all_dim=0.707)
    ),
    "v3, plain queries, one group, tied, eps 1e-3, two shared, not normalised": dict(
        q_lora_rank=None, n_group=1, topk_group=1, n_shared_experts=2, norm_topk_prob=False, tie_word_embeddings=True,
        rms_norm_eps=1e-3,
    ),
    "v2, groups, YaRN": dict(
        version=2, n_group=4, topk_group=2, topk_method="group_limited_greedy", routed_scaling_factor=4.0,
        rope_parameters=yarn(40, 32, mscale=0.707, mscale_all_dim=0.707),
    ),
}  # fmt: skip
THETA = {"rope_type": "default", "rope_theta": 5e4}
MORE = {
    "v3, eight groups of two, no dense layer": dict(n_group=8, topk_group=3, first_k_dense_replace=0),
    "v3, all groups reached, theta 5e4": dict(topk_group=4, rope_parameters=THETA),
    "v3, plain queries, halves rotated": dict(q_lora_rank=None, rope_interleave=False),
    "v3, YaRN 32 with betas of 1": dict(rope_parameters=yarn(32, 4096, beta_fast=1, mscale=1.0, mscale_all_dim=1.0)),
    "v3, YaRN with mscale_all_dim alone": dict(rope_parameters=yarn(4, 16, beta_fast=1, mscale_all_dim=1.0)),
    "v3, YaRN with mscale alone": dict(rope_parameters=yarn(40, 32, mscale=0.707)),
    "v3, eps 1e-5, scale 1": dict(rms_norm_eps=1e-5, routed_scaling_factor=1.0),
    "v2, greedy, plain queries, biases": dict(version=2, q_lora_rank=None, attention_bias=True),
    "v2, one shared expert, tied, no YaRN": dict(version=2, n_shared_experts=1, tie_word_embeddings=True),
}  # fmt: skip


def our_run(config, params, tokens, monkeypatch):
    """As ``hugging_face.run``, and the gradient; block by block, with every router's choice."""
    block = pure_nnx(lambda rngs: Block(config, Dispatch(), rngs))
    dense = pure_nnx(lambda rngs: DenseBlock(config, rngs))
    norm = pure_nnx(lambda rngs: RMSNorm(config.dim, config.norm_eps))
    route, chosen = moe_module.route, []

    def recording(*args):
        found = route(*args)
        chosen.append(jnp.sort(found[0], axis=-1))
        return found

    monkeypatch.setattr(moe_module, "route", recording)

    def loss(params):
        shared, stages = params["shared"], jax.tree.map(lambda w: w[0], params["stages"])
        states = [shared["embed_tokens"][tokens]]
        for layer in shared["layers"]:
            states.append(dense.apply(layer, states[-1], None, None))
        for layer, bias in zip(stages["layers"], stages["routing"]["bias"], strict=True):
            states.append(block.apply(layer, states[-1], bias, None, None, None)[0])
        out = norm.apply(shared["norm"], states[-1]) @ head_kernel(config, shared)
        log_probs = jax.nn.log_softmax(out[:, :-1])
        nll = -jnp.take_along_axis(log_probs, tokens[:, 1:, None], -1)
        return jnp.mean(nll), (out, states, [chosen.pop(0) for _ in stages["layers"]])

    (value, found), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True, allow_int=True))(params)
    return *found, value, gradients


def by_name(config, tree):
    """Our tree's parts under their published names."""
    found = {}
    for entry in entries(config, lay_out(config, [config.num_layers])):
        leaf = functools.reduce(lambda node, key: node[key], entry.path, tree)[entry.at]
        leaf = leaf[..., columns_of(entry, leaf.shape[-1])]
        matrix = leaf.reshape(len(leaf), -1).T if entry.transposed else leaf
        found[entry.name] = np.asarray(matrix), entry.rotary
    return found


def measure(case, folder, monkeypatch):
    """How far the two models are apart, in units of the standard deviation where no other is named."""
    model = make(**case)
    theirs, their_states, their_choice, their_loss = run(model, TOKENS)
    biases = [v for n, v in model.named_buffers() if n.endswith("e_score_correction_bias")]
    assert all((bias < 0).float().mean() > 0.8 for bias in biases)  # a mask of 0 in place of -inf would win
    assert 0.3 < theirs.std() < 30
    their_loss.backward()
    config, params = weights.load(saved(model, folder, max_shard_size="60KB"))
    tokens = jnp.asarray(TOKENS, jnp.int32)
    ours, states, choice, loss, gradients = our_run(config, params, tokens, monkeypatch)
    assert len(choice) == len(their_choice) == config.num_moe_layers

    wanted = tensors((name, p.grad) for name, p in model.named_parameters())
    found = by_name(config, gradients)
    without = {name for name in found if name.endswith("e_score_correction_bias")}
    assert found.keys() - without == wanted.keys()
    halves = not getattr(model.config, "rope_interleave", True)
    apart = []
    for name, gradient in wanted.items():
        got, rotary = found[name]
        if rotary and halves:
            gradient = gradient[rotary_order(rotary, len(gradient))]
        apart.append((np.abs(got - gradient).max(), np.abs(gradient).max()))
    return {
        # Their last is normalised.
        "states": max(np.abs(a - b).max() / b.std() for a, b in zip(states[:-1], their_states, strict=False)),
        "logits": np.abs(ours - theirs).max() / theirs.std(),
        "experts": np.mean([np.array_equal(a, b) for a, b in zip(choice, their_choice, strict=True)]),
        "loss": abs(loss - their_loss.item()),
        "gradients": max(difference for difference, _ in apart),
        "gradients, of their largest": max(difference / size for difference, size in apart if size),
    }


EVERY = [*CASES.values(), *(pytest.param(case, marks=pytest.mark.slow) for case in MORE.values())]


@pytest.mark.parametrize("case", EVERY, ids=[*CASES, *MORE])
def test_equals_transformers(case, tmp_path, monkeypatch):
    errors = measure({"num_hidden_layers": 2} | case, tmp_path, monkeypatch)
    assert errors["states"] < 2e-5 and errors["logits"] < 2e-5, errors
    assert errors["experts"] == 1, errors
    assert errors["loss"] < 1e-5 and errors["gradients"] < 1e-5, errors


def test_logits_of_packed_documents_are_those_of_each_alone(tmp_path):
    """Documents start anywhere in a row, next to others and to padding; transformers sees each by itself."""
    model = make(num_hidden_layers=2, rms_norm_eps=0.03)
    config, params = weights.load(saved(model, tmp_path))
    rows = (  # two documents and padding in a row, and a row of one: tokens, positions, segments
        (np.concatenate([TOKENS[0, :7], TOKENS[1, :9], np.zeros(4, int)]), TOKENS[0]),
        (np.concatenate([np.arange(7), np.arange(9), np.arange(4)]), np.arange(20)),
        (np.repeat([1, 2, 0], [7, 9, 4]), np.ones(20, int)),
    )
    tokens, positions, segments = (np.stack(row).astype(np.int32) for row in rows)
    out = jax.jit(logits, static_argnums=0)(config, params, tokens, positions=positions, segment_ids=segments)
    alone = [run(model, doc[None])[0][0] for doc in (TOKENS[0, :7], TOKENS[1, :9], TOKENS[0])]
    for ours, wanted in zip((out[0, :7], out[0, 7:16], out[1]), alone, strict=True):
        np.testing.assert_allclose(ours, wanted, atol=2e-5 * wanted.std())
    assert np.isfinite(out).all()


def test_logits_say_that_they_take_one_stage():
    config = tiny(num_layers=3)
    params = {"stages": {"layers": [], "routing": {"row": np.zeros((2, 1))}}}
    with pytest.raises(ValueError, match="params are of 2 stages, must be of 1"):
        logits(config, params, jnp.zeros((1, 4), jnp.int32))


def test_a_folder_that_we_wrote_loads_in_transformers(tmp_path):
    """From halves rotated to neighbours rotated, and through bfloat16, which costs what it rounds off."""
    model = make(rope_interleave=False, tie_word_embeddings=True, rope_parameters=yarn(40, 32, mscale=0.7))
    config, params = weights.load(saved(model, tmp_path / "in"))
    weights.save(tmp_path / "out", config, params, max_file_bytes=50_000)
    theirs, info = type(model).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    before, after = run(model, TOKENS)[0], run(theirs.eval(), TOKENS)[0]
    np.testing.assert_allclose(after, before, atol=2e-5 * before.std())

    weights.save(tmp_path / "narrow", config, params, dtype="bfloat16")
    narrow = type(model).from_pretrained(tmp_path / "narrow")
    assert narrow.dtype == libraries()[0].bfloat16
    bias = narrow.model.layers[1].mlp.gate.e_score_correction_bias
    np.testing.assert_array_equal(bias.float(), params["stages"]["routing"]["bias"][0, 0])


def test_predictions_further_ahead_are_those_of_transformers(tmp_path, monkeypatch):
    """Its MTP model reads the folder that we write, and computes what our module does."""
    model, (torch, transformers) = make(num_hidden_layers=2, rms_norm_eps=0.03), libraries()
    config, params = weights.load(saved(model, tmp_path / "in"))
    assert config.num_mtp_layers == 0
    config = dataclasses.replace(config, num_mtp_layers=1)
    last = deepseek(config, 1, mtp_after_norm=True, balance_factor=0)
    rng = np.random.default_rng(1)

    def fill(path, leaf):
        """New numbers for the module: in the last slot, and what stands around its block."""
        if jnp.issubdtype(leaf.dtype, jnp.integer):
            return jnp.asarray(last.layout.rows)
        return jnp.asarray(0.2 * rng.normal(size=leaf.shape), jnp.float32)

    made = jax.tree_util.tree_map_with_path(fill, jax.eval_shape(last.init, jax.random.key(0)))
    layers, bias = params["stages"]["layers"], params["stages"]["routing"]["bias"]
    made["stages"]["layers"][:-1] = layers
    own_bias = made["stages"]["routing"]["bias"][:, -1:] - 0.9
    made["stages"]["routing"]["bias"] = jnp.concatenate([bias, own_bias], axis=1)
    made["shared"] = params["shared"] | {"mtp": made["shared"]["mtp"]}
    weights.save(tmp_path / "out", config, made)

    main = type(model).from_pretrained(tmp_path / "out").eval()
    main._keys_to_ignore_on_load_unexpected = [r"model\.layers\.2.*"]  # theirs knows layer 61 only
    oracle = transformers.modeling_layers.MtpModel.from_pretrained(main).eval()
    with torch.no_grad():
        tokens = torch.tensor(TOKENS)
        behind = main.model(tokens).last_hidden_state[:, :-1]
        wanted = oracle.forward_layer(
            0, behind, torch.arange(19)[None].expand(2, 19), None, input_ids=tokens[:, 1:]
        )
    # The module's loss, and what it would be of the states that transformers gives.
    own = jax.tree.map(lambda w: w[0], made["stages"])
    batch = {"inputs": TOKENS.astype(np.int32), "targets": np.roll(TOKENS, -1, 1).astype(np.int32)}
    at = At(batch, jnp.int32(0), jnp.int32(0), None)
    out = jax.jit(last.staged.kinds["only"])(own, made["shared"], None, at)
    log_probs = jax.nn.log_softmax(jnp.asarray(wanted.numpy()) @ made["shared"]["lm_head"]["kernel"])
    nll = -jnp.take_along_axis(log_probs, batch["targets"][:, 1:, None], -1)
    np.testing.assert_allclose(out.metrics["mtp_nll"], [jnp.sum(nll)], rtol=1e-5)


def test_reading_holds_one_tensor_at_a_time(tmp_path):
    """Of a checkpoint that transformers cut into files: what is held beyond the arrays themselves."""
    sizes = dict(hidden_size=256, vocab_size=4096, moe_intermediate_size=256, intermediate_size=512)
    bfloat16 = libraries()[0].bfloat16
    model = make(dtype=bfloat16, **sizes).to(bfloat16)
    files = list(saved(model, tmp_path, max_shard_size="2MB").glob("*.safetensors"))
    largest_file = max(file.stat().st_size for file in files)
    largest = max(stored.nbytes for stored in weights.inspect(tmp_path)[1].tensors.values())
    assert len(files) > 6 and largest >= 2 * 4096 * 256
    mesh = make_mesh(2, 4)
    tracemalloc.start()
    _, params = weights.load(tmp_path, stages=2, mesh=mesh)
    kept, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    arrays = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    assert arrays > 6 * largest_file
    assert peak - max(kept, 0) < 2 * largest_file + largest
    assert kept < 1.2 * arrays  # the arrays are the very memory that was read into
