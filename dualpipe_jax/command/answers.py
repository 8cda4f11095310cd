"""Answers about plans for one target, from the cache or a child process, and what they say about the program."""

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from dualpipe_jax.command.options import ChildDied, CommandError
from dualpipe_jax.command.overlap import ask_pods
from dualpipe_jax.pods.bounds import Cut
from dualpipe_jax.pods.cache import Cache
from dualpipe_jax.pods.plan import Plan
from dualpipe_jax.pods.request import Request
from dualpipe_jax.pods.results import Answer


class Answers:
    """Asks about plans for a target, and remembers what the answers say about the program.

    Args:
      target: the devices.
      cache: the cache of answers.
      rates: the file of measured rates, if there is one.
    """

    def __init__(self, target: str, cache: Cache, rates: Path | None):
        self.target, self.cache, self.rates = target, cache, rates
        self.is_timed = target.lower().startswith("cpu:")  # units run on this machine
        # Numbers of parameters of the programs.
        self.sizes: set[int] = set()
        # Number of layers of the model; 0 while or where it is unknown.
        self.layers = 0
        self.dispatches = False  # whether the program sends tokens to experts at all
        self.counted: set[Cut] = set()
        self._refused: dict[Request, CommandError] = {}

    def ask(self, plan: Plan, compile: str, title: str, *, hints: bool = False) -> Answer:
        """The answer about a plan, with ``compile`` of it compiled ("nothing", its "units", or the "usual" ones).

        Raises:
          CommandError: the plan is impossible.
          ChildDied: the child process ended without an answer.
        """
        rates = None if self.rates is None else str(self.rates.absolute())
        request = Request(plan, self.target, compile, rates=rates, hints=hints)
        if request in self._refused:
            raise self._refused[request]
        known = self.cache.get(request)
        if known is None:
            words = f"{title}: {plan.schedule_in_words}, {plan.layout}, {plan.batch} sequences, remat {plan.remat}"
            try:
                known = ask_pods(request, words)
            except CommandError as error:
                self._refused[request] = error
                raise
            self.cache.put(request, known)
        self.counted.add(Cut.of(plan))
        self.layers = sum(known.stage_layers)
        self.dispatches |= known.dropped is not None or plan.ep_nodes > 1
        if known.parameters is not None:
            self.sizes.add(known.parameters.total)
        return known

    def count_at_once(self, plans: Iterable[Plan]) -> list[Answer | Exception]:
        """The answer for each plan with nothing compiled, or the error; several plans are counted at once.

        On an interrupt the counts that have begun still finish, and are cached.
        """

        def count(plan: Plan) -> Answer | Exception:
            try:
                return self.ask(plan, "nothing", "counting")
            except (ChildDied, CommandError) as error:
                return error

        with ThreadPoolExecutor(_AT_ONCE) as pool:
            asked = [pool.submit(count, plan) for plan in plans]
            try:
                return [each.result() for each in asked]
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise

    def raise_if_shared(self, error: Exception | None, other: Plan) -> None:
        """Raise a plan's error if ``other``, the most different plan, has the same one: then every plan has it."""
        if error is not None and self.is_shared(error, other):
            raise error

    def is_shared(self, error: Exception | None, other: Plan) -> bool:
        """Whether another plan has the same error, word for word; never for a process that died."""
        if not isinstance(error, CommandError):
            return False
        try:
            self.ask(other, "nothing", "the last case")
        except CommandError as its:
            return str(its) == str(error)
        except ChildDied:
            # Reported when this plan's turn comes.
            pass
        return False


_AT_ONCE = min(4, os.cpu_count() or 1)
"""Number of plans that are counted at once: each takes one core, and a gigabyte of memory for DeepSeek-V3."""
