"""The starts of a search: named schedules with different numbers of stages, and greedy schedules of many policies."""

import contextlib
import dataclasses
import math
import random
from collections.abc import Iterable, Iterator
from typing import Any

from dualpipe_jax.schedule.costs import stages_a_share
from dualpipe_jax.schedule.ir import Placement, Schedule
from dualpipe_jax.schedule.names import with_finer_variants
from dualpipe_jax.schedule.optimize.greedy import Policy, play_greedily
from dualpipe_jax.schedule.optimize.search_state import FoundSchedules, MemoryLevel, PolicyTrial, distinct
from dualpipe_jax.schedule.optimize.terms import Terms
from dualpipe_jax.schedule.recipes import Recipe

_POLICY_VALUES: dict[str, tuple[Any, ...]] = {
    "pair": (True, True, True, False),
    "match": (True, False),
    "patience": (0.0, 0.5, 1.0, 2.0, 4.0),
    "forward_first": (True, False),
    "deep_backward": (True, False),
    "split": ("always", "always", "ends", "ends", "never"),
    "owed": (math.inf, math.inf, 2, 4),
    "fill": (0.2, 0.5, 0.8, 1.0),
    "ahead": (math.inf, math.inf, 1.25, 1.0),  # a multiple of num_ranks, as is burst
    "burst": (0.0, 0.25, 0.5, 0.75, 1.0, 1.5),
    "pace": (0.0, 0.0, 0.9, 0.95, 1.0, 1.0, 1.02, 1.05, 1.1),
}
"""The values of each field of ``Policy`` from which random policies are drawn; repeated values are likelier."""


def schedules_for_counts(
    recipes: Iterable[Recipe], num_ranks: int, num_microbatches: int
) -> Iterator[Schedule]:
    """The schedules of the recipes that serve the counts, with the finer variants of ``with_finer_variants``."""
    for recipe in with_finer_variants(recipes):
        with contextlib.suppress(ValueError):
            yield recipe(num_ranks, num_microbatches)


class PolicySearch:
    """Random policies and changes of the best of them, tried in rounds with different terms."""

    def __init__(self) -> None:
        self._rng = random.Random(0)
        self._best_of_last_round: list[PolicyTrial] = []
        self._tried: list[PolicyTrial] = []

    def add_greedy_schedules(
        self, found_schedules: FoundSchedules, level: MemoryLevel, budget: float, most: int
    ) -> None:
        """Add the best of many greedy schedules within a level to ``found_schedules``.

        The round ends once more than ``most`` policies or more than ``budget`` actions have been tried. The best
        policies of the last round are tried first, and changes of them later.
        """
        self._best_of_last_round = distinct(self._tried)[:10] or self._best_of_last_round
        self._tried = []
        shortest, spent = found_schedules.shortest(level.limit), 0.0
        while (
            placements := level.promising_placements(shortest) or list(level.bounds)[: shortest == math.inf]
        ):
            # Greedy schedules on interleaved placements are poor; there the search improves the named schedules.
            placements = [p for p in placements if not _is_interleaved(p)] or placements
            terms = level.player(placements[len(self._tried) % len(placements)]).terms
            shortest = min(shortest, self._try_one(terms))
            spent += 2 * terms.placement.num_stages * terms.count
            if spent > budget or len(self._tried) > most:
                break
        for _, _, placement, policy in distinct(self._tried)[:6]:
            orders, _ = play_greedily(level.player(placement).terms, policy)
            found_schedules.add(
                Schedule("greedy", placement, found_schedules.problem.num_microbatches, orders)
            )

    def _try_one(self, terms: Terms) -> float:
        """Choose and simulate a policy under the terms of a placement; return its makespan."""
        placement, number = terms.placement, len(self._tried)
        from_last_round = [entry for entry in self._best_of_last_round if entry.placement == placement]
        tried = [entry for entry in self._tried if entry.placement == placement]
        if from_last_round and not tried:
            policy = from_last_round[0].policy
        else:
            known = distinct([*tried, *from_last_round])[:10] if number % 3 else []
            parent = self._rng.choice(known).policy if known else None
            policy = _draw_policy(placement.num_ranks, self._rng, parent)
        _, makespan = play_greedily(terms, policy)
        self._tried.append(PolicyTrial(makespan, number, placement, policy))
        return makespan


def _is_interleaved(placement: Placement) -> bool:
    stages = stages_a_share(placement)
    return stages > 1 and placement == Placement.interleaved(placement.num_ranks, int(stages))


def _draw_policy(num_ranks: int, rng: random.Random, parent: Policy | None) -> Policy:
    """A random policy, or a copy of ``parent`` with two of its fields drawn anew (some may keep their value)."""
    drawn = {field: rng.choice(values) for field, values in _POLICY_VALUES.items()}
    drawn["ahead"] *= num_ranks
    drawn["burst"] = round(drawn["burst"] * num_ranks)
    if parent is None:
        return Policy(**drawn)
    if parent.pace:
        drawn["pace"] = parent.pace * rng.uniform(0.95, 1.05)
        drawn["burst"] = max(0, parent.burst + rng.randint(-2, 2))
    redrawn = rng.sample(list(_POLICY_VALUES), 2)
    return dataclasses.replace(parent, **{field: drawn[field] for field in redrawn})
