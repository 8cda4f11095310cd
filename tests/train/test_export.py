"""Weights that leave a run: another library's model has its held-out loss."""

import functools
import io
import json
import types
from pathlib import Path

import jax
import numpy as np
import pytest
from rich.console import Console

import models
from tests.train.state.test_state import by_name
from train import setup
from train.config import ConfigError, configure
from train.data.vocabulary import Vocabulary
from train.errors import CheckpointError
from train.export import check_export, export
from train.model import has_selection_bias, model_config
from train.processes.group import Processes
from train.run import train_and_report
from train.state.layout import trainable, with_trainable, without_biases

OPTIONS = dict(
    schedule="gpipe", pp=2, ep=2, microbatches=2, microbatch_size=2, model="tiny", layers=2, sequence=12,
    stage_layers=(1, 2), eval_sequences=10, name="x", steps=3,
)  # fmt: skip


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A run whose weights are far from their beginning, and the folder where they are written."""
    folder = tmp_path_factory.mktemp("export")
    text = folder / "text.txt"
    text.write_text("\n".join(f"line {number} of the text" for number in range(300)))
    config = configure(export=folder / "made" / "out", data=(str(text),), **OPTIONS)
    run = setup.prepare(config)
    check_export(config, model_config(config, run.corpus.vocab))
    state = run.init()
    larger = jax.jit(lambda params: with_trainable(params, jax.tree.map(lambda x: 3 * x, trainable(params))))
    state = state._replace(params=larger(state.params))
    told = f"weights         {config.checkpoint.export}: Hugging Face's layout, float32"
    assert export(run, state, Processes()) == told
    return run, state


@pytest.mark.slow
def test_another_librarys_model_has_the_runs_held_out_loss(written):
    torch = pytest.importorskip("torch", reason="the oracle runs on torch, which is not installed")
    transformers = pytest.importorskip(
        "transformers", reason="the oracle is transformers, which is not installed"
    )
    run, state = written
    folder = run.config.checkpoint.export
    model = transformers.DeepseekV3ForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    losses = []
    for batch, weights in run.corpus.heldout_batches(10, (1, 10, 12)):
        assert weights.all() and (batch["segment_ids"] == batch["segment_ids"][..., :1]).all(), "one document"
        tokens, targets, positions = (
            torch.tensor(np.asarray(batch[name][0], np.int64)) for name in ("inputs", "targets", "positions")
        )
        with torch.no_grad():
            logits = model(tokens, position_ids=positions).logits.flatten(0, 1).double()
        losses.append(torch.nn.functional.cross_entropy(logits, targets.flatten()).item())
    assert run.evaluate(state.params) == pytest.approx(np.mean(losses), rel=1e-5)
    assert json.loads((folder / "config.json").read_text())["eos_token_id"] == 0


def test_they_are_read_back_bit_for_bit(written):
    run, state = written
    _, params = models.weights.load(run.config.checkpoint.export)
    flat = run.layout.to_canonical(state)
    assert len(params["stages"]["layers"]) == 2
    found = by_name(params)
    assert found.keys() == {name for name in flat if name.startswith("params/")}
    for name, leaf in found.items():
        np.testing.assert_array_equal(leaf, np.asarray(flat[name]), err_msg=name)


def test_a_folder_that_is_not_empty_is_left_alone_before_training(written):
    run, _ = written
    with pytest.raises(ConfigError, match=r"--export .*out: is not empty; name another folder"):
        check_export(run.config, model_config(run.config))


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    config = configure(export=tmp_path / "file" / "out", **OPTIONS)
    with pytest.raises(ConfigError, match=r"--export .*out: cannot write there: Not a directory"):
        check_export(config, model_config(config))


def test_what_no_folder_can_replace_is_found_out_before_training(tmp_path, monkeypatch):
    """Weights are written beside the folder, which they take the place of."""
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "there")
    (tmp_path / ".out.unfinished").write_text("in the way")
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    for folder, told in (
        (tmp_path / "link", r"--export .*link: .* must be no link, mount point .* name a folder in it"),
        (Path("/proc"), "--export /proc: .* must be no link, mount point"),
        (Path("."), r"--export \.: .* folder without a name"),
        (tmp_path / "out", "--export .*out: cannot write there: File exists"),
    ):
        with pytest.raises(ConfigError, match=told):
            check_export(configure(export=folder, **OPTIONS), model_config(configure(**OPTIONS)))
    check_export(configure(export=tmp_path / "link" / "out", **OPTIONS), model_config(configure(**OPTIONS)))
    assert [path.name for path in (tmp_path / "there").iterdir()] == ["out"]


def test_what_cannot_be_written_is_asked_for_again(written, tmp_path):
    run, state = written
    config = configure(run.config, export=tmp_path / "gone" / "out")
    this = types.SimpleNamespace(config=config, corpus=run.corpus, schedule=run.schedule, layout=run.layout)
    told = r"the run is saved: .* --name x --resume --export .*out writes"
    with pytest.raises(CheckpointError, match=told):
        export(this, state, Processes())


def test_a_finished_run_is_exported_with_its_tokenizer(written, tmp_path):
    run, state = written
    (tmp_path / "own.json").write_text("words")
    (tmp_path / "tokenizer_config.json").write_text("ends")
    folder = tmp_path / "out"
    corpus = types.SimpleNamespace(vocabulary=Vocabulary(256, 7, tmp_path / "own.json"), vocab=256)
    config = configure(run.config, export=folder)
    this = types.SimpleNamespace(config=config, corpus=corpus, schedule=run.schedule, layout=run.layout)
    (tmp_path / "out.new").mkdir()  # somebody's own
    (tmp_path / ".out.unfinished").mkdir()
    (tmp_path / ".out.unfinished" / "model.safetensors").write_text("of a run that was killed")
    out, done = Console(file=io.StringIO(), width=300), state._replace(step=3)
    measured = [{"step": 3, "heldout_loss": 1.0}]
    train_and_report(this, done, tmp_path, None, None, out, measured, Processes())
    said = out.file.getvalue()
    assert "the last step, 3, is done" in said and f"weights         {folder}" in said
    assert (folder / "tokenizer.json").read_text() == "words"
    assert (folder / "tokenizer_config.json").read_text() == "ends"
    assert json.loads((folder / "config.json").read_text())["eos_token_id"] == 7
    assert sorted(path.name for path in folder.glob("*.safetensors")) == ["model-00001-of-00001.safetensors"]
    assert (tmp_path / "out.new").exists() and not (tmp_path / ".out.unfinished").exists()


@pytest.mark.parametrize(
    ("score", "rate"), [("softmax", 0.0), pytest.param("sigmoid", 0.01, marks=pytest.mark.slow)]
)
def test_routers_without_a_selection_bias_get_none(score, rate, monkeypatch):
    """Of V2's architecture: what a trainer once moved could never be exported, and is zero after a resume."""
    monkeypatch.setitem(models.MODELS, "tiny", functools.partial(models.tiny, score=score))
    told = []

    def make_update(value_and_grad, optimizer, bias_rate, *rest):
        told.append(bias_rate(3) if callable(bias_rate) else bias_rate)

    monkeypatch.setattr(setup, "make_update", make_update)
    options = OPTIONS | {"schedule": "one_f_one_b", "pp": 1, "ep": 1, "layers": 2, "stage_layers": ()}
    run = setup.prepare(configure(**options))
    assert told == [np.float32(rate)] and has_selection_bias(run.layout.model.config) == (score == "sigmoid")
    state = run.init()
    assert without_biases(state) is None

    def moved(path, leaf):
        return leaf + 0.5 if "routing" in str(path) and "bias" in str(path) else leaf

    params = jax.tree_util.tree_map_with_path(moved, state.params)
    mended = without_biases(state._replace(params=params))
    jax.tree.map(np.testing.assert_array_equal, mended.params, state.params)
