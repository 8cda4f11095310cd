"""Clients whose answers are known, some of whom leave in mid-stream, find what is wrong and lose nothing."""

import asyncio
import threading

import httpx
import pytest

from benchmarks.on_http.clients import Failed, Tally, alone, ask, crowd, questions
from tests.models.serve.running import Slow, running
from tests.models.serve.test_http_server import LIMITS, engine, idle, until

ASKED = [q for q in questions(200, seed=0) if len(q.prompt) + q.max_tokens <= LIMITS.max_positions][:12]


@pytest.fixture(scope="module")
def server():
    made = engine()
    with running(made) as (url, runner, _):
        yield url, runner, made


@pytest.fixture(scope="module")
def known(server):
    return asyncio.run(alone(server[0], ASKED))


async def crowded(url, known, done):
    """What came of 24 clients, a third of whom leave, until it is ``done``."""
    tally, enough = Tally(), asyncio.Event()
    load = asyncio.create_task(crowd(url, known, tally, enough, 24, 8))
    while not done(tally) and not load.done():
        await asyncio.sleep(0.01)
    enough.set()
    await load
    return tally


def test_a_crowd_of_whom_a_third_leave_gets_what_one_client_alone_gets(server, known):
    url, runner, made = server
    tally = asyncio.run(crowded(url, known, lambda tally: tally.right >= 64 and tally.left >= 16))
    assert not tally.wrong and not tally.failed
    idle(runner)
    until(lambda: made.num_running == made.num_used_blocks == 0)


def test_a_wrong_answer_is_found_also_by_those_who_leave(server, known):
    spoilt = {question: f"?{text[1:]}" for question, text in known.items()}
    tally = asyncio.run(crowded(server[0], spoilt, lambda tally: len(tally.wrong) >= 24))
    assert not tally.right and {text for _, text in tally.wrong} & {*known.values()}
    assert any(text not in known.values() for _, text in tally.wrong), "nobody left"
    idle(server[1])


def test_what_fails_is_told_by_how():
    question = ASKED[0]._replace(max_tokens=3)

    async def asked(url, **how):
        async with httpx.AsyncClient(base_url=url, timeout=60) as http:
            return await ask(http, question, **how)

    slow = Slow(max_requests=1)
    with running(slow, max_waiting=0) as (url, runner, _):
        first = threading.Thread(target=lambda: asyncio.run(asked(url, stream=False)))
        first.start()
        until(lambda: runner.num_open == 1)
        with pytest.raises(Failed, match="status 429"):
            asyncio.run(asked(url, stream=True))
        slow.go_on.release(9)
        first.join(60)
    with pytest.raises(Failed, match="ConnectError"):
        asyncio.run(asked(url, stream=True))
