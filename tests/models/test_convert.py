"""scripts/convert both ways, and the tokenizer that lies beside the weights."""

import asyncio
import dataclasses
import gc
import json
import logging
import re
import shutil
from pathlib import Path

import absl.logging
import chex
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint.experimental.v1 as ocp
import pytest
import tokenizers
from safetensors.numpy import load_file

from dualpipe_jax.step_options import StepOptions
from models import weights
from models.weights import WeightsError, load_tokenizer
from models.weights.__main__ import main
from models.weights.faults import silence_orbax
from models.weights.native import read, write
from models.weights.tokenizer import bytes_of
from tests.models.test_weights import CONFIG, random_params
from train.config import TrainConfig
from train.options import options_as_dict

TEXT = "Experts are chosen by scores; the bias takes part in the choice only. Zwölf Boxkämpfer!"


def make_tokenizer(folder, **settings):
    """A byte-level BPE, as the published ones are, of a few words."""
    library = tokenizers.Tokenizer(tokenizers.models.BPE())
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<begin>", "<end>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator([TEXT] * 3, trainer)
    folder.mkdir(exist_ok=True)
    library.save(str(folder / "tokenizer.json"))
    begin = {"__type": "AddedToken", "content": "<begin>", "lstrip": False, "rstrip": False}
    settings = {"bos_token": begin, "eos_token": "<end>", "add_bos_token": True} | settings
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return library


def all_tensors(folder):
    return {name: v for file in sorted(folder.glob("*.safetensors")) for name, v in load_file(file).items()}


def test_there_and_back_is_bit_for_bit(tmp_path, capsys):
    config = dataclasses.replace(CONFIG, compute_dtype=jnp.bfloat16)
    there, ours, back = (tmp_path / name for name in ("there", "ours", "back"))
    extra = {"eos_token_id": 7, "auto_map": {"x": "evil.py"}}
    weights.save(there, config, random_params(config), dtype="bfloat16", extra=extra)
    make_tokenizer(there)
    (there / "evil.py").write_text("raise SystemExit")
    assert main([str(there), str(ours)]) == 0
    assert main([str(ours), str(back), "--file-gb", "1e-5"]) == 0
    assert "million parameters" in capsys.readouterr().out
    chex.assert_trees_all_equal(all_tensors(back), all_tensors(there))
    assert len(list(back.glob("*.safetensors"))) > 3
    assert (back / "tokenizer.json").read_bytes() == (there / "tokenizer.json").read_bytes()
    assert not list(tmp_path.glob("[ob]*/*.py"))
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (there, back))
    del before["auto_map"]
    assert after == before


def test_a_step_of_the_trainers_can_be_published(tmp_path):
    """Beside the parameters, layers in model order, it has the optimizer's state, and facts that we ignore."""
    params = jax.device_get(random_params(CONFIG))
    one_stage = jax.tree.map(lambda w: w[0], params["stages"])
    flat = {
        f"params/{jax.tree_util.keystr(path, simple=True, separator='/')}": leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(params | {"stages": one_stage})
        if getattr(path[-1], "key", None) != "row"
    }
    flat |= {name.replace("params", "mu", 1): leaf * 0 for name, leaf in flat.items()} | {
        "step": jnp.int32(3)
    }
    facts = {
        "format": 1,
        "model": {k: v for k, v in dataclasses.asdict(CONFIG).items() if k != "compute_dtype"},
        "arrays": {name: [list(leaf.shape), str(leaf.dtype)] for name, leaf in flat.items()},
        "corpus": "x",
        "published": {"eos_token_id": 7},
        "options": options_as_dict(TrainConfig(step=StepOptions(precision="bfloat16"))),
    }
    make_tokenizer(tmp_path)
    with ocp.training.Checkpointer(tmp_path / "steps") as store:
        store.save(3, flat, custom_metadata=facts)
    assert main([str(tmp_path / "steps" / "3"), str(tmp_path / "out"), "--no-mtp"]) == 0
    config, got = weights.load(tmp_path / "out")
    assert config == dataclasses.replace(CONFIG, num_mtp_layers=0, compute_dtype=jnp.bfloat16)
    assert all_tensors(tmp_path / "out")["model.norm.weight"].dtype == jnp.bfloat16
    assert json.loads((tmp_path / "out" / "config.json").read_text())["eos_token_id"] == 7
    assert (
        load_tokenizer(tmp_path / "out").encode("ab").tolist()
        == load_tokenizer(tmp_path).encode("ab").tolist()
    )
    chex.assert_trees_all_equal(got["shared"], params["shared"] | {"mtp": []})
    stages = params["stages"]
    chex.assert_trees_all_equal(got["stages"]["layers"], stages["layers"][:5])
    chex.assert_trees_all_equal(got["stages"]["routing"], jax.tree.map(lambda w: w[:, :5], stages["routing"]))


def test_what_cannot_be_converted(tmp_path, capsys):
    assert main([str(tmp_path / "nothing"), str(tmp_path / "out")]) == 2
    assert "nothing:\n  neither config.json nor Orbax's files" in capsys.readouterr().err
    assert main([str(tmp_path), str(tmp_path)]) == 2
    assert "is there already" in capsys.readouterr().err
    for size in ("inf", "nan", "0"):  # before anything is read
        assert main([str(tmp_path / "nothing"), str(tmp_path / "out"), "--file-gb", size]) == 2
        assert "--file-gb" in capsys.readouterr().err
    facts = {"format": 1, "model": dataclasses.asdict(CONFIG) | {"compute_dtype": "float32"}, "arrays": {}}
    ocp.save(tmp_path / "half", {"params/shared/norm/weight": jnp.ones(16)}, custom_metadata=facts)
    with pytest.raises(WeightsError, match="params/shared/embed_tokens: missing, must be"):
        read(tmp_path / "half")
    ocp.save(tmp_path / "foreign", {"x": jnp.ones(1)})
    with pytest.raises(
        WeightsError, match="foreign:\n  cannot be read: its _CHECKPOINT_METADATA says nothing of"
    ):
        read(tmp_path / "foreign")


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    folder = tmp_path_factory.mktemp("weights") / "ours"
    write(folder, CONFIG, random_params(CONFIG), {})
    return folder


@pytest.mark.parametrize(
    ("file", "told"),
    [
        ("_CHECKPOINT_METADATA", "no _CHECKPOINT_METADATA there|_CHECKPOINT_METADATA says nothing"),
        pytest.param("state/_METADATA", "No valid PyTree|JSONDecodeError", marks=pytest.mark.slow),
        ("state/manifest.ocdbt", "zarr.json.*does not exist|manifest: Length in header"),
        pytest.param("state/d/*", "state/d/|Requested byte range", marks=pytest.mark.slow),
        ("state/ocdbt.process_0/d/*", "shard has size of 0 bytes|Requested byte range"),
    ],
)
def test_what_is_damaged_is_said_in_two_lines(ours, tmp_path, file, told, capfd, caplog):
    """A file cut short, and then one that is not there."""
    shutil.copytree(ours, tmp_path / "in")
    for damage in (lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 4]), Path.unlink):
        for path in (tmp_path / "in").glob(file):
            damage(path)
        assert main([str(tmp_path / "in"), str(tmp_path / "out")]) == 2
        first, second = capfd.readouterr().err.splitlines()
        assert first == f"error: {tmp_path / 'in'}:" and re.search(told, second) and len(second) < 300
    gc.collect()
    assert caplog.text == "" and not (tmp_path / "out").exists()


def test_of_reads_that_nobody_awaits_only_orbaxs_are_not_told(caplog):
    """One of several may fail after the first did, when Orbax listens no more."""
    scope = {}

    async def abandon(file, words):
        exec(compile(f"async def read():\n  raise ValueError({words!r})", file, "exec"), scope)
        asyncio.gather(scope["read"](), scope["read"]())
        await asyncio.sleep(0)

    with silence_orbax():
        asyncio.run(abandon("orbax/checkpoint/x.py", ""))
        asyncio.run(abandon("x.py", "DATA_LOSS [tensorstore_spec=]"))
        asyncio.run(abandon("x.py", "TensorStore({})"))
        asyncio.run(abandon("x.py", "DATA_LOSS"))
    gc.collect()
    assert caplog.text.count("exception was never retrieved") == 1
    assert "ValueError: DATA_LOSS\n" in caplog.text


def test_tracebacks_of_orbax_are_not_told_whoever_made_its_logger(caplog, monkeypatch):
    """A command names it before absl is imported; it then takes absl's own file for that of whoever logs."""
    monkeypatch.setattr(type(absl.logging.get_absl_logger()), "findCaller", logging.Logger.findCaller)

    def log(file, words):
        scope = {"log": absl.logging.exception}
        text = f"try:\n  raise ValueError\nexcept ValueError:\n  log({words!r})"
        exec(compile(text, file, "exec"), scope)

    with silence_orbax():
        log("orbax/checkpoint/x.py", "of Orbax")
        absl.logging.error("Failed to get metadata for x")
        log("x.py", "of others")
    assert [record.getMessage() for record in caplog.records] == ["of others"]


def test_the_tokenizer_is_that_of_the_library_with_its_beginning(tmp_path):
    library = make_tokenizer(tmp_path / "with")
    ours = load_tokenizer(tmp_path / "with")
    begin = library.token_to_id("<begin>")
    np.testing.assert_array_equal(ours.encode(TEXT), [begin, *library.encode(TEXT).ids])
    assert ours.encode(TEXT).dtype == np.int32 and ours.decode(ours.encode(TEXT)) == TEXT
    assert (ours.bos, ours.eos, ours.library.get_vocab_size()) == (begin, library.token_to_id("<end>"), 300)
    np.testing.assert_array_equal(ours.encode("<begin>" + TEXT), ours.encode(TEXT))
    make_tokenizer(tmp_path / "without", add_bos_token=False)
    np.testing.assert_array_equal(load_tokenizer(tmp_path / "without").encode(TEXT), library.encode(TEXT).ids)


def test_the_tokenizer_is_that_of_transformers(tmp_path):
    transformers = pytest.importorskip(
        "transformers", reason="the oracle is transformers, which is not installed"
    )
    make_tokenizer(tmp_path, add_bos_token=False)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert list(load_tokenizer(tmp_path).encode(TEXT)) == theirs(TEXT)["input_ids"]


def test_a_tokenizer_that_cuts_or_fills_texts_takes_them_whole(tmp_path):
    library = make_tokenizer(tmp_path, add_bos_token=False)
    whole = library.encode(TEXT).ids
    library.enable_truncation(16)
    library.enable_padding(pad_to_multiple_of=8)
    library.save(str(tmp_path / "tokenizer.json"))
    ours = load_tokenizer(tmp_path)
    assert ours.encode(TEXT).tolist() == whole and ours.encode_as_it_is("ab").tolist() == whole_of(
        library, "ab"
    )


def whole_of(library, text):
    library.no_truncation()
    library.no_padding()
    return library.encode(text, add_special_tokens=False).ids


def test_half_a_surrogate_pair_is_no_text(tmp_path):
    make_tokenizer(tmp_path)
    ours = load_tokenizer(tmp_path)
    for encode in (ours.encode, ours.encode_as_it_is):
        with pytest.raises(UnicodeEncodeError, match="surrogates not allowed"):
            encode("x\ud83d")


def test_tokens_stand_for_bytes(tmp_path):
    text = "Zwölf 漢字 🙂\ufffd a"
    make_tokenizer(tmp_path, add_bos_token=False)
    ours = load_tokenizer(tmp_path)
    assert b"".join(map(ours.bytes_of, ours.encode(text).tolist())) == text.encode()
    assert bytes_of("<0xE6>", "\ufffd") == b"\xe6" and bytes_of("▁a", "a") == b"a"


def test_no_tokenizer(tmp_path):
    with pytest.raises(WeightsError, match="tokenizer.json: No such file"):
        load_tokenizer(tmp_path)
    make_tokenizer(tmp_path, eos_token="<fin>")
    with pytest.raises(WeightsError, match="eos_token is '<fin>', which tokenizer.json does not have"):
        load_tokenizer(tmp_path)
    make_tokenizer(tmp_path, eos_token=5)
    with pytest.raises(WeightsError, match="tokenizer_config.json: eos_token is 5, must be a text"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(WeightsError, match=r"tokenizer_config.json: is \[\], must be an object of settings"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[")
    with pytest.raises(WeightsError, match="tokenizer_config.json: Expecting value"):
        load_tokenizer(tmp_path)
