"""One thread that steps an engine, and the event loop's side of it: neither ever waits for the other."""

import asyncio
import contextlib
import dataclasses
import functools
import queue
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np

from models.decode import Completion, Engine, RequestError, SamplingParams, Score
from models.serve.errors import Refused

OnUpdate = Callable[[Sequence[int], Sequence[Score], Completion | None], None]
"""A function that the event loop calls with new tokens, their scores if asked for, and, at the end, the
completion."""


@dataclasses.dataclass(eq=False)
class RequestHandle:
    """A text that is being generated, or waits."""

    prompt: np.ndarray
    params: SamplingParams
    on_update: OnUpdate
    # The engine's number. Only the thread uses it and the tokens and scores that were not passed on yet.
    number: int = -1
    new_tokens: list[int] = dataclasses.field(default_factory=list)
    new_scores: list[Score] = dataclasses.field(default_factory=list)


class Runner:
    """An engine in a thread of its own. All public methods are called in the event loop.

    Args:
      engine: the engine, which nothing else may use from now on.
      max_waiting: the number of texts that may wait, beyond those that the engine serves at the same time.

    Attributes:
      failure: the error that ended the thread; None if there was none.
      leaving: whether clients should send requests elsewhere, though requests are still accepted.
      on_failure: a function that is called in the event loop when the thread fails.
    """

    def __init__(self, engine: Engine, max_waiting: int):
        self.max_open = engine.limits.max_requests + max_waiting
        self.failure: str | None = None
        self.leaving = False
        self.on_failure: Callable[[], None] = lambda: None
        self._engine = engine
        self._closing = False
        # Of all texts that have not ended; only the event loop uses it.
        self._handles: set[RequestHandle] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._handles_by_number: dict[int, RequestHandle] = {}  # only the thread uses it
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._step_began: float | None = None  # the thread writes it, others read it
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Start the thread; call this in the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    @property
    def num_open(self) -> int:
        """The number of texts that are being generated or wait."""
        return len(self._handles)

    @property
    def num_running(self) -> int:
        """The number of the engine's slots that texts have; texts that wait have none."""
        return self._engine.num_running

    @property
    def num_used_blocks(self) -> int:
        """The number of blocks of the cache that texts have."""
        return self._engine.num_used_blocks

    @property
    def max_positions(self) -> int:
        """The largest number of tokens of a text and its prompt together."""
        return self._engine.limits.max_positions

    def check(self, prompt: np.ndarray, params: SamplingParams) -> None:
        """Raise a RequestError if a text can never be generated. Any thread may call this."""
        self._engine.check(prompt, params)

    def check_alive(self, seconds: float) -> None:
        """Raise Refused, 503, once the thread has failed or one step has taken longer than ``seconds``."""
        self._check_failure()
        began = self._step_began
        if began is not None and time.monotonic() - began > seconds:
            message = f"a step has taken longer than {seconds:g} s, so its texts were given up: start the server again"
            raise Refused(503, message, code="engine_stuck")

    def check_ready(self) -> None:
        """Raise Refused, 503, once requests should be sent elsewhere."""
        self.check_open()
        if self.leaving:
            raise Refused(503, "the server will stop soon: ask another one", code="stopping")

    def check_open(self) -> None:
        """Raise Refused, 503, once no more texts are accepted."""
        self._check_failure()
        if self._closing:
            raise Refused(503, "the server is stopping: ask another one, or again later", code="stopping")

    def _check_failure(self) -> None:
        if self.failure is not None:
            raise Refused(503, "the engine has failed; the server ends", code="engine_failed")

    def submit(self, texts: Sequence[tuple[np.ndarray, SamplingParams, OnUpdate]]) -> list[RequestHandle]:
        """Accept all of these texts, or none.

        Raises:
          Refused: 429, if there would be more texts than the limit; 400, if there would be even without others; 503, if
            no more texts are accepted.
        """
        self.check_open()
        if len(texts) > self.max_open:
            raise Refused(
                400,
                f"{len(texts)} texts are more than the server makes and lets wait at the same time, {self.max_open}: "
                "ask for fewer in one request",
                param="n",
            )
        if self.num_open + len(texts) > self.max_open:
            raise Refused(
                429,
                f"{self.num_open} texts are being made or wait, and {len(texts)} more would be above the server's "
                f"limit of {self.max_open}: ask again later",
                code="too_many_requests",
                headers={"retry-after": "1"},
            )
        handles = [RequestHandle(*one) for one in texts]
        for handle in handles:
            self._handles.add(handle)
            self._commands.put(functools.partial(self._add, handle))
        self._idle.clear()
        return handles

    def cancel(self, handle: RequestHandle) -> None:
        """End a text, which then completes as cancelled; a text that has ended is left alone."""
        if handle in self._handles:
            self._commands.put(lambda: self._engine.cancel(handle.number))

    async def drain(self, seconds: float) -> None:
        """Accept no more texts, and wait for up to ``seconds`` until all have ended; then cancel the rest."""
        self._closing = True
        try:
            async with asyncio.timeout(seconds):
                await self._idle.wait()
        except TimeoutError:
            for handle in self._handles:
                self.cancel(handle)

    async def close(self) -> None:
        """Cancel the texts that are left, and end the thread."""
        await self.drain(0)
        self._commands.put(None)
        # Not joined in a thread, which the loop would wait for in turn: a second Ctrl-C does not wait for a step.
        while self._thread.is_alive():
            await asyncio.sleep(0.01)

    # In the thread.

    def _run(self) -> None:
        try:
            while self._run_commands():
                self._step_began = time.monotonic()
                ended = self._engine.step()
                self._step_began = None
                self._send_updates(ended)
        except Exception as error:  # the cache is lost with a step that fails
            # A loop that did not wait for this thread is closed.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._fail, f"{type(error).__name__}: {error}")

    def _run_commands(self) -> bool:
        """Run the orders, and wait until the engine has work. Returns False once the thread is to end."""
        while True:
            try:
                command = self._commands.get(block=not self._engine.busy)
            except queue.Empty:
                return True
            if command is None:
                return False
            command()

    def _add(self, handle: RequestHandle) -> None:
        try:
            callbacks = handle.new_tokens.append, handle.new_scores.append
            handle.number = self._engine.add(handle.prompt, handle.params, *callbacks)
        except RequestError as error:
            ended = Completion(-1, (), "error", str(error))
            self._loop.call_soon_threadsafe(self._deliver, [(handle, [], [], ended)])
        else:
            self._handles_by_number[handle.number] = handle

    def _send_updates(self, completions: Sequence[Completion]) -> None:
        ended = {one.id: one for one in completions}
        updates = []
        for number, handle in self._handles_by_number.items():
            if handle.new_tokens or handle.new_scores or number in ended:
                updates.append((handle, handle.new_tokens[:], handle.new_scores[:], ended.get(number)))
                handle.new_tokens.clear()
                handle.new_scores.clear()
        for number in ended:
            del self._handles_by_number[number]
        if updates:
            self._loop.call_soon_threadsafe(self._deliver, updates)

    # In the event loop.

    def _deliver(
        self, updates: Sequence[tuple[RequestHandle, Sequence[int], Sequence[Score], Completion | None]]
    ) -> None:
        for handle, tokens, scores, completion in updates:
            if completion is not None:
                self._handles.discard(handle)
            handle.on_update(tokens, scores, completion)
        if not self._handles:
            self._idle.set()

    def _fail(self, why: str) -> None:
        self.failure = why
        ended = Completion(-1, (), "error", "the engine has failed")
        self._deliver([(handle, [], [], ended) for handle in self._handles])
        self.on_failure()
