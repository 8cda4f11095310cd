"""Clients whose right answers are known, from an earlier client that asked alone; some leave in mid-stream."""

import asyncio
import dataclasses
import json
import random
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import httpx

from benchmarks.on_http.server import NAME

SECONDS = httpx.Timeout(120)


class Question(NamedTuple):
    """A prompt, and the number of tokens of its answer."""

    prompt: str
    max_tokens: int


Known = Mapping[Question, str]
"""The right answers by question."""


class Failed(Exception):
    """Raised when a request gets no answer; the message says in few words why."""


@dataclasses.dataclass
class Tally:
    """The counts of requests by their results, and the reasons of those that failed."""

    right: int = 0
    wrong: list[tuple[Question, str]] = dataclasses.field(default_factory=list)
    left: int = 0
    failed: Counter[str] = dataclasses.field(default_factory=Counter)

    @property
    def cells(self) -> list[str]:
        """The counts as cells of a table: right, wrong, left, failed."""
        return [str(number) for number in (self.right, len(self.wrong), self.left, self.failed.total())]


def questions(number: int, seed: int) -> list[Question]:
    """Questions with prompts of 10 to 120 letters, most of which share a beginning with others, and 8 to 48 tokens."""
    chance = random.Random(seed)

    def letters(count: int) -> str:
        return "".join(chance.choices(string.ascii_letters, k=count))

    beginnings = [letters(chance.randint(0, 100)) for _ in range(8)]
    return [
        Question(chance.choice(beginnings) + letters(chance.randint(10, 20)), chance.randint(8, 48))
        for _ in range(number)
    ]


async def ask(http: httpx.AsyncClient, question: Question, *, stream: bool, leave_after: int = -1) -> str:
    """Return the answer, or the part of it that came before the client left after ``leave_after`` events.
    Raises Failed."""
    body = {"model": NAME, **question._asdict(), "temperature": 0, "stream": stream}
    text, whole = "", False
    try:
        async with http.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                raise Failed(f"status {response.status_code}")
            if not stream:
                return json.loads(await response.aread())["choices"][0]["text"]
            async for line in response.aiter_lines():
                if leave_after == 0:
                    return text
                if line == "data: [DONE]":
                    whole = True
                elif line:
                    event = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        raise Failed(f"{event['error']['code']} in mid-stream")
                    text += event["choices"][0]["text"]
                    leave_after -= 1
    except httpx.HTTPError as error:
        raise Failed(f"{type(error).__name__}{' in mid-stream' if text else ''}") from None
    if not whole:
        raise Failed("a stream without its end")
    return text


async def alone(url: str, asked: Sequence[Question]) -> dict[Question, str]:
    """The answers to one client that asks one question at a time. Raises Failed."""
    async with httpx.AsyncClient(base_url=url, timeout=SECONDS) as http:
        return {question: await ask(http, question, stream=False) for question in asked}


async def crowd(
    url: str, known: Known, tally: Tally, enough: asyncio.Event, num_clients: int, num_leaving: int
) -> None:
    """Let each client ask one question after another until ``enough`` is set; ``num_leaving`` of them always
    leave early."""
    asked = list(known)

    async def client(http: httpx.AsyncClient, number: int) -> None:
        chance, leaving = random.Random(number), number < num_leaving
        while not enough.is_set():
            question = chance.choice(asked)
            after = chance.randrange(question.max_tokens) if leaving else -1
            # Some of the leaving clients ask for a whole answer, not a stream, and do not wait for it.
            stream, seconds = chance.random() < (0.8 if leaving else 0.5), chance.uniform(0, 0.5)
            try:
                async with asyncio.timeout(seconds if leaving and not stream else None):
                    text = await ask(http, question, stream=stream, leave_after=after)
            except Failed as error:
                tally.failed[str(error)] += 1
                await asyncio.sleep(0.1)  # as a real client would
                continue
            except TimeoutError:
                tally.left += 1
                continue
            if text == known[question]:
                tally.right += 1
            elif leaving and stream and known[question].startswith(text):
                tally.left += 1
            else:
                tally.wrong.append((question, text))

    limits = httpx.Limits(max_connections=num_clients)
    async with httpx.AsyncClient(base_url=url, timeout=SECONDS, limits=limits) as http:
        await asyncio.gather(*(client(http, number) for number in range(num_clients)))
