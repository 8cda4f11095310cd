"""Checkpoints in and out: bit for bit, placed and sharded, FP8, and whatever can be wrong with one."""

import dataclasses
import functools
import json
import re
import struct
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from safetensors.numpy import load_file, save_file

from dualpipe_jax.engine.stages import PlacedStages, to_placed
from dualpipe_jax.parallel import make_mesh
from dualpipe_jax.schedule import dualpipe_v
from models import deepseek, layer_plan, tiny, weights
from models.weights import WeightsError, reading
from models.weights.config_json import from_json, to_json
from models.weights.files import DTYPES, Folder, Reader
from models.weights.settings import read_settings
from models.weights.tree import leaves_of
from tests.two_processes import what_both_say

CONFIG = tiny(
    vocab=64, dim=16, num_layers=6, num_dense_layers=1, num_heads=2, q_lora_rank=12, kv_lora_rank=8,
    qk_nope_dim=8, qk_rope_dim=4, v_head_dim=6, dense_hidden=20, expert_hidden=10, num_experts=4, top_k=2,
    num_groups=2, top_groups=1, attention_bias=True, num_mtp_layers=1,
)  # fmt: skip


def random_params(config, stages=1):
    """Numbers that bfloat16 holds, so that every type of file can; empty slots stay zero."""
    # Whoever changes the tree has one of his own.
    return jax.tree.map(lambda leaf: leaf, made_once(config, stages))


@functools.cache
def made_once(config, stages):
    model, rng = deepseek(config, stages), np.random.default_rng(0)

    def fill(path, leaf):
        if jnp.issubdtype(leaf.dtype, jnp.integer):
            return jnp.asarray(model.layout.rows)
        value = rng.normal(size=leaf.shape).astype(ml_dtypes.bfloat16).astype(np.float32)
        if path[0].key == "stages":
            in_slot = path[1].key == "layers"
            value[(model.layout.rows[:, path[2].idx] if in_slot else model.layout.rows) < 0] = 0
        return jnp.asarray(value)

    return jax.tree_util.tree_map_with_path(fill, jax.eval_shape(model.init, jax.random.key(0)))


@pytest.mark.parametrize(
    "dtype, changes",
    [
        ("float32", {}),
        (
            "bfloat16",
            {"q_lora_rank": 0, "tie_embeddings": True, "num_mtp_layers": 2, "num_shared_experts": 0},
        ),
    ],
    ids=["v3", "tied"],
)
def test_what_is_saved_is_loaded_bit_for_bit(tmp_path, dtype, changes):
    config = dataclasses.replace(CONFIG, **changes)
    params = random_params(config)
    weights.save(tmp_path / "out", config, params, dtype=dtype, max_file_bytes=10_000)
    tensors = [load_file(file) for file in (tmp_path / "out").glob("*.safetensors")]
    assert len(tensors) > 3
    modes = {file.stat().st_mode & 0o777 for file in (tmp_path / "out").iterdir()}
    assert modes == {(tmp_path / "out").stat().st_mode & 0o666}
    # Selection biases are never narrowed.
    for name, tensor in (pair for file in tensors for pair in file.items()):
        assert tensor.dtype == ("float32" if name.endswith("e_score_correction_bias") else dtype), name
    got_config, got = weights.load(tmp_path / "out")
    compute = jnp.bfloat16 if dtype == "bfloat16" else jnp.float32
    assert got_config == dataclasses.replace(config, compute_dtype=compute)
    chex.assert_trees_all_equal_shapes_and_dtypes(got, params)
    chex.assert_trees_all_equal(got, params)
    lazy_config, lazy = weights.open_lazily(tmp_path / "out")
    assert lazy_config == got_config
    chex.assert_trees_all_equal(jax.tree.map(np.asarray, lazy), params)
    weights.save(tmp_path / "again", got_config, got, dtype=dtype, max_file_bytes=10_000)
    files = sorted(p.name for p in (tmp_path / "out").iterdir())
    assert files == sorted(p.name for p in (tmp_path / "again").iterdir())
    for name in files:
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "again" / name).read_bytes(), name


def test_names_and_layouts_are_the_published_ones(tmp_path):
    config = dataclasses.replace(CONFIG, num_layers=2)
    params = random_params(config)
    weights.save(tmp_path, config, params)
    (file,) = tmp_path.glob("*.safetensors")
    there = load_file(file)
    shared, (layer, _) = params["shared"], params["stages"]["layers"]
    biases = params["stages"]["routing"]["bias"][0]
    experts = layer["mlp"]["experts"]
    wanted = {
        "model.embed_tokens.weight": shared["embed_tokens"],
        "lm_head.weight": shared["lm_head"]["kernel"].T,
        "model.layers.0.mlp.up_proj.weight": shared["layers"][0]["mlp"]["up_proj"]["kernel"].T,
        "model.layers.1.mlp.experts.2.gate_proj.weight": experts["gate_up_proj"][
            0, 2, :, : CONFIG.expert_hidden
        ].T,
        "model.layers.1.mlp.experts.2.up_proj.weight": experts["gate_up_proj"][
            0, 2, :, CONFIG.expert_hidden :
        ].T,
        "model.layers.1.mlp.experts.3.down_proj.weight": experts["down_proj"][0, 3].T,
        "model.layers.1.mlp.gate.weight": layer["mlp"]["gate"][0].T,
        "model.layers.1.mlp.gate.e_score_correction_bias": biases[0],
        "model.layers.2.eh_proj.weight": shared["mtp"][0]["eh_proj"]["kernel"].T,
        "model.layers.2.shared_head.norm.weight": shared["mtp"][0]["norm"]["weight"],
        "model.layers.2.mlp.gate.e_score_correction_bias": biases[1],
    }
    for name, value in wanted.items():
        np.testing.assert_array_equal(there[name], value)


def test_tensors_go_straight_to_the_devices_that_hold_them(tmp_path):
    """Two stages on a device, of which the second lie in reverse."""
    schedule, stages = dualpipe_v(2, 4), (2, 2, 1, 1)
    params = random_params(CONFIG, stages)
    how = dict(stages=stages, arrange=lambda s: to_placed(s, schedule.placement))
    weights.save(tmp_path / "in", CONFIG, params, stages=stages)
    _, got = weights.load(tmp_path / "in", mesh=make_mesh(2, 4), **how)
    assert isinstance(got["stages"], PlacedStages)
    wanted = to_placed(params["stages"], schedule.placement)
    chex.assert_trees_all_equal(got["stages"], wanted)
    chex.assert_trees_all_equal(*({k: v for k, v in t.items() if k != "stages"} for t in (got, params)))
    local = got["stages"].local[0]["layers"][0]
    assert local["mlp"]["experts"]["gate_up_proj"].sharding.spec == P("pp", "ep")
    assert local["self_attn"]["o_proj"]["kernel"].sharding.spec == P("pp")
    # In pieces, put together to be written.
    assert got["shared"]["embed_tokens"].sharding.spec == P(None, "ep")
    weights.save(tmp_path / "out", CONFIG, got, **how)
    before, after = (sorted((tmp_path / name).iterdir()) for name in ("in", "out"))
    assert [file.read_bytes() for file in before] == [file.read_bytes() for file in after]


@pytest.mark.parametrize("columns", [(0, 20), (3, 9), (7, 13), (10, 20)])
def test_columns_of_two_tensors_that_are_one_matrix_of_ours(tmp_path, columns):
    """An expert's gate and up, of 10 columns each."""
    config = dataclasses.replace(CONFIG, num_layers=2, num_mtp_layers=0)
    params = random_params(config)
    weights.save(tmp_path, config, params)
    leaves, _ = leaves_of(deepseek(config, 1), None)
    gate_up = params["stages"]["layers"][0]["mlp"]["experts"]["gate_up_proj"]
    (leaf,) = (leaf for leaf in leaves if leaf.shape == gate_up.shape)
    with Reader(weights.inspect(tmp_path)[1].tensors, None) as reader:
        got = reading._read_part(leaf, ((0, 1), (1, 3), (4, 16), columns), reader, True)
    np.testing.assert_array_equal(got, gate_up[:, 1:3, 4:, slice(*columns)])


def test_devices_that_share_a_part_do_not_share_its_memory_once_it_is_donated(tmp_path):
    """A CPU device may take a host's array over as it is; training then donates it on every device."""
    config = dataclasses.replace(CONFIG, num_layers=2, num_mtp_layers=0)
    params = random_params(config)
    weights.save(tmp_path, config, params)
    _, got = weights.load(tmp_path, mesh=make_mesh(1, 4))
    step = jax.jit(lambda p: jax.tree.map(lambda w: w * 2 + 1, p), donate_argnums=0)
    layers = step(step(got["shared"]["layers"]))
    for leaf, before in zip(*map(jax.tree.leaves, (layers, params["shared"]["layers"])), strict=True):
        for shard in leaf.addressable_shards:
            np.testing.assert_array_equal(shard.data, before * 4 + 3)


def test_progress_ends_at_all_bytes(tmp_path):
    seen = []
    params = random_params(CONFIG)
    weights.save(tmp_path, CONFIG, params, max_file_bytes=30_000, progress=lambda *n: seen.append(n))
    assert len(seen) > 2
    total = json.loads((tmp_path / "model.safetensors.index.json").read_text())["metadata"]["total_size"]
    assert seen[-1] == (total, total)
    seen.clear()
    weights.load(tmp_path, progress=lambda *n: seen.append(n))
    assert seen[-1] == (total, total) and [n for n, _ in seen] == sorted(n for n, _ in seen)
    seen.clear()
    weights.load(tmp_path, mtp=False, progress=lambda *n: seen.append(n))
    assert seen[-1][0] == seen[-1][1] < total


# ------------------------------------------------------------------------------------------------- FP8


def write(folder, tensors, **settings):
    """A checkpoint in one file, its configuration ours with some settings changed."""
    folder.mkdir(exist_ok=True)
    data = to_json(CONFIG, "float32") | settings
    (folder / "config.json").write_text(json.dumps(data))
    save_file(tensors, folder / "model.safetensors")


def write_raw(file, tensors):
    """A safetensors file of types that its library does not take from NumPy."""
    header, at = {}, 0
    codes = {np.dtype(dtype): code for code, dtype in DTYPES.items()}
    for name, value in tensors.items():
        ends = [at, at := at + value.nbytes]
        header[name] = {"dtype": codes[value.dtype], "shape": list(value.shape), "data_offsets": ends}
    text = json.dumps(header).encode()
    data = b"".join(np.ascontiguousarray(value).tobytes() for value in tensors.values())
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)


def all_tensors(tmp_path):
    weights.save(tmp_path / "whole", CONFIG, random_params(CONFIG))
    (file,) = (tmp_path / "whole").glob("*.safetensors")
    return load_file(file)


def quantised(tensors):
    """Their matrices in FP8 with scales, in blocks of 5 x 7, the last partial; and what they stand for, in float32.

    As the paper has it: element [i, j] by scale [i // 5, j // 7]. Rows 9 and 10, of two blocks, change places where
    halves are rotated.
    """
    rng, small, wide = np.random.default_rng(1), dict(tensors), dict(tensors)
    for name in [n for n in tensors if n.endswith("proj.weight") or n.endswith("with_mqa.weight")]:
        rows, columns = tensors[name].shape
        eight = tensors[name].astype(ml_dtypes.float8_e4m3fn)
        scales = rng.uniform(0.5, 2, (-(-rows // 5), -(-columns // 7))).astype(np.float32)
        small |= {name: eight, f"{name}_scale_inv": scales}
        at = np.arange(rows)[:, None] // 5, np.arange(columns) // 7
        wide[name] = eight.astype(np.float32) * scales[at]
    return small, wide


@pytest.mark.parametrize("interleave", [True, False], ids=["neighbours rotated", "halves rotated"])
def test_fp8_is_multiplied_by_the_scale_of_its_block(tmp_path, interleave):
    """Before rows are put in our order; what is saved again has that order, and no settings of FP8."""
    small, wide = quantised(all_tensors(tmp_path))
    fp8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [5, 7], "activation_scheme": "dynamic"}
    settings = {"quantization_config": fp8, "rope_interleave": interleave}
    write(tmp_path / "fp8", {"unused": np.zeros(1)}, **settings)
    write_raw(tmp_path / "fp8" / "model.safetensors", small)
    write(tmp_path / "wide", wide, rope_interleave=interleave)
    config, params = weights.load(tmp_path / "fp8")
    chex.assert_trees_all_equal(params, weights.load(tmp_path / "wide")[1])
    weights.save(tmp_path / "again", config, params)
    got = load_file(tmp_path / "again" / "model-00001-of-00001.safetensors")
    if interleave:
        chex.assert_trees_all_equal(got, wide)
    assert "quantization_config" not in json.loads((tmp_path / "again" / "config.json").read_text())


# ------------------------------------------------------------------------------------ what can be wrong


def refused(folder, **how):
    with pytest.raises(WeightsError) as error:
        weights.load(folder, **how)
    return str(error.value)


def test_everything_that_is_wrong_with_tensors_is_listed_at_once(tmp_path):
    tensors = all_tensors(tmp_path)
    del tensors["model.norm.weight"], tensors["model.layers.3.mlp.experts.2.up_proj.weight"]
    tensors["model.layers.0.self_attn.o_proj.weight"] = np.zeros((16, 13), np.float32)
    tensors["model.layers.1.mlp.gate.weight"] = np.zeros((4, 16), np.int32)
    tensors["model.layers.9.mlp.up_proj.weight"] = np.zeros((2, 2), np.float32)
    tensors["model.layers.2.self_attn.o_proj.weight_scale_inv"] = np.ones((1, 1), np.float32)
    write(tmp_path / "bad", tensors)
    message = refused(tmp_path / "bad")
    for line in [
        "model.norm.weight: missing, must be [16]",
        "model.layers.3.mlp.experts.2.up_proj.weight: missing, must be [10, 16]",
        "model.layers.0.self_attn.o_proj.weight: [16, 13], must be [16, 12]",
        "model.layers.1.mlp.gate.weight: type I32, must be one of F32, F16, BF16, F8_E4M3",
        "model.layers.9.mlp.up_proj.weight: the model has no such tensor",
        "model.layers.2.self_attn.o_proj.weight_scale_inv: scales of a tensor that is not FP8",
    ]:
        assert line in message
    assert message.count("\n") == 6


def test_cut_off_and_missing_files_are_named(tmp_path):
    weights.save(tmp_path, CONFIG, random_params(CONFIG), max_file_bytes=20_000)
    files = sorted(tmp_path.glob("*.safetensors"))
    files[0].unlink()
    files[1].write_bytes(files[1].read_bytes()[:-10])
    files[2].write_bytes(b"\xff" * 20)
    files[3].write_bytes(files[3].read_bytes().replace(b'{"', b"!!", 1))
    (tmp_path / "link.safetensors").symlink_to(tmp_path / "blob")  # as in a cache that was copied in part
    message = refused(tmp_path)
    assert "link.safetensors: [Errno 2] No such file" in message
    assert f"{files[0].name}: missing, model.safetensors.index.json names it" in message
    assert f"cut off, it ends at byte {files[1].stat().st_size + 10} of the" in message
    assert f"{files[2].name}: cut off or no safetensors: 20 bytes" in message
    assert f"{files[3].name}: Expecting value" in message


@pytest.mark.parametrize(
    "about",
    [
        {"data_offsets": [0.0, 64.0]},
        {"data_offsets": [0]},
        {"shape": "abc"},
        {"shape": [16.0]},
        {"dtype": ["F32"]},
    ],
)
def test_headers_that_are_no_description_are_said(tmp_path, about):
    described = {"model.norm.weight": {"dtype": "F32", "shape": [16], "data_offsets": [0, 64]} | about}
    write(tmp_path, {"unused": np.zeros(1)})
    for header in (json.dumps(described), "[" * 200_000):
        content = struct.pack("<Q", len(header)) + header.encode() + bytes(64)
        (tmp_path / "model.safetensors").write_bytes(content)
        told = "model.norm.weight: (model.safetensors describes it as|type)" if "{" in header else "recursion"
        assert re.search(told, refused(tmp_path))


def test_twice_there_is_wrong_too(tmp_path):
    write(tmp_path / "two", all_tensors(tmp_path))
    save_file({"model.norm.weight": np.ones(16, np.float32)}, tmp_path / "two" / "other.safetensors")
    assert "model.norm.weight: both in model.safetensors and other.safetensors" in refused(tmp_path / "two")


def test_fp8_without_scales_or_settings_is_refused(tmp_path):
    tensors = all_tensors(tmp_path)
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = tensors[name].astype(ml_dtypes.float8_e4m3fn)
    write(tmp_path / "q", {"unused": np.zeros(1)})
    write_raw(tmp_path / "q" / "model.safetensors", tensors)
    assert f"{name}: FP8, but config.json has no quantization_config" in refused(tmp_path / "q")
    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    write(tmp_path / "r", {"unused": np.zeros(1)}, quantization_config=fp8)
    write_raw(tmp_path / "r" / "model.safetensors", tensors)
    assert f"{name}_scale_inv: missing, the scales of an FP8 tensor" in refused(tmp_path / "r")
    tensors[f"{name}_scale_inv"] = np.ones((2, 1), np.float32)
    write_raw(tmp_path / "r" / "model.safetensors", tensors)
    assert f"{name}_scale_inv: [2, 1], must be [1, 1] for blocks of [128, 128]" in refused(tmp_path / "r")


def test_pickles_are_not_read(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(to_json(CONFIG, "float32")))
    (tmp_path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch gone'\ntR.")
    message = refused(tmp_path)
    assert "no *.safetensors file (there is pytorch_model.bin, which is not read)" in message
    assert "model.norm.weight: missing" in message


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"hidden_size": None}, "hidden_size is None, must be a whole number of at least 1"),
        ({"model_type": "llama"}, "model_type is 'llama', must be 'deepseek_v3' or 'deepseek_v2'"),
        ({"hidden_act": "gelu", "moe_layer_freq": 2}, "hidden_act is 'gelu', must be 'silu'\n  moe_layer_freq is 2"),
        ({"scoring_func": "softmax"}, "scoring_func is 'softmax', must be 'sigmoid' for deepseek_v3"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "rope type is 'linear', must be 'yarn'"),
        ({"num_key_value_heads": 1}, "num_key_value_heads is 1, must be num_attention_heads"),
        ({"topk_group": 5}, "top_groups 5 must lie between 1 and num_groups 2"),
        ({"quantization_config": {"quant_method": "gptq"}}, "must be fp8 of e4m3 with a weight_block_size"),
        ({"head_dim": 8}, "head_dim is 8, must be qk_rope_head_dim"),
        ({"rope_scaling": {"type": "yarn", "factor": 2, "attention_factor": 3}}, "attention_factor is 3, must be"),
        ({"rope_scaling": {"type": "yarn", "factor": "x"}}, "rope_scaling: factor is 'x', must be a number"),
        ({"rope_parameters": [1]}, "rope_parameters is [1], must be an object or null"),
        ({"rope_scaling": {"type": "yarn", "factor": 2}, "rope_parameters": {"rope_type": "default"}},
         "rope_parameters and rope_scaling are both there and differ: leave one of them out"),
        ({"quantization_config": "fp8"}, "must be fp8 of e4m3 with a weight_block_size"),
        ({"rope_scaling": {"type": "yarn", "factor": float("nan")}}, "yarn_factor nan must be at least 1"),
        ({"rope_theta": "x", "max_position_embeddings": "9"},
         "rope_theta is 'x', must be a number\n  max_position_embeddings is '9', must be a number"),
        ({"first_k_dense_replace": 6}, "first_k_dense_replace is 6, must be below num_hidden_layers"),
        ({"routed_scaling_factor": None, "topk_group": None},
         "routed_scaling_factor is missing\n  topk_group is missing"),
    ],
)  # fmt: skip
def test_configurations_of_other_models_are_refused(changes, message):
    with pytest.raises(WeightsError) as error:
        from_json(to_json(CONFIG, "float32") | changes)
    assert message in str(error.value)


def test_missing_settings_are_all_named(tmp_path):
    data = to_json(CONFIG, "float32")
    del data["vocab_size"], data["kv_lora_rank"]
    with pytest.raises(WeightsError, match="vocab_size is missing\n  kv_lora_rank is missing"):
        from_json(data)
    assert "config.json: [Errno 2]" in refused(tmp_path)


CONFIGS = {
    "yarn": dict(yarn_factor=40.0, yarn_mscale=0.707, yarn_mscale_all_dim=1.0, yarn_original_seq=32),
    "yarn, none given": dict(yarn_factor=4.0, yarn_mscale=0.0, yarn_mscale_all_dim=0.0, rope_theta=5e4),
    "v2": dict(score="softmax", normalize_top_k=False, attention_bias=False, norm_eps=1e-5),
    "nothing rotated": dict(qk_rope_dim=0),
    "rotated alone, nothing dense": dict(qk_nope_dim=0, num_dense_layers=0, dense_hidden=0),
    "v2, greedy": dict(score="softmax", normalize_top_k=False, num_groups=1, tie_embeddings=True),
}


def test_configurations_go_both_ways():
    for name, changes in CONFIGS.items():
        config = dataclasses.replace(CONFIG, **changes)
        assert from_json(json.loads(json.dumps(to_json(config, "float32")))).config == config, name


def test_what_the_published_format_cannot_hold_is_refused(tmp_path):
    softmax = dataclasses.replace(CONFIG, score="softmax")
    with pytest.raises(WeightsError, match="normalize_top_k must be False"):
        weights.save(tmp_path, softmax, random_params(softmax))
    v2 = dataclasses.replace(softmax, normalize_top_k=False)
    with pytest.raises(WeightsError, match="deepseek_v2 has no selection bias, it must be zero"):
        weights.save(tmp_path, v2, random_params(v2))
    params = random_params(CONFIG)
    params["shared"]["norm"]["weight"] = jnp.ones(3)
    del params["shared"]["embed_tokens"]
    with pytest.raises(WeightsError) as error:
        weights.save(tmp_path, CONFIG, params)
    assert "['shared']['embed_tokens']: missing, must be [64, 16]" in str(error.value)
    assert "['shared']['norm']['weight']: [3], must be [16]" in str(error.value)
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(WeightsError, match="model.safetensors: is there already"):
        weights.save(tmp_path, CONFIG, random_params(CONFIG))


def test_layers_that_lie_elsewhere_are_not_saved_under_others_names(tmp_path):
    """All shapes fit: both plans have three stages of at most three layers with experts."""
    config = dataclasses.replace(CONFIG, num_layers=9, num_mtp_layers=0)
    plan, own = (4, 3, 2), layer_plan(config, 3)
    params = random_params(config, plan)
    assert own != plan
    chex.assert_trees_all_equal_shapes(params, random_params(config, own))
    with pytest.raises(WeightsError, match=re.escape(f"layers do not lie as in the plan {own}")):
        weights.save(tmp_path, config, params)
    assert not list(tmp_path.iterdir())
    weights.save(tmp_path, config, params, stages=plan)
    chex.assert_trees_all_equal(weights.load(tmp_path, stages=plan)[1], params)


@pytest.mark.slow
def test_on_two_processes_each_reads_what_it_holds_and_writes_its_part(tmp_path):
    plan = (4, 2)  # three slots a stage, none empty
    params = random_params(CONFIG, plan)
    weights.save(tmp_path / "in", CONFIG, params, stages=plan)
    program = Path(__file__).with_name("weights_process.py")
    said = what_both_say(program, arguments=(tmp_path / "in", tmp_path / "out"), devices=2)
    index = json.loads((tmp_path / "in" / "model.safetensors.index.json").read_text())
    total = index["metadata"]["total_size"]
    shared = params["shared"]
    twice = shared["embed_tokens"].nbytes + shared["lm_head"]["kernel"].nbytes  # for each device's part
    stages = sum(leaf.nbytes for leaf in jax.tree.leaves(params["stages"]["layers"]))
    for stage, one in enumerate(said):
        assert one["read"][0] == one["read"][1]
        assert abs(one["read"][0] - (total - stages / 2 + twice)) < 100  # but for the biases
        wanted = params["stages"]["layers"][0]["mlp"]["experts"]["gate_up_proj"][stage]
        halves = [float(np.sum(half)) for half in np.split(np.asarray(wanted), 2)]
        np.testing.assert_allclose(sorted(v for _, v in one["parts"]), sorted(halves), rtol=1e-4)
        assert {start for start, _ in one["parts"]} == {stage}
    written = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert written["metadata"] == index["metadata"]
    chex.assert_trees_all_equal(weights.load(tmp_path / "out", stages=plan)[1], params)


def test_json_that_is_nested_too_deep_is_a_complaint(tmp_path):
    for name in ("config.json", "model.safetensors.index.json"):
        (tmp_path / name).write_text("[" * 200_000)
    with pytest.raises(WeightsError, match=f"{tmp_path}:\n  config.json: "):
        read_settings(tmp_path / "config.json")
    assert any(text.startswith("model.safetensors.index.json: ") for text in Folder(tmp_path).complaints)
