"""Servers for tests: around a model, or around an engine that steps when it is told to."""

import contextlib
import socket
import threading

import numpy as np

from models.decode import Completion, Limits, SamplingParams
from models.decode.requests import check_request
from models.decode.text import ByteTokenizer
from models.serve import HttpLimits, Runner, Served, bind, make_app, serve

LONG = 120
"""Seconds that a client waits for what has to be compiled first, perhaps on a busy machine."""


@contextlib.contextmanager
def running(engine, *, limits=HttpLimits(), max_waiting=64, stop=(), hosts=None, keys=(), chat=None, **how):  # noqa: B008
    """Yields the address, the runner and a function that stops and returns the exit code."""
    runner = Runner(engine, max_waiting)
    listening = bind("127.0.0.1", 0)
    listening.listen()  # clients may come before the thread does
    stops, codes = [], []
    app = make_app(runner, Served("tiny", ByteTokenizer(), stop, chat), limits, hosts, keys)

    def work():
        codes.append(serve(app, runner, listening, limits=limits, started=stops.append, **how))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()

    def end():
        stops[0]()
        thread.join(120)
        assert not thread.is_alive()
        return codes[0]

    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}", runner, end
    finally:
        end()
        listening.close()


def connect(url):
    host, port = url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=60)


def read_until(connection, text):
    """Head and body of an answer may come one by one."""
    answer = b""
    while text not in answer:
        part = connection.recv(4096)
        assert part, answer
        answer += part
    return answer


class Slow:
    """Gives each of its requests the letter a once for every time that it is told to go on."""

    def __init__(self, max_requests=2):
        self.limits = Limits(max_requests=max_requests, max_positions=64)
        self.go_on = threading.Semaphore(0)
        self.cancelled = []
        self.trouble = None
        self._open = {}
        self._ended = []

    @property
    def busy(self):
        return bool(self._open or self._ended)

    @property
    def num_running(self):
        return len(self._open)

    num_used_blocks = num_running

    def check(self, prompt, params):
        check_request(prompt, params, self.limits, 256)

    def add(self, prompt, params: SamplingParams, on_token, on_score):
        number = len(self._open) + len(self.cancelled)
        self._open[number] = (params, on_token, [])
        return number

    def cancel(self, number):
        if self._open.pop(number, None):
            self.cancelled.append(number)
            self._ended.append(Completion(number, (), "cancelled"))

    def step(self):
        if not self._ended:
            assert self.go_on.acquire(timeout=120)
        if self.trouble:
            raise self.trouble
        for number, (params, on_token, tokens) in list(self._open.items()):
            if not self._ended:
                tokens.append(97)
                on_token(97)
            if len(tokens) == params.max_tokens:
                del self._open[number]
                self._ended.append(Completion(number, tuple(tokens), "length"))
        ended, self._ended = self._ended, []
        return ended


def as_tokens(text):
    return np.frombuffer(text.encode(), np.uint8).astype(np.int32)
