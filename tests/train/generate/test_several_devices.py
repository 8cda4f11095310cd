"""scripts/generate over several devices: one device's texts, and what cannot be shared out is refused at once."""

import functools
import json
import os
import subprocess
import sys

import pytest

import models
from models.decode import Engine
from tests.models.decode.small_models import random_params, small
from tests.quick import QUICK, ROOT
from tests.train.generate.test_generate import PROMPT, greedy, run  # noqa: F401  a fixture
from train.generate.__main__ import main
from train.generate.serve import main as serve

CONFIG = small(vocab=256)
PROMPTS = "class", "x", "for n in range(", "Größe", "y" * 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("published") / "tiny"
    models.weights.save(folder, CONFIG, random_params(CONFIG))
    return folder


@pytest.fixture
def batch(tmp_path):
    """The likeliest tokens of all, and tokens that are drawn."""
    lines = [{"prompt": prompt} for prompt in PROMPTS]
    lines += [{"prompt": prompt, "temperature": 2.0, "seed": n} for n, prompt in enumerate(PROMPTS)]
    file = tmp_path / "in.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    return [str(file), "--max-tokens", "10"]


@pytest.mark.slow
def test_texts_of_a_batch_are_one_devices(folder, batch, capsys, monkeypatch):
    answers, engines = [], []

    def made(*given, **how):
        engines.append(Engine(*given, **how))
        return engines[-1]

    monkeypatch.setattr("train.generate.modes.Engine", made)
    for more in ([], ["--devices", "4"], ["--devices", "2", "--microbatches", "2"]):
        assert main([str(folder), "--batch", *batch, *more]) == 0
        out, err = capsys.readouterr()
        answers.append(out)
        assert ("--devices" not in more) or f"{more[1]} devices\n" in err
    assert answers[1:] == 2 * answers[:1]
    assert [(one._num_devices, one._num_halves, one.limits.max_requests) for one in engines] == [
        (1, 1, 8),
        (4, 1, 8),
        (2, 2, 8),
    ]
    texts = [json.loads(line)["text"] for line in answers[0].splitlines()]
    assert texts[: len(PROMPTS)] == [greedy(prompt, 10, CONFIG) for prompt in PROMPTS]
    assert texts[: len(PROMPTS)] != texts[len(PROMPTS) :]


@pytest.mark.slow
def test_a_run_whose_newest_step_is_damaged_goes_on_over_devices(run, capsys):  # noqa: F811
    assert main([str(run), "--prompt", PROMPT, "--max-tokens", "12", "--devices", "2", "--drafts"]) == 0
    out, err = capsys.readouterr()
    assert out == greedy(PROMPT, 12) + "\n"
    assert "/checkpoints/100: params/shared/embed_tokens is not what was saved; trying an earlier" in err
    assert "step 20: 2 layers, 256 tokens, 64 positions a request, 2 devices" in err


@pytest.mark.slow
def test_virtual_devices_are_made_where_there_is_one(folder):
    """In a process of its own, whose JAX has one device unless it is told otherwise. A prompt alone is no --at-once."""
    command = [sys.executable, "-P", "-m", "train.generate", str(folder), "--prompt", PROMPT]
    command += ["--max-tokens", "8", "--devices", "4", "--microbatches", "2", "--at-once", "3"]
    environ = os.environ | {"XLA_FLAGS": QUICK}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout == greedy(PROMPT, 8, CONFIG) + "\n" and "4 devices" in done.stderr


@pytest.mark.parametrize(
    "words, message",
    [
        (["--devices", "0"], "error: --devices 0: must be at least 1"),
        (["--devices", "9"],
         "error: --devices 9: JAX finds 8 (cpu); give at most so many. Or XLA_FLAGS sets the number with"),
        (["--devices", "3", "--at-once", "6"],
         "--devices 3: MODEL has 4 experts, which so many cannot share equally; give one of 1, 2, 4"),
        (["--devices", "4", "--at-once", "6"],
         "--at-once 6: --devices 4 and --microbatches 1 divide it into 4 equal parts; give a multiple of 4, such as 8"),
        (["--devices", "4", "--microbatches", "2", "--at-once", "20"], "a multiple of 8, such as 24"),
        (["--microbatches", "2", "--at-once", "7"], "a multiple of 2, such as 8"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("command", ["generate", "serve"])
def test_what_cannot_be_shared_out_is_refused_before_weights_are_read(
    folder, batch, capsys, monkeypatch, command, words, message
):
    monkeypatch.setattr("models.weights.files.Reader.read_into", lambda *_: pytest.fail("weights were read"))
    start = functools.partial(main, [str(folder), "--batch", *batch, *words])
    if command == "serve":
        start = functools.partial(serve, [str(folder), "--port", "0", *words])
    assert start() == 2
    out, err = capsys.readouterr()
    assert out == "" and message.replace("MODEL", str(folder)) in err
