"""scripts/generate: what it prints of a run and of published weights, and what it says of those that will not do."""

import functools
import io
import json
import os
import re
import shutil
import signal
import sys
import time
from types import SimpleNamespace

import jax
import numpy as np
import orbax.checkpoint.experimental.v1 as ocp
import pytest
import tokenizers

import models
from models.decode import SamplingParams
from models.decode.text import ByteTokenizer
from models.weights.__main__ import main as convert
from tests.models.decode.small_models import random_params, small, whole
from tests.train.state.test_state import by_name
from train.config import TrainConfig, configure
from train.data.vocabulary import BYTES, open_vocabulary
from train.generate.__main__ import main
from train.generate.loading import find, load
from train.generate.modes import _parse_line, make_engine
from train.generate.options import Options
from train.options import options_as_dict
from train.state.facts import describe, step_facts
from train.state.fingerprint import fingerprints

CONFIG = small(vocab=256, num_mtp_layers=1)
PROMPT = "def f("


def checkpoint(run, step, **changes):
    """As a run leaves one: layers in one array, facts beside them."""
    flat = jax.tree.map(jax.numpy.asarray, by_name(random_params(CONFIG)))
    facts = describe(TrainConfig(), CONFIG, "corpus", flat, BYTES.fingerprint)
    prints = changes.pop("fingerprints", fingerprints(flat))
    facts = step_facts(facts | changes, step, prints, {"loss": 1.0}, None)
    ocp.save(run / "checkpoints" / str(step), flat, custom_metadata=facts)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "one"
    folder.mkdir()
    (folder / "checkpoints").mkdir()
    checkpoint(folder, 20)
    checkpoint(folder, 100, fingerprints={"params/shared/embed_tokens": 1})
    return folder


@functools.cache
def greedy(prompt, number, config=CONFIG):
    """What a prompt goes on with, as text."""
    text, begun = list(prompt.encode()), len(prompt.encode())
    for _ in range(number):
        padded = np.zeros((1, 32), np.int32)
        padded[0, : len(text)] = text
        logits = np.asarray(whole(config, random_params(config), padded))[0, len(text) - 1]
        text.append(int(np.argmax(logits)))
        if text[-1] == BYTES.separator:
            return ByteTokenizer().decode(text[begun:-1])
    return ByteTokenizer().decode(text[begun:])


@pytest.mark.slow
def test_a_run_goes_on_with_a_prompt_and_drafts_change_nothing(run, capsys, monkeypatch):
    wanted = greedy(PROMPT, 12)
    options = [str(run), "--max-tokens", "12", "--drafts"]
    assert main([*options, "--prompt", PROMPT]) == 0
    out, err = capsys.readouterr()
    assert out == wanted + "\n"
    assert f"warning: {run}/checkpoints/100: params/" in err and "; trying an earlier step\n" in err
    assert f"{run}, step 20: 2 layers, 256 tokens" in err
    assert "12 tokens (length), the first after" in err and "drafts right" in err and "tokens/s" in err
    monkeypatch.setattr(sys, "stdin", io.StringIO(PROMPT + "\n"))
    assert main(options) == 0
    assert capsys.readouterr().out == wanted + "\n"


@pytest.mark.slow
def test_what_is_known_of_a_prompt_is_taken_from_a_folder(run, capsys, tmp_path):
    prompt = 3 * PROMPT
    wanted = greedy(prompt, 12)
    options = [str(run), "--max-tokens", "12", "--prompt", prompt, "--drafts"]
    options += ["--prefix-cache", str(tmp_path / "kept")]
    for known in (False, True):
        assert main(options) == 0
        out, err = capsys.readouterr()
        assert out == wanted + "\n" and ("16 of the prompt's were known" in err) == known
        end = time.monotonic() + 60
        while not list(tmp_path.glob("kept/*/*.safetensors")):  # written behind its back
            assert time.monotonic() < end
            time.sleep(0.01)


@pytest.fixture
def typed(monkeypatch):
    def lines(*texts):
        stdin = io.StringIO("".join(f"{text}\n" for text in texts))
        stdin.isatty = lambda: True
        monkeypatch.setattr(sys, "stdin", stdin)

    return lines


def test_on_a_terminal_lines_are_prompts_until_there_are_no_more(run, capsys, typed):
    typed(PROMPT, "", PROMPT)
    assert main([str(run), "--max-tokens", "12", "--drafts", "--context", "64"]) == 0
    out, err = capsys.readouterr()
    assert out == 2 * (greedy(PROMPT, 12) + "\n")
    assert err.count("> ") == 4 and "error: the prompt is empty: give at least one token" in err


def test_a_line_that_is_no_text_ends_no_conversation(run, capsys, monkeypatch):
    class Terminal(io.RawIOBase):
        lines = [b"\xe4\n", b"\n"]  # noqa: RUF012 of this test alone

        def readable(self):
            return True

        def isatty(self):
            return True

        def readinto(self, room):
            line = self.lines.pop(0) if self.lines else b""
            room[: len(line)] = line
            return len(line)

    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(Terminal()), "utf-8"))
    assert main([str(run)]) == 0
    out, err = capsys.readouterr()
    assert out == "" and err.count("> ") == 3 and "error: the prompt is empty" in err
    assert "error: the line is not a text of Unicode: 'utf-8' codec can't decode byte 0xe4" in err


def test_ctrl_c_ends_an_answer_and_no_more(run, capsys, typed, monkeypatch):
    class Terminal(io.StringIO):
        def write(self, text):
            if self.tell() == 0 and text:
                signal.raise_signal(signal.SIGINT)
            return super().write(text)

    typed(PROMPT, PROMPT)
    monkeypatch.setattr(sys, "stdout", Terminal())
    before = signal.getsignal(signal.SIGINT)
    assert main([str(run), "--max-tokens", "12", "--drafts", "--context", "64"]) == 0
    (first, rest), wanted = sys.stdout.getvalue().split("\n", 1), greedy(PROMPT, 12)
    assert 0 < len(first) < len(wanted) and wanted.startswith(first.rstrip("\ufffd"))
    assert rest == wanted + "\n" and signal.getsignal(signal.SIGINT) is before
    assert "(cancelled)" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, code, message",
    [
        (["nowhere", "--prompt", "x"], 2, "error: nowhere: there is no such folder, nor runs/nowhere"),
        (["--prompt", "x"], 2, "error: there is no run with a checkpoint in runs: scripts/train makes one, or name"),
        (["RUN", "--prompt", "x", "--batch", "y"], 2, "error: --prompt and --batch: give one of them"),
        (["RUN", "--prompt", ""], 2, "error: the prompt is empty: give at least one token"),
        (["RUN", "--step", "7", "--prompt", "x"], 1, "there is no step 7 in RUN/checkpoints, only 100, 20"),
        (["RUN", "--step", "100", "--prompt", "x"], 1,
         "embed_tokens is not what was saved\nerror: step 100 in RUN/checkpoints is not whole; without --step the"),
        (["RUN", "--batch", "nothing"], 2, "error: --batch nothing: cannot read it"),
        (["RUN", "--prompt", "x", "--context", "9"], 2, "256 are 257 together, the limit is max_positions 9"),
        (["RUN/checkpoints", "--prompt", "x", "--step", "3"], 2, "RUN/checkpoints is no run: it has no checkpoints"),
        (["RUN/checkpoints", "--prompt", "x"], 2, "neither config.json nor Orbax's files"),
        (["RUN", "--prompt", "x", "--prefix-cache", "kept", "--prefix-bytes", "99"], 2,
         "error: PrefixFolder: max_bytes is 99, and a block alone takes"),
        (["RUN", "--prompt", "x", "--context", "-5"], 2, "error: --context -5: must be at least 1"),
        (["RUN", "--prompt", "\udcff"], 2, "error: the prompt is not a text of Unicode: 'utf-8' codec can't encode"),
        (["RUN", "--top-p", "2", "--prompt", "x"], 2, "error: top_p is 2.0, must be above 0 and at most 1"),
    ],
)  # fmt: skip
def test_what_will_not_do(run, capsys, monkeypatch, tmp_path, arguments, code, message):
    monkeypatch.chdir(tmp_path)
    assert main([word.replace("RUN", str(run)) for word in arguments]) == code
    out, err = capsys.readouterr()
    assert out == "" and message.replace("RUN", str(run)) in err


def test_a_damaged_step_is_a_line_and_the_one_before_is_taken(run, tmp_path, capfd, caplog):
    shutil.copytree(run / "checkpoints" / "20", tmp_path / "checkpoints" / "20")
    shutil.copytree(run / "checkpoints" / "20", tmp_path / "checkpoints" / "30")
    for path in (tmp_path / "checkpoints" / "30").glob("state/d/*"):
        path.unlink()
    said, options = [], Options(source=tmp_path)
    make_engine(load(options, said.append), options, 1, 33, said.append)
    told, served = said
    assert served == f"{tmp_path}, step 20: 2 layers, 256 tokens, 64 positions a request"
    words = "warning: .*/30: cannot be read: ValueError: NOT_FOUND: .*; trying an earlier step"
    assert re.fullmatch(words, told)
    assert len(told) < 400 and capfd.readouterr() == ("", "") and caplog.text == ""


def test_a_flipped_digit_beside_the_arrays_is_damage(run, tmp_path, capsys):
    """One of the model's numbers that no array's shape tells."""
    shutil.copytree(run / "checkpoints" / "20", tmp_path / "checkpoints" / "20")
    about = tmp_path / "checkpoints" / "20" / "_CHECKPOINT_METADATA"
    written = about.read_text()
    about.write_text(written.replace('"rope_theta": 10000.0', '"rope_theta": 10000.5'))
    assert about.read_text() != written
    told = "what its _CHECKPOINT_METADATA says is not what was saved"
    assert main([str(tmp_path), "--prompt", PROMPT, "--max-tokens", "1"]) == 1
    said = capsys.readouterr().err
    assert f"warning: {tmp_path}/checkpoints/20: {told}; trying an earlier step" in said
    assert f"error: none of the checkpoints in {tmp_path}/checkpoints is whole" in said
    assert convert([str(about.parent), str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err == f"error: {about.parent}:\n  {told}\n"
    about.write_text(written)
    assert convert([str(about.parent), str(tmp_path / "out")]) == 0


def test_a_run_whose_tokenizer_is_another(tmp_path, capsys):
    (tmp_path / "checkpoints").mkdir()
    checkpoint(tmp_path, 1, tokenizer="of words")
    assert main([str(tmp_path), "--prompt", "x", "--tokenizer", str(tmp_path / "own.json")]) == 2
    message = f"its tokenizer is not {tmp_path}/own.json: --tokenizer FILE says where the one is that it was trained"
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("separator", ["</s>", "<own>"])
def test_a_run_has_its_own_tokenizer(tmp_path, separator):
    """Of a run whose tokenizer's file has gone from where it was, with a token of one's own between documents, too."""
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, separator: 1}, unk_token="a"))
    made.save(str(tmp_path / "own.json"))
    vocabulary, run = open_vocabulary(str(tmp_path / "own.json"), separator), tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    vocabulary.write(run)
    checkpoint(run, 1, tokenizer=vocabulary.fingerprint, published={"eos_token_id": vocabulary.separator})
    (tmp_path / "own.json").unlink()
    found = load(Options(source=run), print)
    assert found.tokenizer.encode("a").tolist() == [0] and found.stop == (1,)


def test_a_text_ends_at_the_tokens_of_all_that_is_published(tmp_path):
    config = small(vocab=256)
    models.weights.save(tmp_path, config, random_params(config), extra={"eos_token_id": 7})
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [3, 4]}')
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "</s>": 5}, unk_token="a"))
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    assert load(Options(source=tmp_path), print).stop == (3, 4, 5, 7)


@pytest.mark.parametrize("trained", ["float32", "bfloat16"])
def test_a_run_computes_in_what_it_was_trained_in_unless_told_otherwise(trained, tmp_path):
    (tmp_path / "checkpoints").mkdir()
    checkpoint(tmp_path, 1, options=options_as_dict(configure(precision=trained)))
    for asked, wanted in (("as-is", trained), ("float32", "float32"), ("bfloat16", "bfloat16")):
        assert load(Options(source=tmp_path, precision=asked), print).config.compute_dtype == wanted


def test_without_a_name_it_is_the_run_that_saved_last(tmp_path):
    for name, when in (("b", 300), ("a", 500), ("c", 400), ("none", 600)):
        saved = tmp_path / name / "checkpoints"
        (saved / "1" if name != "none" else saved).mkdir(parents=True)
        os.utime(saved, (when, when))
    assert find(None, tmp_path) == tmp_path / "a"


def test_folders_without_what_is_needed(tmp_path, capsys, monkeypatch):
    config = small()
    models.weights.save(tmp_path / "out", config, random_params(config))
    for name, token in (("tokenizer.json", "a"), ("tokenizer-2.json", "b")):
        made = tokenizers.Tokenizer(tokenizers.models.WordLevel({token: 0}, unk_token=token))
        (tmp_path / name).write_text(made.to_str())
    assert (
        main([str(tmp_path / "out"), "--prompt", "x", "--tokenizer", str(tmp_path / "tokenizer-2.json")]) == 2
    )
    assert "tokenizer-2.json: must be named tokenizer.json, as what belongs to it" in capsys.readouterr().err
    assert main([str(tmp_path / "out"), "--prompt", "x"]) == 2
    told = "there is no tokenizer.json, and a model of 48 tokens is not one of bytes"
    assert told in capsys.readouterr().err
    models.weights.save(tmp_path / "bytes", small(vocab=256), random_params(small(vocab=256)))
    assert main([str(tmp_path / "bytes"), "--prompt", "x", "--drafts"]) == 2
    assert "bytes has no module of multi-token prediction" in capsys.readouterr().err
    monkeypatch.setattr("train.generate.modes.make_engine", lambda *_: pytest.fail("the weights are read"))
    for wrong in (["--prompt", ""], ["--prompt", "x", "--top-p", "2"], ["--prompt", "x", "--context", "9"]):
        assert main([str(tmp_path / "bytes"), *wrong]) == 2


@pytest.mark.parametrize(
    "file, content, message",
    [
        ("config.json", "{", "config.json: Expecting property name"),
        ("config.json", "null", "config.json: is None, must be an object of settings"),
        ("generation_config.json", "[]", "generation_config.json: is [], must be an object of settings"),
        (
            "generation_config.json",
            '{"eos_token_id": "</s>"}',
            "eos_token_id is '</s>', must be a token's number",
        ),
    ],
)
def test_settings_that_are_damaged_are_said(tmp_path, capsys, file, content, message):
    models.weights.save(tmp_path / "bytes", small(vocab=256), random_params(small(vocab=256)))
    (tmp_path / "bytes" / file).write_text(content)
    assert main([str(tmp_path / "bytes"), "--prompt", "x"]) == 2
    assert message in capsys.readouterr().err


def test_a_line_that_will_not_do_harms_no_other(tmp_path, capsys):
    config = small(vocab=256)
    models.weights.save(tmp_path / "model", config, random_params(config))
    lines = [
        '{"prompt": "x", "max_tokens": 1e999}',
        '{"prompt": "\\ud800"}',
        '{"prompt": "x", "id": "\\ud83d"}',
        '{"prompt": "x\u2028y\x85"}',
        '{"prompt": "x", "max_tokens": -100}',
        "[" * 100_000,
        '{"prompt": "x", "error": "as it was", "num_drafted": 7, "text": "old"}',
    ]
    (tmp_path / "in.jsonl").write_text("\n".join(lines) + "\n", "utf-8-sig")
    assert main([str(tmp_path / "model"), "--batch", str(tmp_path / "in.jsonl"), "--max-tokens", "3"]) == 1
    out, err = capsys.readouterr()
    overflow, no_text, half, ends, nothing, deep, again = (
        json.loads(line) for line in out.rstrip("\n").split("\n")
    )
    assert "7 prompts, 4 failed" in err and "max_tokens is inf, must be a whole number" in overflow["error"]
    assert "surrogates not allowed" in no_text["error"]
    assert (half["id"], half["text"]) == ("\ud83d", greedy("x", 3, config))
    assert (ends["prompt"], ends["text"]) == ("x\u2028y\x85", greedy("x\u2028y\x85", 3, config))
    assert nothing["error"] == "max_tokens is -100, must be at least 1"
    assert deep["error"].startswith("not JSON: maximum recursion depth")
    text = greedy("x", 3, config)
    assert again == {"prompt": "x", "text": text, "finish_reason": "length", "num_tokens": 3}
    (tmp_path / "in.jsonl").write_text("\n".join(lines[4:6]))
    assert main([str(tmp_path / "model"), "--batch", str(tmp_path / "in.jsonl")]) == 1
    assert "2 prompts, 2 failed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ('"max_tokens": 3.7', "max_tokens is 3.7, must be a whole number"),
        ('"max_tokens": "4"', "max_tokens is '4', must be a whole number"),
        ('"max_tokens": true', "max_tokens is True, must be a whole number"),
        ('"max_tokens": null', "max_tokens is None, must be a whole number"),
        ('"seed": 1.0', "seed is 1.0, must be a whole number"),
        ('"temperature": "0.5"', "temperature is '0.5', must be a number"),
        ('"top_p": false', "top_p is False, must be a number"),
    ],
)
def test_numbers_of_a_line_are_taken_as_they_are_or_refused(given, message):
    asked = _parse_line(
        f'{{"prompt": "x", {given}}}', SimpleNamespace(tokenizer=ByteTokenizer(), stop=()), Options()
    )
    assert (asked.request, asked.answer) == (None, {"error": message})


def test_whole_numbers_are_temperatures():
    line = '{"prompt": "x", "temperature": 1, "top_p": 1, "seed": 7, "max_tokens": 2}'
    asked = _parse_line(line, SimpleNamespace(tokenizer=ByteTokenizer(), stop=()), Options())
    assert asked.request[1] == SamplingParams(2, 1.0, 1.0, 7)


@pytest.mark.parametrize("number", [10**15, sys.maxsize])
def test_more_room_than_there_is_memory_is_said_in_a_line(tmp_path, capsys, number):
    """The second is what many write for no limit; asked for so much, JAX ends the process with SIGABRT."""
    config = small(vocab=256)
    models.weights.save(tmp_path / "model", config, random_params(config))
    assert main([str(tmp_path / "model"), "--prompt", "x", "--max-tokens", str(number)]) == 2
    err = capsys.readouterr().err
    assert "there is no memory for" in err and "positions of 1 prompts: give a smaller --context" in err


def check_batch(model, wanted, tmp_path, capsys):
    """Ragged prompts, each alone by the oracle; sampling settings of a line's own; lines that will not do."""
    prompts = ["class", "x", "for n in range(", "Größe"]
    lines = [{"prompt": prompt, "n": n} for n, prompt in enumerate(prompts)]
    lines.insert(1, {"prompt": "y" * 30, "max_tokens": 0})
    lines.insert(3, {"text": "no prompt"})
    lines.append({"prompt": "x", "temperature": 5.0, "seed": 3, "max_tokens": 9})
    texts = [json.dumps(line) for line in lines]
    (tmp_path / "in.jsonl").write_text("\n".join([*texts, "{"]))
    asked = ["--batch", str(tmp_path / "in.jsonl"), "--max-tokens", "10", "--at-once", "2"]
    assert main([str(model), *asked]) == 1
    out, err = capsys.readouterr()
    answers = [json.loads(line) for line in out.splitlines()]
    assert "8 prompts, 3 failed; 49 tokens in" in err
    assert answers[1]["error"] == "max_tokens is 0, must be at least 1"
    assert answers[3]["error"] == 'must be an object with a text, {"prompt": TEXT}'
    assert answers[7]["error"].startswith("not JSON: ")
    assert answers[6]["num_tokens"] == 9 and answers[6]["text"] != answers[2]["text"]
    for prompt, answer in zip(prompts, (answers[n] for n in (0, 2, 4, 5)), strict=True):
        assert answer["text"] == wanted(prompt), prompt
        assert (answer["finish_reason"], answer["prompt"]) == ("length", prompt)


def test_a_batch_from_published_weights_is_what_the_plain_model_gives(tmp_path, capsys):
    config = small(vocab=256)
    models.weights.save(tmp_path / "model", config, random_params(config))
    check_batch(tmp_path / "model", lambda prompt: greedy(prompt, 10, config), tmp_path, capsys)


@pytest.mark.slow
def test_a_batch_from_published_weights_is_what_transformers_generates(tmp_path, capsys):
    torch = pytest.importorskip("torch", reason="the oracle runs on torch, which is not installed")
    from tests.models import hugging_face

    model = hugging_face.saved(hugging_face.make(vocab_size=256, num_hidden_layers=2), tmp_path / "model")
    oracle = hugging_face.make(vocab_size=256, num_hidden_layers=2)
    asked = dict(max_new_tokens=10, do_sample=False, eos_token_id=None, pad_token_id=0)

    def wanted(prompt):
        tokens = torch.tensor([list(prompt.encode())])
        with torch.no_grad():
            return ByteTokenizer().decode(oracle.generate(tokens, **asked)[0, tokens.shape[1] :].tolist())

    check_batch(model, wanted, tmp_path, capsys)
