"""An automatic scheduler: the best of every named schedule, of many policies, and of what improves on them."""

import contextlib
import dataclasses
import math
import random
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from dualpipe_jax.schedule.costs import CostModel, MemoryModel, stages_a_share
from dualpipe_jax.schedule.ir import Placement, Schedule
from dualpipe_jax.schedule.optimize.bounds import lower_bound
from dualpipe_jax.schedule.optimize.greedy import Policy, play_greedily
from dualpipe_jax.schedule.optimize.improve import Moves, Player, improve, moves_of, paired, split_alone
from dualpipe_jax.schedule.optimize.terms import least_memory, make_terms
from dualpipe_jax.schedule.recipes import ALL_SCHEDULES, Recipe
from dualpipe_jax.schedule.simulate import simulate
from dualpipe_jax.schedule.validate import validate

_Entry = TypeVar("_Entry", bound=tuple)

_KNOBS: dict[str, tuple[Any, ...]] = {
    "pair": (True, True, True, False),
    "match": (True, False),
    "patience": (0.0, 0.5, 1.0, 2.0, 4.0),
    "forward_first": (True, False),
    "deep_backward": (True, False),
    "split": ("always", "always", "ends", "ends", "never"),
    "owed": (math.inf, math.inf, 2, 4),
    "fill": (0.2, 0.5, 0.8, 1.0),
    "ahead": (math.inf, math.inf, 1.25, 1.0),  # of the ranks, as the next
    "burst": (0.0, 0.25, 0.5, 0.75, 1.0, 1.5),
    "pace": (0.0, 0.0, 0.9, 0.95, 1.0, 1.0, 1.02, 1.05, 1.1),
}
"""What policies are drawn from."""

_MOST_POLICIES, _MOST_TRIES = 600, 10_000
"""More gain little, however small the schedule is."""


def search(
    num_ranks: int,
    num_microbatches: int,
    costs: CostModel | None = None,
    memory_limit: float = math.inf,
    placement: Placement | str | None = None,
    *,
    memory: MemoryModel | None = None,
    schedules: Iterable[Recipe] | None = None,
    effort: float = 1.0,
    seconds: float | None = None,
) -> Schedule:
    """Find a short schedule for given costs and memory; no longer than any named schedule that fits.

    Seeds are the named schedules and what a greedy scheduler makes under many policies; the best are then
    improved by local changes: moves reordered, forwards and backwards paired and parted, backwards split so
    that their W's fill gaps. All is valid and within the limit at any time. The result depends on the
    arguments alone unless ``seconds`` is given.

    >>> from dualpipe_jax.schedule import simulate
    >>> found = search(2, 4, CostModel(F=1, I=1, W=1, FB=2), memory_limit=2, placement="v")
    >>> found.name, found.num_ranks
    ('search', 2)

    Args:
      num_ranks: pipeline ranks.
      num_microbatches: microbatches of the step, over all pipes together.
      costs: of a whole rank's share of the model (1 / num_ranks of it) whatever the placement; a
        placement of k stages a share takes ``costs.divided(k)``.
      memory_limit: what each rank may keep at once, its parameters included, in units of ``memory``.
      placement: "linear", "v", "wave" (there and back twice, four stages a rank), "bidirectional", or any
        Placement; the best of those with one copy of the parameters when left out.
      memory: sizes of a whole rank's share; live activations when left out.
      schedules: recipes to start from, and to be no worse than; all named ones when left out.
      effort: how much to try; the time taken grows with it.
      seconds: begin nothing new after this long, whatever the effort; the named schedules are always played,
        and what is begun is ended.

    Raises:
      ValueError: if the memory holds no schedule at all: says how much the most modest needs. If the
        placement has other ranks, or its pipes cannot share the microbatches.
    """
    costs, memory = costs or CostModel(), memory or MemoryModel()
    placements = _roomy(_placements(num_ranks, num_microbatches, placement), memory_limit, memory)
    if schedules is None:
        schedules = ALL_SCHEDULES
    bounds = {
        p: lower_bound(num_ranks, num_microbatches, costs, memory_limit, placement=p, memory=memory)
        for p in placements
    }
    ends = None if seconds is None else time.monotonic() + seconds
    hunt = _Hunt(num_microbatches, costs, memory_limit, memory, bounds, ends)
    for schedule in served(schedules, num_ranks, num_microbatches):
        if schedule.placement in placements if placement else schedule.placement.num_pipes == 1:
            hunt.add(schedule)
    hunt.try_policies(1.5e6 * effort)
    hunt.improve(5e6 * effort)
    return validate(dataclasses.replace(hunt.best(1)[0], name="search"))


def served(schedules: Iterable[Recipe], num_ranks: int, num_microbatches: int) -> Iterator[Schedule]:
    """The schedules of those recipes that serve the counts."""
    for recipe in schedules:
        with contextlib.suppress(ValueError):
            yield recipe(num_ranks, num_microbatches)


def _placements(num_ranks: int, num_microbatches: int, placement: Placement | str | None) -> list[Placement]:
    """The placements to search."""
    if num_ranks < 1 or num_microbatches < 1:
        raise ValueError(
            f"search: got {num_ranks} ranks and {num_microbatches} microbatches; it needs at least one of "
            f"each, try {max(num_ranks, 1)} ranks and {max(num_microbatches, 1)} microbatches"
        )
    known = {
        "linear": Placement.linear(num_ranks),
        "v": Placement.v(num_ranks),
        "wave": Placement.wave(num_ranks, 2),
        "bidirectional": Placement.bidirectional(num_ranks),
    }
    if placement is None:
        return [known["linear"], known["v"], known["wave"]]
    if isinstance(placement, str):
        if placement not in known:
            raise ValueError(
                f"search: no placement {placement!r}; try one of {', '.join(known)}, or a Placement"
            )
        placement = known[placement]
    if placement.num_ranks != num_ranks:
        raise ValueError(
            f"search: got {num_ranks} ranks and a placement on {placement.num_ranks}; "
            f"try num_ranks={placement.num_ranks}"
        )
    if num_microbatches % placement.num_pipes:
        fewer = num_microbatches - num_microbatches % placement.num_pipes
        raise ValueError(
            f"search: got {num_microbatches} microbatches for the {placement.num_pipes} pipes of the placement, "
            f"which share them equally; try {fewer or placement.num_pipes} or {fewer + placement.num_pipes}"
        )
    return [placement]


def _roomy(placements: Sequence[Placement], memory_limit: float, memory: MemoryModel) -> list[Placement]:
    """Those placements that some schedule can be run on within the limit; an error if there are none."""
    least = [least_memory(p, memory.divided(stages_a_share(p)))[0] for p in placements]
    roomy = [p for p, needs in zip(placements, least, strict=True) if needs <= memory_limit * (1 + 1e-9)]
    if not roomy:
        modest = placements[least.index(min(least))]
        raise ValueError(
            f"search: got memory_limit={memory_limit:g}, but no schedule runs in less than {min(least):g}, "
            f"which one microbatch at a time takes on the placement {modest.pipes}; "
            f"try memory_limit={min(least):g} or more"
        )
    return roomy


class _Hunt:
    """What has been found so far, and the ways to find more."""

    def __init__(
        self,
        num_microbatches: int,
        costs: CostModel,
        memory_limit: float,
        memory: MemoryModel,
        bounds: Mapping[Placement, float],
        ends: float | None,
    ):
        self.num_microbatches, self.costs, self.memory = num_microbatches, costs, memory
        self.memory_limit, self.bounds, self.ends = memory_limit, bounds, ends
        self.found: list[tuple[float, int, Schedule]] = []
        self.players: dict[tuple[Placement, float], Player] = {}

    def player(self, placement: Placement, fill: float = 0.6) -> Player:
        """The player of a placement's moves."""
        if (placement, fill) not in self.players:
            parts = stages_a_share(placement)
            costs, memory = self.costs.divided(parts), self.memory.divided(parts)
            terms = make_terms(
                placement, self.num_microbatches, costs, self.memory_limit, memory, who="search"
            )
            self.players[placement, fill] = Player(terms, fill)
        return self.players[placement, fill]

    def hopeful(self, makespan: float) -> list[Placement]:
        """The placements that are not proven to take at least as long as a makespan; none if time is up."""
        if self.ends is not None and time.monotonic() >= self.ends:
            return []
        return [placement for placement, bound in self.bounds.items() if makespan > bound * (1 + 1e-9)]

    def go_on(self, makespan: float) -> bool:
        """Is there time left, and something to gain over a makespan?"""
        return bool(self.hopeful(makespan))

    def add(self, schedule: Schedule) -> None:
        """Keep a schedule if it fits the memory."""
        timeline = simulate(schedule, self.costs.for_schedule(schedule))
        if max(timeline.memory(self.memory.for_schedule(schedule))) <= self.memory_limit * (1 + 1e-9):
            self.found.append((timeline.makespan, len(self.found), schedule))

    def best(self, count: int) -> list[Schedule]:
        """The shortest found, one of each makespan; of equals the first."""
        return [schedule for _, _, schedule in _distinct(self.found)[:count]]

    def try_policies(self, budget: float) -> None:
        """Greedy schedules, first under random policies, then under changes of the best of those.

        The budget counts actions; it is spent by turns on all placements that could still win, and at
        least once.
        """
        dice, spent = random.Random(0), 0.0
        tried: list[tuple[float, int, Placement, Policy]] = []
        shortest = min((makespan for makespan, *_ in self.found), default=math.inf)
        while placements := self.hopeful(shortest) or list(self.bounds)[: shortest == math.inf]:
            number = len(tried)
            placement, parent = placements[number % len(placements)], None
            parents = _distinct(entry for entry in tried if entry[2] in placements)[:10]
            if parents and (spent > budget / 3 or number > _MOST_POLICIES / 3):
                _, _, placement, parent = dice.choice(parents)
            policy = _draw(placement.num_ranks, dice, parent)
            _, makespan = play_greedily(self.player(placement).terms, policy)
            tried.append((makespan, number, placement, policy))
            shortest = min(shortest, makespan)
            spent += 2 * placement.num_model_stages * self.num_microbatches
            if spent > budget or number > _MOST_POLICIES:
                break
        for _, _, placement, policy in _distinct(tried)[:6]:
            orders, _ = play_greedily(self.player(placement).terms, policy)
            self.add(Schedule("greedy", placement, self.num_microbatches, orders))

    def improve(self, budget: float) -> None:
        """Change the best found so far for the better; half of the budget, in moves played, is for one."""
        starts: list[tuple[float, Player, Moves]] = []
        for schedule in self.best(6):
            if self.go_on(min(makespan for makespan, *_ in self.found)):
                starts += self._variants(schedule)
        starts.sort(key=lambda start: start[0])
        for keep, share in ((4, 0.25), (2, 0.25), (1, 0.5)):
            improved = []
            for _, player, moves in starts[:keep]:
                tries = round(min(_MOST_TRIES, budget / sum(map(len, moves))) * share / keep)
                moves, makespan = improve(player, moves, tries, seed=keep, go_on=self.go_on)
                improved.append((makespan, player, moves))
            starts = sorted(improved, key=lambda start: start[0])
        for _, player, moves in starts:
            self.add(player.schedule(moves, "search"))

    def _variants(self, schedule: Schedule) -> Iterator[tuple[float, Player, Moves]]:
        """A schedule's moves as they are, with neighbours paired, and with backwards split or whole."""
        moves = moves_of(schedule)
        for fill in (0.6, 0.3, 1.0):
            player = self.player(schedule.placement, fill)
            for variant in (
                moves,
                paired(player.terms, moves),
                split_alone(moves),
                split_alone(moves, False),
            ):
                play = player.play(variant)
                if play is not None:
                    yield play.makespan, player, variant


def _distinct(entries: Iterable[_Entry]) -> list[_Entry]:
    """In the order of their makespans, which come first in each; of equals the one numbered first."""
    shortest: list[_Entry] = []
    for entry in sorted(entries, key=lambda entry: entry[:2]):
        if not shortest or entry[0] > shortest[-1][0] * (1 + 1e-9):
            shortest.append(entry)
    return shortest


def _draw(num_ranks: int, dice: random.Random, parent: Policy | None) -> Policy:
    """A random policy, or a parent with one or two of its knobs turned."""
    drawn = {knob: dice.choice(values) for knob, values in _KNOBS.items()}
    drawn["ahead"] *= num_ranks
    drawn["burst"] = round(drawn["burst"] * num_ranks)
    if parent is None:
        return Policy(**drawn)
    if parent.pace:
        drawn["pace"] = parent.pace * dice.uniform(0.95, 1.05)
        drawn["burst"] = max(0, parent.burst + dice.randint(-2, 2))
    turned = dice.sample(list(_KNOBS), 2)
    return dataclasses.replace(parent, **{knob: drawn[knob] for knob in turned})
