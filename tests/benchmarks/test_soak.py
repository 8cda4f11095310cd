"""What `scripts/bench soak` says of a server: here one that grows, and one that ended before it was killed."""

import asyncio
import random
import subprocess
import sys
from collections import Counter

import pytest

from benchmarks import soak
from benchmarks.on_http.clients import Question

KNOWN = {Question("a", 1): "b"}


class Growing:
    """A server whose memory is a MiB more each time that somebody looks while clients ask."""

    url, looks = "", 0

    def metrics(self):
        self.looks += 1
        return Counter(
            {("process_resident_memory_bytes",): self.looks * soak.MIB, ("serve_prompt_tokens_total",): 1}
        )

    def wait_until_idle(self):
        return Counter({("serve_prompt_tokens_total",): 1})


def test_memory_is_compared_with_that_after_a_fifth_of_the_time(monkeypatch):
    async def crowd(url, known, tally, enough, *clients):
        await enough.wait()

    monkeypatch.setattr(soak, "crowd", crowd)
    wrong = asyncio.run(soak.soak(Growing(), KNOWN, 0.1, 3, 15))
    assert wrong == ["memory grew by 16.0 MiB, more than 15"]


class Ended:
    """A server that a fault has ended under load."""

    url = ""

    def __init__(self):
        self.process = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])

    def stop(self, number):
        return self.process.wait()

    def start(self):
        pass

    wait_until_ready = start


@pytest.mark.parametrize("ended", [True, False])
def test_a_server_that_ends_by_itself_is_wrong_and_nobody_waits_for_its_answers(ended, monkeypatch):
    async def crowd(url, known, tally, enough, *clients):
        while not enough.is_set():
            tally.right += not ended
            await asyncio.sleep(0.01)

    monkeypatch.setattr(soak, "crowd", crowd)
    server = Ended()
    if not ended:
        monkeypatch.setattr(server, "stop", lambda number: -number)
        monkeypatch.setattr(server.process, "poll", lambda: None)
    wrong = asyncio.run(asyncio.wait_for(soak.kill(server, KNOWN, 1, random.Random(0)), 20))
    assert wrong == (["a server ended by itself with 3"] if ended else [])
    server.process.wait()
