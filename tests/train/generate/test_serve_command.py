"""scripts/serve: how it begins, by whom it can be reached, and how it ends."""

import contextlib
import json
import os
import signal
import socket
import threading
import time
import types

import httpx
import pytest

import models
from models.decode.text import ByteTokenizer
from models.serve import bind
from tests.models.decode.small_models import random_params, small
from tests.train.generate.test_generate import greedy
from train.config import ConfigError
from train.generate.serve import main

CONFIG = small(vocab=256)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("published") / "tiny"
    models.weights.save(folder, CONFIG, random_params(CONFIG))
    return folder


def refused(port):
    """Connections are, until the model is ready."""
    with socket.socket() as trying:
        return trying.connect_ex(("127.0.0.1", port)) != 0


@pytest.mark.parametrize(
    "number, code, more",
    [
        (signal.SIGTERM, 0, []),
        (signal.SIGINT, 130, []),
        pytest.param(
            signal.SIGTERM,
            0,
            ["--devices", "4", "--microbatches", "2"],
            marks=pytest.mark.slow,
            id="4 devices",
        ),
    ],
)
def test_it_serves_a_folder_until_it_is_told_to_stop(folder, capsys, number, code, more):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    answers, asked = [], {"model": "mine", "prompt": "def f(", "max_tokens": 20, "temperature": 0}

    def client():
        url = f"http://127.0.0.1:{port}/v1/completions"
        while refused(port):
            time.sleep(0.02)
        with httpx.stream("POST", url, json=asked | {"stream": True}, timeout=60) as response:
            lines = response.iter_lines()
            answers.append(next(lines))
            os.kill(os.getpid(), number)
            answers.extend(lines)

    before = signal.getsignal(number)
    thread = threading.Thread(target=client, daemon=True)
    thread.start()
    asked_of_it = ["--port", str(port), "--name", "mine", "--context", "40", "--at-once", "8"]
    assert main([str(folder), *asked_of_it, *more]) == code
    thread.join(30)
    assert signal.getsignal(number) is before
    assert answers[-2:] == ["data: [DONE]", ""] and '"finish_reason":"length"' in answers[-4]
    out, err = capsys.readouterr()
    assert f"serving 'mine' at http://127.0.0.1:{port}/v1" in err and "40 positions a request" in err
    assert (", 4 devices" in err) == bool(more)
    assert out == "" and "warning" not in err
    text = "".join(json.loads(line[6:])["choices"][0]["text"] for line in answers[:-2:2])
    assert text == greedy("def f(", 20, CONFIG) and len(ByteTokenizer().encode(text)) >= 20


def test_only_this_machine_reaches_it_unless_told_otherwise(capsys, monkeypatch):
    heard = []

    def listening(*where):
        heard.append(bind(*where))
        return heard[-1]

    monkeypatch.setattr("train.generate.serve.bind", listening)
    names = []
    for host in ([], ["--host", "0.0.0.0"]):
        monkeypatch.setattr(
            "train.generate.serve.load", lambda *_: names.append(heard[-1].getsockname()[0]) or nothing()
        )
        assert main(["--port", "0", *host]) == 2
        warned = (
            "warning: whoever reaches 0.0.0.0 may ask: there is no key and no encryption"
            in capsys.readouterr().err
        )
        assert warned == bool(host)
    assert names == ["127.0.0.1", "0.0.0.0"]
    monkeypatch.setenv("DUALPIPE_API_KEY", "secret")
    assert main(["--port", "0", "--host", "0.0.0.0"]) == 2
    err = capsys.readouterr().err
    assert "there is no encryption, so keys can be read on the way" in err and "secret" not in err


@pytest.mark.parametrize(
    ("words", "environment"), [(["--api-key", ""], None), ([], " "), (["--api-key", "a"], "")]
)
def test_an_empty_key_does_not_let_in_all(capsys, monkeypatch, words, environment):
    if environment is not None:
        monkeypatch.setenv("DUALPIPE_API_KEY", environment)
    assert main(["--port", "0", *words]) == 2
    assert (
        "a key is empty: give --api-key a text and DUALPIPE_API_KEY, too, or leave both"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize("key", ["secret\n", " secret"])
def test_a_key_that_nobody_can_send_is_refused(capsys, monkeypatch, key):
    monkeypatch.setenv("DUALPIPE_API_KEY", key)
    assert main(["--port", "0"]) == 2
    assert (
        "has white space at an end, which HTTP takes off what is sent: leave it out"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize("name", ["https://models.example", "models.example:8000", "[::1]", "a/b", ""])
def test_a_host_that_no_request_can_be_for_is_refused(capsys, name):
    assert main(["nowhere", "--port", "0", "--allow-host", "::2", "Models.Example", name]) == 2
    told = f"--allow-host {name}: must be a name or an address alone, without http://, a port or brackets"
    assert told in capsys.readouterr().err


def nothing():
    raise ConfigError("there is nothing")


@pytest.mark.parametrize(
    "arguments, code, message",
    [
        (["nowhere"], 2, "error: nowhere: there is no such folder, nor runs/nowhere"),
        (["FOLDER", "--max-bytes", "0"], 2, "error: HttpLimits: max_bytes is 0; must be positive"),
        (["FOLDER", "--at-once", "0"], 2, "error: --at-once 0: must be at least 1"),
        (["FOLDER", "--host", "256.1.1.1"], 2, "error: cannot listen at 256.1.1.1, port 0: "),
        (["FOLDER", "--port", "70000"], 2, "error: --port 70000: must be 0 to 65535"),
    ],
)  # fmt: skip
def test_what_will_not_do(folder, capsys, arguments, code, message):
    assert main(["--port", "0", *(word.replace("FOLDER", str(folder)) for word in arguments)]) == code
    assert message in capsys.readouterr().err


def test_a_port_that_another_took_while_the_weights_were_read(folder, capsys, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with contextlib.ExitStack() as others:

        def make_engine(*given):
            others.enter_context(socket.create_server(("127.0.0.1", port)))
            return types.SimpleNamespace(compile=lambda: None)

        monkeypatch.setattr("train.generate.serve.make_engine", make_engine)
        assert main([str(folder), "--port", str(port)]) == 2
    assert f"error: cannot listen at 127.0.0.1, port {port}: " in capsys.readouterr().err


def test_a_port_that_is_taken(folder, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main([str(folder), "--port", str(port)]) == 2
    assert f"error: cannot listen at 127.0.0.1, port {port}: " in capsys.readouterr().err
