"""The room at the experts of dropless plans where none is given: for all tokens, or bounded if that is out of reach."""

import dataclasses
import sys

from dualpipe_jax.command.answers import Answers
from dualpipe_jax.command.options import ChildDied, CommandError
from dualpipe_jax.inspect.target import Target
from dualpipe_jax.pods import planner
from dualpipe_jax.pods.bounds import Bounds
from dualpipe_jax.pods.planner import Wanted
from dualpipe_jax.step_options import BOUNDED


def with_room(answers: Answers, wanted: Wanted) -> tuple[Wanted, str]:
    """``wanted`` and "", or a copy bounded to ``BOUNDED`` and the reason: room for all tokens is out of reach.

    It is out of reach if it fits in no plan, or makes a step more than ``_TOO_SLOW`` times as long as bounded room.

    Raises:
      CommandError: the first plan and the last have the same error.
    """
    if wanted.base.capacity_factor is not None or "dropless" not in wanted.dispatches:
        return wanted, ""
    bounded = dataclasses.replace(wanted, base=dataclasses.replace(wanted.base, capacity_factor=BOUNDED))
    why, seconds = _least_dropless(answers, wanted)
    if seconds and 0.0 < _TOO_SLOW * (less := _least_dropless(answers, bounded)[1]) < seconds:
        why = f"takes at least {seconds:.4g} s, bounded {less:.4g} s"
    if not why:
        return wanted, ""
    print(f"dropless with room for all tokens {why}: bounded to {BOUNDED} even loads", file=sys.stderr)
    return bounded, why


def _least_dropless(answers: Answers, wanted: Wanted) -> tuple[str, float]:
    """Why no dropless plan fits, and the least seconds of a step; empty and 0 if unknown.

    The plan that needs least memory is counted: of those that keep least, the one with the fewest devices that exchange
    tokens, which is the one with the most ranks.
    """
    dropless = dataclasses.replace(wanted, dispatches=("dropless",))
    cases, _ = planner.cases(dropless, Target.parse(answers.target).num_devices)
    if not cases:
        return "", 0.0
    most = max(wanted.shards, key=planner.SHARDS.index)
    bounds = Bounds(cases)
    cut, last = bounds.cuts()[0], bounds.cuts()[-1]
    try:
        counted = answers.ask(
            planner.with_shard(bounds.representative(cut), most), "nothing", "room at the experts"
        )
    except (ChildDied, CommandError) as error:
        answers.raise_if_shared(error, planner.with_shard(bounds.representative(last), most))
        # Reported when the case's turn comes.
        return "", 0.0
    if counted.memory is None or not answers.dispatches:
        return "", 0.0
    bounds.add_counts(cut, counted)
    if needs := bounds.why_none_fits(cut):
        return needs, 0.0
    # Units are timed, so nothing says beforehand how long they take.
    if not counted.products:
        return "", 0.0
    return "", min(bounds.seconds(case) for case in bounds.cases[cut] if case in bounds.open_cases())


_TOO_SLOW = 2.0
"""Room for all tokens is given up if its step takes more than this many times as long as one with bounded room."""
