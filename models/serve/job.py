"""The texts that one request asks for, returned piece by piece."""

import asyncio
import functools
from collections.abc import AsyncIterator, Callable, Sequence
from typing import NamedTuple

import numpy as np

from models.decode import Completion, SamplingParams, Score
from models.decode.text import Detokenizer
from models.serve.errors import Refused
from models.serve.metrics import Metrics, TokenTimer
from models.serve.runner import Runner


class ChoiceRequest(NamedTuple):
    """A text to generate: its prompt, its parameters, and the text that is returned ahead of it."""

    prompt: np.ndarray
    params: SamplingParams
    echo: str = ""


class Piece(NamedTuple):
    """The next part of one of the texts, the reason if the text ends with it, and scores if asked for: its tokens',
    and that of the stop token that ended it, which is no part of the text."""

    choice: int
    text: str
    finish_reason: str | None
    scores: tuple[Score, ...] = ()
    stop_score: Score | None = None


class Usage(NamedTuple):
    """The tokens of all prompts, of all texts, and of the prompts those that were found in the cache."""

    prompt: int
    completion: int
    reused: int


class StopMatcher:
    """A text up to its first stop word, returned as far as it can no longer be the beginning of one.

    The first stop word is the one that ends first.
    """

    def __init__(self, stops: Sequence[str]):
        self._stops = stops
        self._held_back = ""
        self.reached = False

    def push(self, text: str) -> str:
        """Add text; return what can no longer be part of a stop word, perhaps nothing."""
        if self.reached:
            return ""
        self._held_back += text
        places = [
            (place + len(stop), place) for stop in self._stops if (place := self._held_back.find(stop)) >= 0
        ]
        self.reached = bool(places)
        end = min(places)[1] if places else len(self._held_back) - self._num_ambiguous()
        settled, self._held_back = self._held_back[:end], self._held_back[end:]
        return settled

    def finish(self) -> str:
        return "" if self.reached else self._held_back

    def _num_ambiguous(self) -> int:
        """The number of characters at the end that may be the beginning of a stop word."""
        longest = min(len(self._held_back), max(map(len, self._stops), default=1) - 1)
        ends = (self._held_back[len(self._held_back) - size :] for size in range(longest, 0, -1))
        return next((len(end) for end in ends if any(stop.startswith(end) for stop in self._stops)), 0)


def timeout_error(seconds: float) -> Refused:
    """The error for an answer that takes longer than the server's limit."""
    return Refused(
        504,
        f"the answer took longer than the server's limit of {seconds:g} s: ask for fewer tokens, or again later",
        code="timeout",
    )


class _Choice:
    def __init__(
        self, decode: Callable[[Sequence[int]], str], stops: Sequence[str], echo: str, timer: TokenTimer
    ):
        self._detokenizer, self._stop_matcher = Detokenizer(decode), StopMatcher(stops)
        self._echo, self._scores = echo, list[Score]()
        self.timer = timer
        self.num_tokens = 0
        self.completion: Completion | None = None

    @property
    def stopped(self) -> bool:
        return self._stop_matcher.reached

    def receive(self, tokens: Sequence[int], scores: Sequence[Score]) -> str:
        """Return the text that can no longer change with these tokens; tokens after a stop word are dropped.

        Scores of the prompt come before those of tokens; there is one for each token, or none at all.
        """
        of_prompt = max(0, len(scores) - len(tokens))
        self._scores += scores[:of_prompt]
        text, before = "", self.num_tokens
        for place, token in enumerate(tokens, start=of_prompt):
            if not self.stopped:
                self.num_tokens += 1
                self._scores += scores[place : place + 1]
                text += self._stop_matcher.push(self._detokenizer.push(token))
        self.timer.record_tokens(self.num_tokens - before)
        return text

    def finish(self, completion: Completion) -> str:
        self.completion = completion
        return self._stop_matcher.push(self._detokenizer.finish()) + self._stop_matcher.finish()

    def piece(self, index: int, text: str, reason: str | None) -> Piece:
        """The next piece of the text, with the echo and the scores that were not returned yet."""
        stop_score = None if self.stopped or self.completion is None else self.completion.stop_score
        found = Piece(index, self._echo + text, reason, tuple(self._scores), stop_score)
        self._echo, self._scores = "", []
        return found

    @property
    def reason(self) -> str:
        assert self.completion is not None
        return "stop" if self.stopped else self.completion.finish_reason


class Job:
    """The texts of one request while they are generated. Create it in the event loop.

    Args:
      runner: the runner that generates them.
      requests: the texts to generate.
      decode: a function from tokens to text.
      stops: the words at which a text ends; they are not part of it.
      seconds: the seconds that all texts together may take.
      metrics: the metrics in which they are counted.

    Raises:
      Refused: see ``Runner.submit``.
    """

    def __init__(
        self,
        runner: Runner,
        requests: Sequence[ChoiceRequest],
        decode: Callable[[Sequence[int]], str],
        stops: Sequence[str],
        seconds: float,
        metrics: Metrics,
    ):
        self._runner, self._seconds, self._requests = runner, seconds, requests
        self._deadline = asyncio.get_running_loop().time() + seconds
        self._updates: asyncio.Queue[tuple[int, Sequence[int], Sequence[Score], Completion | None]] = (
            asyncio.Queue()
        )
        self._choices = [_Choice(decode, stops, one.echo, TokenTimer(metrics)) for one in requests]
        self._handles = runner.submit(
            [
                (one.prompt, one.params, functools.partial(self._on_update, index))
                for index, one in enumerate(requests)
            ]
        )

    def _on_update(
        self, index: int, tokens: Sequence[int], scores: Sequence[Score], completion: Completion | None
    ) -> None:
        self._updates.put_nowait((index, tokens, scores, completion))

    async def pieces(self) -> AsyncIterator[Piece]:
        """Yield the pieces of all texts as they are generated, in no order between the texts.

        Raises:
          Refused: a text failed, or the time is up.
        """
        for _ in range(len(self._choices)):
            ended = False
            while not ended:
                index, tokens, scores, completion = await self._next()
                choice, ended = self._choices[index], completion is not None
                before, text = choice.stopped, choice.receive(tokens, scores)
                if choice.stopped and not before and not ended:
                    self._runner.cancel(self._handles[index])
                if completion is not None:
                    text += choice.finish(completion)
                    self._count(index, choice.reason)
                    self._raise_for(choice)
                if text or ended:
                    yield choice.piece(index, text, choice.reason if ended else None)

    async def whole(self) -> list[Piece]:
        """Return each text in one piece."""
        whole = [Piece(index, "", None) for index in range(len(self._choices))]
        async for piece in self.pieces():
            so_far = whole[piece.choice]
            text, scores = so_far.text + piece.text, so_far.scores + piece.scores
            whole[piece.choice] = piece._replace(text=text, scores=scores)
        return whole

    @property
    def usage(self) -> Usage:
        """The tokens of the prompt and of all texts, once they have ended."""
        # Several texts may share a prompt.
        prompts = {id(one.prompt): len(one.prompt) for one in self._requests}
        reused = dict(prompts)  # the least of a prompt's texts: the later ones find what the first has cached
        for one, choice in zip(self._requests, self._choices, strict=True):
            found = choice.completion.num_reused if choice.completion else 0
            reused[id(one.prompt)] = min(reused[id(one.prompt)], found)
        num_made = sum(choice.num_tokens for choice in self._choices)
        return Usage(sum(prompts.values()), num_made, sum(reused.values()))

    def cancel(self) -> None:
        for index, handle in enumerate(self._handles):
            self._count(index, "left")
            self._runner.cancel(handle)

    def _count(self, index: int, reason: str) -> None:
        choice, prompt = self._choices[index], len(self._requests[index].prompt)
        reused = 0 if choice.completion is None else choice.completion.num_reused
        choice.timer.record_end(reason, prompt=prompt, reused=reused, made=choice.num_tokens)

    async def _next(self) -> tuple[int, Sequence[int], Sequence[Score], Completion | None]:
        try:
            async with asyncio.timeout_at(self._deadline):
                return await self._updates.get()
        except TimeoutError:
            raise timeout_error(self._seconds) from None

    def _raise_for(self, choice: _Choice) -> None:
        completion = choice.completion
        assert completion is not None
        if completion.finish_reason == "error":
            if self._runner.failure is not None:
                self._runner.check_open()
            raise Refused(500, str(completion.error), code="generation_failed")
        if completion.finish_reason == "cancelled" and not choice.stopped:
            self._runner.check_open()
            raise Refused(500, "the text was cancelled", code="cancelled")
