"""A server by its clients: what 64 of them get at once, what is refused, who leaves, how it ends."""

import asyncio
import dataclasses
import functools
import json
import random
import socket
import threading
import time

import httpx
import numpy as np
import pytest

from models.decode import Engine, Limits, SamplingParams, decoder
from models.decode.text import ByteTokenizer
from models.serve import HttpLimits, bind
from models.serve.app import _Answer
from models.serve.job import StopMatcher
from tests.models.decode.small_models import random_params, small
from tests.models.serve.running import LONG, Slow, as_tokens, connect, read_until, running

CONFIG = small(vocab=256)
LIMITS = Limits(max_requests=6, max_positions=64, block_size=4, chunk_size=16)
STOP = 10


def engine():
    return Engine(decoder(CONFIG), random_params(CONFIG), LIMITS)


@functools.cache
def alone():
    """One engine that serves nobody else."""
    return engine()


def generated(prompt, **params):
    return all_generated([{"prompt": prompt} | params])[0]


def all_generated(asked):
    for one in asked:
        prompt, params = one["prompt"], {name: one[name] for name in one if name != "prompt"}
        tokens = as_tokens(prompt) if isinstance(prompt, str) else np.asarray(prompt)
        alone().add(tokens, SamplingParams(stop=(STOP,), **params))
    return [(ByteTokenizer().decode(one.tokens), one.finish_reason, len(one.tokens)) for one in alone().run()]


@pytest.fixture(scope="module")
def server():
    made = engine()
    with running(made, stop=(STOP,), max_waiting=70) as (url, runner, _):
        yield url, runner, made


@pytest.fixture(scope="module")
def client(server):
    openai = pytest.importorskip("openai")  # two seconds that most tests need not wait
    with openai.OpenAI(base_url=f"{server[0]}/v1", api_key="none", max_retries=0, timeout=LONG) as client:
        yield client


def idle(runner, slow=None):
    """Nothing is being made; a slow engine goes on until then."""
    until(lambda: runner.num_open == 0 or (slow and slow.go_on.release()))


def until(true, seconds=120):
    """Waits as long as a busy machine may take."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_64_clients_at_once_some_of_whom_leave_get_what_the_engine_alone_gives(server):
    url, runner, made = server
    asked = [
        {"prompt": f"{'ab' * (n % 9)}{n}", "max_tokens": 3 + n % 7, "temperature": n % 3 / 2, "seed": n}
        for n in range(64)
    ]

    async def one(http, n):
        body = {"model": "tiny", "stream": n % 2 == 1} | asked[n]
        if n % 8 == 6:  # leaves while it waits or is served
            with pytest.raises(httpx.TimeoutException):
                await http.post(
                    "/v1/completions", json=body | {"max_tokens": 40}, timeout=httpx.Timeout(60, read=0.01)
                )
            return None
        if n % 2 == 0:
            answer = (await http.post("/v1/completions", json=body)).raise_for_status().json()
            return answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]
        text, reason = "", None
        async with http.stream("POST", "/v1/completions", json=body) as response:
            assert response.headers["content-type"].startswith("text/event-stream")
            async for line in response.aiter_lines():
                if line and line != "data: [DONE]":
                    (choice,) = json.loads(line.removeprefix("data: "))["choices"]
                    text, reason = text + choice["text"], choice["finish_reason"]
                    if n % 8 == 5:  # leaves after the first words
                        return None
        assert line == "" and reason is not None
        return text, reason

    async def everyone():
        limits = httpx.Limits(max_connections=64)
        async with httpx.AsyncClient(base_url=url, timeout=60, limits=limits) as http:
            return await asyncio.gather(*(one(http, n) for n in range(64)))

    found = asyncio.run(everyone())
    idle(runner)
    assert len(made._scheduler.blocks) == LIMITS.total_blocks
    wanted = [one[:2] for one in all_generated(asked)]
    stayed = [n for n in range(64) if found[n] is not None]
    assert len(stayed) == 48 and {reason for _, reason in wanted} >= {"length"}
    assert [found[n] for n in stayed] == [wanted[n] for n in stayed]


def test_openais_client_gets_texts_of_one_and_of_many(client):
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    prompts = ["def f(", "class"]
    answer = client.completions.create(
        model="tiny", prompt=prompts, max_tokens=8, n=2, seed=7, temperature=1.5, top_p=0.9, echo=True
    )
    sampled = dict(max_tokens=8, temperature=1.5, top_p=0.9)
    wanted = [generated(prompt, seed=seed, **sampled) for prompt in prompts for seed in (7, 8)]
    texts = [(choice.index, choice.text, choice.finish_reason) for choice in answer.choices]
    assert texts == [
        (index, prompts[index // 2] + text, reason) for index, (text, reason, _) in enumerate(wanted)
    ]
    assert len({text for _, text, _ in texts}) == 4
    assert answer.usage.completion_tokens == sum(number for _, _, number in wanted)
    assert answer.usage.prompt_tokens == 6 + 5 and answer.model == "tiny"
    assert answer.usage.total_tokens == 11 + answer.usage.completion_tokens


def test_prompts_of_tokens_and_a_beginning_that_is_known(client):
    tokens = as_tokens("a prompt that fills blocks").tolist()
    for reused in (0, 24):
        answer = client.completions.create(model="tiny", prompt=[tokens], max_tokens=6, temperature=0)
        assert answer.choices[0].text == generated(tokens, max_tokens=6)[0]
        assert answer.usage.prompt_tokens_details.cached_tokens == reused


def test_what_was_known_of_a_prompt_counts_once_as_the_prompt_does(client):
    """All of three texts of one prompt find its beginning, which is no more than there is of it."""
    tokens = as_tokens("another prompt of three blocks").tolist()
    for reused in (0, 28):
        answer = client.completions.create(model="tiny", prompt=[tokens], n=3, max_tokens=4, temperature=0)
        assert answer.usage.prompt_tokens == len(tokens) == 30
        assert answer.usage.prompt_tokens_details.cached_tokens == reused


def test_openais_client_gets_a_stream_with_its_usage(client):
    stream = client.completions.create(
        model="tiny", prompt="for", max_tokens=12, temperature=0, stream=True, stream_options={"include_usage": True}
    )  # fmt: skip
    *events, last = list(stream)
    text, reason, number = generated("for", max_tokens=12)
    assert "".join(event.choices[0].text for event in events) == text
    assert [event.choices[0].finish_reason for event in events] == [None] * (len(events) - 1) + [reason]
    assert last.choices == [] and last.usage.completion_tokens == number and len(events) > 2


def test_a_text_ends_before_the_first_of_the_words_that_stop_it(server, client):
    text, _, _ = generated("for", max_tokens=30)
    words = [text[9:12], text[4:6]]
    wanted = text[: min(text.find(word) for word in words)]
    for stream in (False, True):
        answer = client.completions.create(
            model="tiny", prompt="for", max_tokens=30, temperature=0, stop=words, stream=stream
        )
        events = list(answer) if stream else [answer]
        assert "".join(event.choices[0].text for event in events) == wanted
        assert events[-1].choices[0].finish_reason == "stop"
    idle(server[1])
    assert len(server[2]._scheduler.blocks) == LIMITS.total_blocks


@pytest.mark.parametrize(
    "change, status, param, message",
    [
        ({"prompt": "x" * 70}, 400, None, "the prompt of 70 tokens is too long: the limit is max_positions 64"),
        ({"max_tokens": 64}, 400, None, "ask for at most 63 tokens"),
        ({"prompt": ""}, 400, None, "the prompt is empty: give at least one token"),
        ({"prompt": [1, 256]}, 400, None, "the prompt holds token 256, which the model does not know"),
        ({"prompt": {}}, 400, "prompt", "prompt: must be a text, a list of texts, a list of tokens, or a list"),
        ({"prompt": [2**40]}, 400, "prompt", "prompt: must be a text, a list of texts"),
        ({"prompt": []}, 400, None, "the prompt is empty"),
        ({"prompt": "\ud800"}, 400, "prompt", "prompt: is not a text of Unicode"),
        ({"prompt": None}, 400, "prompt", "prompt: is missing"),
        ({"model": "gpt"}, 404, "model", "there is no model 'gpt' here, only 'tiny'"),
        ({"max_tokens": "9"}, 400, "max_tokens", "max_tokens: Input should be a valid integer"),
        ({"max_tokens": True}, 400, "max_tokens", "max_tokens: Input should be a valid integer"),
        ({"temperature": -1, "top_p": 0}, 400, "temperature", "0; top_p: Input should be greater than 0"),
        ({"temperature": float("nan")}, 400, "temperature", "temperature: Input should be"),
        ({"suffix": "y"}, 400, "suffix", "suffix: this server knows no such parameter; leave it out"),
        ({"logprobs": 21}, 400, "logprobs", "logprobs: Input should be less than or equal to 20"),
        ({"presence_penalty": 1.0}, 400, "presence_penalty", "presence_penalty: Input should be less than or equal"),
        ({"stop": ["a", ""]}, 400, "stop", "stop: must be at most 4 texts, none of them empty"),
        ({"stop": list("abcde")}, 400, "stop", "stop: must be at most 4 texts, none of them empty"),
        ({"max_tokens": 10**4299}, 400, "max_tokens", "max_tokens: Input should be less than 2147483648"),
        ({"n": 10**4299, "prompt": ["x"] * 10}, 400, "n", "n: Input should be less than 2147483648"),
        ({"n": 17}, 400, "n", "1 prompts with n 17 are 17 texts, the limit is 16 in one request: ask in several"),
    ],
)  # fmt: skip
def test_requests_that_will_not_do(server, change, status, param, message):
    body = {"model": "tiny", "prompt": "x", "max_tokens": 4} | change
    raw = json.dumps(body)
    answer = httpx.post(
        f"{server[0]}/v1/completions", content=raw, headers={"content-type": "application/json"}, timeout=LONG
    )
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["type"]) == (status, param, "invalid_request_error")
    assert message in error["message"]


COMPLETIONS = "/v1/completions"


@pytest.mark.parametrize(
    "method, path, how, status, message",
    [
        ("POST", COMPLETIONS, {"content": b"{"}, 400, "the body is not JSON"),
        ("POST", COMPLETIONS, {"content": b"[" * 100_000}, 400, "the body is not JSON"),
        ("POST", COMPLETIONS, {"content": b"\xff"}, 400, "the body is not JSON"),
        ("POST", COMPLETIONS, {"content": b"[]"}, 400, "the body must be a JSON object"),
        ("POST", COMPLETIONS, {"content": bytes(1 << 21)}, 413, "the body is larger than the server's limit of"),
        ("POST", COMPLETIONS, {"content": iter([bytes(1 << 20)] * 2)}, 413, "the body is larger than the server"),
        ("POST", COMPLETIONS, {"headers": {"content-type": "text/plain"}}, 415, "content-type is text/plain, m"),
        ("GET", COMPLETIONS, {}, 405, "GET /v1/completions: Method Not Allowed"),
        ("POST", "/v1/responses", {"content": b"{}"}, 404, "POST /v1/responses: Not Found"),
        ("POST", "/v1/chat/completions", {"content": b"{}"}, 400, "model: is missing; messages: is missing"),
        ("GET", "/v1/models/gpt", {}, 404, "there is no model 'gpt' here"),
    ],
)  # fmt: skip
def test_what_is_no_request(server, method, path, how, status, message):
    how = {"headers": {"content-type": "application/json"}} | how
    answer = httpx.request(method, server[0] + path, **how)
    assert answer.status_code == status and message in answer.json()["error"]["message"]
    assert httpx.get(f"{server[0]}/health").json() == {"status": "ok", "open": 0}


def test_openais_client_knows_the_errors(client):
    openai = pytest.importorskip("openai")
    with pytest.raises(openai.BadRequestError, match="the prompt is empty"):
        client.completions.create(model="tiny", prompt="")
    with pytest.raises(openai.NotFoundError) as found:
        client.completions.create(model="other", prompt="x")
    assert found.value.code == "model_not_found"


def test_weights_that_are_no_numbers_are_said_to_those_who_meet_them():
    params = random_params(CONFIG)
    table = params["shared"]["embed_tokens"].at[ord("!")].set(np.nan)
    bad = params | {"shared": params["shared"] | {"embed_tokens": table}}
    with running(Engine(decoder(CONFIG), bad, LIMITS)) as (url, _, _):
        body = {"model": "tiny", "prompt": "x!", "max_tokens": 4, "temperature": 0}
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=LONG)
        assert answer.status_code == 500 and answer.json()["error"]["type"] == "server_error"
        assert "is not a number: its weights hold NaN" in answer.json()["error"]["message"]
        openai = pytest.importorskip("openai")
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        with client, pytest.raises(openai.APIError, match="its weights hold NaN"):
            list(client.completions.create(model="tiny", prompt="x!", max_tokens=4, stream=True))
        wanted = generated("x", max_tokens=1)[0]
        answer = httpx.post(
            f"{url}/v1/completions", json=body | {"prompt": "x", "max_tokens": 1}, timeout=LONG
        )
        assert answer.json()["choices"][0]["text"] == wanted


# ---------------------------------------------------------------------- an engine that waits to be told


BODY = {"model": "tiny", "prompt": "x", "max_tokens": 3}


class Asking(threading.Thread):
    """A client in a thread of its own."""

    def __init__(self, url, **change):
        super().__init__()
        self.url, self.body = url, BODY | change
        self.start()

    def run(self):
        self.response = httpx.post(f"{self.url}/v1/completions", json=self.body, timeout=LONG)

    def answer(self):
        self.join(30)
        return self.response


def send(connection, change, content_length=None):
    """A request as far as it goes."""
    body = json.dumps(BODY | change).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {content_length or len(body)}\r\n"
    connection.sendall(head.encode() + b"content-type: application/json\r\n\r\n" + body)


def test_the_loop_answers_while_a_step_takes_its_time_and_too_many_are_told_so():
    slow = Slow(max_requests=2)
    with running(slow, max_waiting=1) as (url, runner, _):
        asking = [Asking(url) for _ in range(3)]
        until(lambda: runner.num_open == 3)
        assert httpx.get(f"{url}/health").json() == {"status": "ok", "open": 3}
        answer = httpx.post(f"{url}/v1/completions", json=BODY, timeout=LONG)
        assert answer.status_code == 429 and answer.headers["retry-after"] == "1"
        error = answer.json()["error"]
        assert error["type"] == "rate_limit_error" and error["message"] == (
            "3 texts are being made or wait, and 1 more would be above the server's limit of 3: ask again later"
        )
        never = httpx.post(f"{url}/v1/completions", json=BODY | {"n": 4}, timeout=LONG)
        assert never.status_code == 400 and never.json()["error"]["message"] == (
            "4 texts are more than the server makes and lets wait at the same time, 3: ask for fewer in one request"
        )
        slow.go_on.release(9)
        texts = [one.answer().json()["choices"][0]["text"] for one in asking]
        assert texts == ["aaa"] * 3


def test_what_a_request_leaves_out_is_as_openai_has_it():
    """And a seed of its own, so that who asks again gets another text; several texts have seeds that follow it."""
    asked = []

    class Noted(Slow):
        def add(self, prompt, params, on_token, on_score):
            asked.append(params)
            return super().add(prompt, params, on_token, on_score)

    slow = Noted(max_requests=8)
    slow.go_on.release(200)
    body, chat = {"model": "tiny", "prompt": "x"}, {"messages": [{"role": "user", "content": "four"}]}
    with running(slow, stop=(STOP,), chat=lambda messages: as_tokens(messages[0]["content"])) as (url, _, _):
        for more in ({}, {"temperature": None}, {"n": 3, "seed": 2**32 - 2}):
            httpx.post(f"{url}/v1/completions", json=body | more, timeout=LONG).raise_for_status()
        chat |= {"model": "tiny"}
        httpx.post(f"{url}/v1/chat/completions", json=chat, timeout=LONG).raise_for_status()
    first, second, *three, message = asked
    assert {dataclasses.replace(one, seed=0) for one in (first, second, *three)} == {
        SamplingParams(max_tokens=16, temperature=1.0, top_p=1.0, stop=(STOP,))
    }
    assert [one.seed for one in three] == [2**32 - 2, 2**32 - 1, 0]
    assert len({first.seed, second.seed, message.seed}) == 3
    rest = slow.limits.max_positions - len("four")
    assert dataclasses.replace(message, seed=0) == dataclasses.replace(first, seed=0, max_tokens=rest)


def test_who_leaves_is_cancelled_waiting_or_not():
    slow = Slow()
    with running(slow) as (url, runner, _):
        for stream in (False, True):
            with connect(url) as connection:
                send(connection, {"stream": stream, "max_tokens": 60})
                until(lambda: runner.num_open == 1)
            until(lambda: runner._commands.qsize() == 1)  # to cancel, while the engine waits to be told
            idle(runner, slow)
        assert len(slow.cancelled) == 2


def test_a_chat_template_that_takes_too_long_is_not_waited_for():
    wait = threading.Event()
    ask = {"model": "tiny", "messages": [{"role": "user", "content": "a"}]}
    with running(Slow(), limits=HttpLimits(answer_seconds=0.2), chat=lambda messages: wait.wait(LONG)) as (
        url,
        _,
        _,
    ):
        answer = httpx.post(f"{url}/v1/chat/completions", json=ask, timeout=LONG)
        wait.set()
    assert answer.status_code == 504 and answer.json()["error"]["code"] == "timeout"


def test_an_answer_that_takes_too_long_is_ended():
    slow = Slow()
    message = "the answer took longer than the server's limit of 0.2 s: ask for fewer tokens, or again later"
    with running(slow, limits=HttpLimits(answer_seconds=0.2)) as (url, runner, _):
        answer = httpx.post(f"{url}/v1/completions", json=BODY, timeout=LONG)
        assert answer.status_code == 504 and answer.json()["error"]["message"] == message
        idle(runner, slow)
        error = {"message": message, "type": "server_error", "param": None, "code": "timeout"}
        answer = httpx.post(f"{url}/v1/completions", json=BODY | {"stream": True}, timeout=LONG)
        assert answer.status_code == 504 and answer.json()["error"] == error  # nothing of it had been sent
        idle(runner, slow)
        slow.go_on.release()
        with httpx.stream(
            "POST", f"{url}/v1/completions", json=BODY | {"stream": True}, timeout=LONG
        ) as response:
            *_, last = (json.loads(line[6:]) for line in response.iter_lines() if line)
        assert response.status_code == 200 and last["error"] == error
        idle(runner, slow)


def test_a_body_that_does_not_arrive_is_not_waited_for():
    with running(Slow(), limits=HttpLimits(upload_seconds=0.1)) as (url, _, _), connect(url) as connection:
        send(connection, {}, content_length=1000)
        assert read_until(connection, b"did not arrive within 0.1 s").startswith(b"HTTP/1.1 408")
        assert connection.recv(1) == b""  # or who sends a byte now and then would hold it


def test_a_stream_that_nobody_reads_is_given_up(monkeypatch):
    monkeypatch.setattr("models.serve.app.SLOW_READER_SECONDS", 0.0)
    cancelled = []

    class Job:
        async def pieces(self):
            yield 0, "a", None

        def cancel(self):
            cancelled.append(True)

    class Shape:
        def events(self, piece):
            yield {}

    async def never(*arguments):
        await asyncio.Event().wait()

    asked = type("Asked", (), {"stream": True, "stream_options": type("", (), {"include_usage": False})})
    answer = _Answer(Job(), asked, Shape(), HttpLimits(answer_seconds=0.1))
    asyncio.run(answer({}, never, never))
    assert cancelled == [True]


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="Linux ends such connections")
def test_a_connection_that_nobody_reads_is_not_held(monkeypatch):
    class Long(ByteTokenizer):
        def decode(self, tokens):
            return "x" * 300_000 * len(tokens)

    monkeypatch.setattr("tests.models.serve.running.ByteTokenizer", Long)
    for module in ("app", "server"):
        monkeypatch.setattr(f"models.serve.{module}.SLOW_READER_SECONDS", 0.1)
    slow = Slow()
    slow.go_on.release(60)
    limits = HttpLimits(answer_seconds=0.2)
    with running(slow, limits=limits) as (url, runner, _), connect(url) as connection:
        send(connection, {"stream": True, "max_tokens": 50})
        held = runner.on_failure.__self__.server_state.connections
        until(lambda: held)
        until(lambda: not held)


@pytest.mark.parametrize("grace", [20.0, 0.0])
def test_a_server_that_stops_lets_end_what_can_and_tells_the_rest(grace):
    slow = Slow()
    with running(slow, grace=grace) as (url, runner, end):
        asking = [Asking(url), Asking(url, stream=True)]
        until(lambda: runner.num_open == 2)
        slow.go_on.release()
        codes = []
        ending = threading.Thread(target=lambda: codes.append(end()))
        with httpx.Client() as kept, httpx.Client() as balancer:
            for http in (kept, balancer):
                http.get(f"{url}/health").raise_for_status()
            ending.start()
            until(lambda: runner._closing)
            if grace:
                refused = kept.post(f"{url}/v1/completions", json=BODY)
                assert refused.status_code == 503 and refused.json()["error"]["code"] == "stopping"
                assert balancer.get(f"{url}/health").status_code == 503
        until(lambda: grace or runner._commands.qsize() == 2)
        slow.go_on.release(9)
        first, second = (one.answer() for one in asking)
        ending.join(30)
        assert codes == [0] and runner.num_open == 0
        if grace:
            assert first.json()["choices"][0]["text"] == "aaa" and second.text.endswith("data: [DONE]\n\n")
        else:
            assert first.status_code == 503 and first.json()["error"]["code"] == "stopping"
            assert '"code":"stopping"' in second.text and second.text.count('"text":"a"') < 3
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/health")


def test_a_balancer_is_told_before_any_request_is_refused():
    slow = Slow()
    with running(slow, shutdown_delay=600.0) as (url, runner, end), httpx.Client(timeout=60) as kept:
        first = Asking(url)
        until(lambda: runner.num_open == 1)
        ending = threading.Thread(target=end, daemon=True)
        ending.start()
        until(lambda: runner.leaving)
        answer = kept.get(f"{url}/health")
        assert answer.status_code == 503 and answer.json()["error"]["code"] == "stopping"
        assert answer.json()["error"]["message"] == "the server will stop soon: ask another one"
        assert answer.headers["connection"] == "close"
        assert kept.get(f"{url}/live").status_code == 200
        second = Asking(url)  # over a new connection
        until(lambda: runner.num_open == 2)
        slow.go_on.release(9)
        for one in (first, second):
            assert one.answer().status_code == 200 and one.answer().json()["choices"][0]["text"] == "aaa"
        runner.on_failure.__self__.force_exit = True  # as Ctrl-C a second time: nobody waits for ten minutes
        ending.join(120)
        assert not ending.is_alive()


def test_a_server_whose_step_never_ends_is_not_alive():
    slow = Slow()
    with running(slow, limits=HttpLimits(answer_seconds=0.2)) as (url, runner, _):
        assert httpx.get(f"{url}/live").json() == {"status": "ok"}
        asking = Asking(url)
        until(lambda: httpx.get(f"{url}/live").status_code == 503)
        error = httpx.get(f"{url}/live").json()["error"]
        assert error["code"] == "engine_stuck" and error["message"] == (
            "a step has taken longer than 0.2 s, so its texts were given up: start the server again"
        )
        assert asking.answer().status_code == 504 and httpx.get(f"{url}/health").status_code == 200
        idle(runner, slow)
        until(lambda: httpx.get(f"{url}/live").status_code == 200)


def test_a_second_ctrl_c_does_not_wait_for_a_step_that_never_ends():
    slow = Slow()
    with running(slow, grace=0.01) as (url, runner, end):
        with connect(url) as connection:
            send(connection, {})
            until(lambda: runner.num_open == 1)
        until(lambda: runner._commands.qsize() == 1)  # the client has left, and the step goes on
        server = runner.on_failure.__self__
        ending = threading.Thread(target=end)
        ending.start()
        until(lambda: runner._closing and not server.server_state.connections)
        ending.join(0.3)
        assert ending.is_alive(), "the first one waits"
        server.force_exit = True
        ending.join(20)
        assert not ending.is_alive()
        slow.go_on.release(9)


def test_a_server_that_loads_refuses_connections_so_that_another_is_asked():
    with bind("127.0.0.1", 0) as bound:
        address = bound.getsockname()[:2]
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address)
        bound.listen()
        socket.create_connection(address).close()


def test_an_engine_that_fails_ends_the_server_and_everybody_is_told():
    slow = Slow()
    with running(slow) as (url, runner, end):
        asking = [Asking(url), Asking(url)]
        until(lambda: runner.num_open == 2)
        slow.trouble = RuntimeError("out of memory")
        slow.go_on.release()
        for one in asking:
            assert one.answer().status_code == 503
            assert one.answer().json()["error"]["code"] == "engine_failed"
        assert end() == 1 and runner.failure == "RuntimeError: out of memory"


def test_limits_of_http_must_be_positive():
    with pytest.raises(
        ValueError, match="HttpLimits: max_bytes is 0, answer_seconds is -1; must be positive"
    ):
        HttpLimits(max_bytes=0, answer_seconds=-1)


def test_until_the_word_that_is_whole_first_however_the_text_is_cut():
    rng = random.Random(0)

    def word(least, most):
        return "".join(rng.choices("ab", k=rng.randint(least, most)))

    for _ in range(1000):
        text, stops = word(0, 12), [word(1, 4) for _ in range(rng.randint(0, 3))]
        cuts = sorted(rng.randint(0, len(text)) for _ in range(rng.randint(0, 4)))
        ends = (end for end in range(len(text) + 1) if any(text[:end].endswith(stop) for stop in stops))
        wanted = text
        if (end := next(ends, None)) is not None:
            wanted = text[: end - max(len(stop) for stop in stops if text[:end].endswith(stop))]
        until = StopMatcher(stops)
        parts = [
            until.push(text[begin:end]) for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)
        ]
        assert "".join([*parts, until.finish()]) == wanted, (text, stops, cuts)
        assert until.reached == (wanted != text), (text, stops, cuts)
