"""Blocks on disk: another engine reuses them and answers alike; what is damaged or another's is never used."""

import dataclasses
import functools
import os
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dualpipe_jax.arguments import ArgumentError
from models import Dispatch, Kernels
from models.decode import Engine, Limits, PrefixFolder, SamplingParams, decoder
from models.decode.blocks import keys_of
from models.decode.prefix_cache import FORMAT, DiskBlocks, model_digest
from tests.models.decode.small_models import random_params, small

CONFIG = small(num_groups=1, num_mtp_layers=1)
LIMITS = Limits(max_requests=3, max_positions=24, block_size=4, num_blocks=14, chunk_size=4, max_prefill=8)
PROMPT = np.random.default_rng(0).integers(0, CONFIG.vocab, 14).astype(np.int32)
NUM = 6
KEYS = [bytes([n]) * 32 for n in range(40)]
SHAPE = (2, 4, 3)


def engine(folder=None, seed=0, **how):
    return Engine(decoder(CONFIG), random_params(CONFIG, seed), LIMITS, prefixes=folder, **how)


def answer(serving, prompt=PROMPT):
    serving.add(prompt, SamplingParams(max_tokens=NUM))
    (one,) = serving.run()
    if serving._disk_blocks:
        serving._disk_blocks.flush()
    return one.tokens, one.num_reused


@functools.cache
def wanted():
    return answer(engine())[0]


@pytest.fixture
def warnings():
    return []


@pytest.fixture
def folder(tmp_path, warnings):
    return PrefixFolder(tmp_path / "kept", warn=warnings.append)


def files(folder):
    return sorted(folder.path.glob("*/*"))


def test_another_engine_reuses_what_is_kept_and_answers_alike(folder, warnings):
    assert answer(engine(folder)) == (wanted(), 0)
    text = [*PROMPT, *wanted()]
    assert [file.name for file in files(folder)] == sorted(
        f"{key.hex()}.safetensors" for key in keys_of(text[:-1], LIMITS.block_size)
    )
    second = engine(folder)
    assert answer(second) == (wanted(), 12)
    assert answer(second) == (wanted(), 12), "now from its own cache"
    more = np.asarray([*text, 5])
    serving = engine(folder)
    serving.add(more, SamplingParams(max_tokens=2))
    assert serving.run()[0].num_reused == 16
    assert len(serving._scheduler.blocks) == LIMITS.num_blocks and not warnings


def test_with_drafts_the_modules_latents_are_kept_too(folder):
    first, second = answer(engine(folder, drafts=True)), answer(engine(folder, drafts=True))
    assert (first, second) == ((wanted(), 0), (wanted(), 12))
    assert answer(engine(folder)) == (wanted(), 0), "without drafts they would lack the module's"


def test_other_weights_numbers_or_types_are_other_files(folder, warnings):
    answer(engine(folder))
    assert answer(engine(folder, seed=1))[1] == 0
    assert len(list(folder.path.iterdir())) == 2 and not warnings
    params = random_params(CONFIG)
    wide = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    different = [model_digest(CONFIG, params), model_digest(CONFIG, params, True), model_digest(CONFIG, wide)]
    different += [model_digest(dataclasses.replace(CONFIG, norm_eps=1e-5), params)]
    assert len(set(different)) == 4 and different[0] == model_digest(CONFIG, random_params(CONFIG))


def test_what_a_model_rounds_otherwise_is_other_files(folder):
    """Latents of experts in eight bits are not those of experts in 32, though config and weights are the same."""
    built = [
        decoder(CONFIG),
        decoder(CONFIG, kernels=Kernels(matmul="float8")),
        decoder(CONFIG, dispatch=Dispatch(payload="float8")),
        decoder(CONFIG, dispatch=Dispatch(factor=1.0)),
        decoder(CONFIG, mtp_after_norm=True),
    ]
    found = {
        Engine(model, random_params(CONFIG), LIMITS, prefixes=folder)._disk_blocks._model for model in built
    }
    assert len(found) == 5


def flip(file):
    content = bytearray(file.read_bytes())
    content[-7] ^= 4
    file.write_bytes(content)


def another_block(file):
    first, second, *_ = sorted(file.parent.iterdir())
    file.write_bytes((second if file == first else first).read_bytes())


def a_folder(file):
    file.unlink()
    file.mkdir()


@pytest.mark.parametrize(
    "spoil, message",
    [
        (lambda file: file.write_bytes(file.read_bytes()[:-5]), "is left aside: "),
        (flip, "is left aside: it is damaged: its checksum is another"),
        (lambda file: file.write_bytes(b""), "is left aside: "),
        (lambda file: file.write_text("no tensors at all, but long enough for a header"), "is left aside: "),
        (another_block, "is left aside: its key is another's; was it renamed?"),
        (a_folder, "is left aside: "),
    ],
    ids=["cut", "flipped", "empty", "text", "another", "folder"],
)  # fmt: skip
def test_a_file_that_will_not_do_is_never_used_and_written_anew(folder, warnings, spoil, message):
    kept = disk_blocks(folder)
    blocks = np.random.default_rng(1).normal(size=(3, *SHAPE)).astype(np.float32)
    for key, block in zip(KEYS, blocks, strict=False):
        kept.write(key, jnp.asarray(block))
    kept.flush()
    file = folder.path / "model" / f"{KEYS[1].hex()}.safetensors"
    spoil(file)
    assert kept.read(KEYS[1]) is None and warnings[0].startswith(str(file)) and message in warnings[0]
    assert kept.should_write(KEYS[1]) and not kept.should_write(KEYS[0])
    for n in (0, 2):
        np.testing.assert_array_equal(kept.read(KEYS[n]), blocks[n])
    kept.write(KEYS[1], jnp.asarray(blocks[1]))
    kept.flush()
    if spoil is a_folder:
        assert "blocks are not kept: " in warnings[1]
    else:
        np.testing.assert_array_equal(kept.read(KEYS[1]), blocks[1])
        assert len(warnings) == 1


def test_an_engine_computes_what_a_damaged_file_does_not_give(folder, warnings):
    answer(engine(folder))
    second = keys_of(PROMPT, LIMITS.block_size)[1].hex()
    (file,) = folder.path.glob(f"*/{second}.safetensors")
    flip(file)
    assert answer(engine(folder)) == (wanted(), 4) and len(warnings) == 1
    assert answer(engine(folder)) == (wanted(), 12) and len(warnings) == 1


def disk_blocks(folder, model="model", shape=SHAPE, dtype=np.float32):
    return DiskBlocks(folder, model, shape, dtype)


@pytest.mark.parametrize(
    "how, names",
    [
        ({"shape": (2, 4, 4)}, "shape"),
        ({"dtype": np.int32}, "dtype"),
        ({"shape": (6, 4), "dtype": "int8"}, "dtype, shape"),
    ],
)
def test_a_file_of_the_same_name_for_another_shape_or_type(folder, warnings, how, names):
    first = disk_blocks(folder)
    first.write(KEYS[0], jnp.ones(SHAPE))
    first.flush()
    assert disk_blocks(folder, **how).read(KEYS[0]) is None
    assert f"is left aside: its {names} is another's" in warnings[0]


def test_bfloat16_comes_back_bit_for_bit(folder):
    kept = disk_blocks(folder, dtype=jnp.bfloat16)
    block = jnp.asarray(np.random.default_rng(0).normal(size=SHAPE), jnp.bfloat16).at[0, 0, 0].set(-0.0)
    kept.write(KEYS[0], block)
    kept.flush()
    found = kept.read(KEYS[0])
    assert found.dtype == jnp.bfloat16
    np.testing.assert_array_equal(found.view(np.uint16), np.asarray(block).view(np.uint16))


def test_a_folder_stays_within_its_bytes_and_loses_what_nobody_used_for_longest(tmp_path):
    folder = PrefixFolder(tmp_path, max_bytes=12_000)
    foreign = [tmp_path / "mine.txt", tmp_path / "notes" / "mine.txt"]
    model = "0" * 32
    for file in foreign:
        file.parent.mkdir(exist_ok=True)
        file.write_text("x" * 5000)
    parts = [tmp_path / model / f"{KEYS[30].hex()}.safetensors.{'a' * 31}{n}.part" for n in range(2)]
    parts[0].parent.mkdir()
    for part in parts:
        part.write_bytes(bytes(10))
    os.utime(parts[0], (1, 1))
    kept = disk_blocks(folder, model)
    for n, key in enumerate(KEYS):
        kept.write(key, jnp.full(SHAPE, n, jnp.float32))
        kept.flush()
        assert sum(file.stat().st_size for file in (tmp_path / model).iterdir()) <= 12_000
        now = time.time() - 1000 + n
        os.utime(tmp_path / model / f"{key.hex()}.safetensors", (now, now))
        assert kept.read(KEYS[0])[0, 0, 0] == 0, "used all the time"
    left = [n for n, key in enumerate(KEYS) if kept.read(key) is not None]
    assert left == [0, *range(41 - len(left), 40)] and len(left) > 5
    assert all(file.exists() for file in foreign) and [part.exists() for part in parts] == [False, True]


@pytest.mark.parametrize("name", ["file", "x" * 300], ids=["file", "not to be looked at"])
def test_no_room_on_the_disk_is_said_once_and_harms_nobody(tmp_path, warnings, name):
    """A name that is too long stands for rights that are missing, because tests may run as root."""
    (tmp_path / "file").write_text("in the way")
    folder = PrefixFolder(tmp_path / name, warn=warnings.append)
    assert answer(engine(folder)) == (wanted(), 0)
    said = [text for text in warnings if "is left aside" not in text]
    assert len(said) == 1 and f"{tmp_path}/{name}: blocks are not kept: " in said[0]


def test_limits_of_a_folder(tmp_path):
    with pytest.raises(ValueError, match="PrefixFolder: max_bytes is 0, must be at least 1"):
        PrefixFolder(tmp_path, 0)
    with pytest.raises(ArgumentError, match="parameter path='kept' violates"):
        PrefixFolder("kept")
    with pytest.raises(ValueError, match="max_bytes is 1000, and a block alone takes 576; give room for 16"):
        engine(PrefixFolder(tmp_path, 1000))
    with pytest.warns(UserWarning, match="is left aside"):
        file = tmp_path / "model" / f"{KEYS[0].hex()}.safetensors"
        file.parent.mkdir()
        file.write_text(FORMAT)
        disk_blocks(PrefixFolder(tmp_path)).read(KEYS[0])
