"""An automatic scheduler: the best of every named schedule, of many policies, and of what improves on them."""

import dataclasses
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence

from dualpipe_jax.schedule.costs import HAIR, CostModel, MemoryModel, stages_a_share
from dualpipe_jax.schedule.ir import Placement, Schedule
from dualpipe_jax.schedule.optimize.bounds import lower_bound
from dualpipe_jax.schedule.optimize.improve import Moves, Player, improve, moves_of, paired, split_alone
from dualpipe_jax.schedule.optimize.seeds import Policies, served
from dualpipe_jax.schedule.optimize.terms import least_memory, make_terms
from dualpipe_jax.schedule.recipes import ALL_SCHEDULES, Recipe
from dualpipe_jax.schedule.simulate import simulate
from dualpipe_jax.schedule.validate import validate

PLACEMENTS = ("linear", "v", "wave", "interleaved", "interleaved_4", "bidirectional")
"""Names of placements; all but the last have one copy of the parameters."""

_WHOLE = 3.0
"""All limits that the search climbs through get so many times the effort together."""

_MOST_POLICIES, _MOST_TRIES = 600, 10_000
"""More for a rung gain little, however small the schedule is."""


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
    """Find a short schedule for given costs, transfers among them, and memory.

    It is no longer than any named schedule that fits and has a placement that is searched; which leaves out
    two copies of the parameters unless they are asked for. Nor is it longer than what is found within less
    memory, unless ``seconds`` cuts either short: the search climbs through limits from the least that holds
    a schedule, the same for all arguments but ``memory_limit``, up to that, and keeps what it has.

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
      placement: "linear", "v", "wave" (there and back twice, four stages a rank), "interleaved" (round the
        ranks twice), "interleaved_4" (four times), "bidirectional", or any Placement; the best of those with
        one copy of the parameters when left out.
      memory: sizes of a whole rank's share; live activations when left out.
      schedules: recipes to start from, and to be no worse than; all named ones when left out, cut as finely
        as the placements are.
      effort: how much to try, from 0; the time taken grows with it.
      seconds: begin nothing new after this long, whatever the effort; the named schedules are always played,
        and what is begun is ended.

    Raises:
      ValueError: if the memory holds no schedule at all: says how much the most modest needs. If the
        placement has other ranks, or its pipes cannot share the microbatches. If effort, seconds or the limit
        is no number that makes sense.
    """
    check_amounts(memory_limit, effort, seconds)
    costs, memory = costs or CostModel(), memory or MemoryModel()
    placements = _placements(num_ranks, num_microbatches, placement)
    if placement is None:
        placements = [p for p in placements if _can_cost(costs, p)]
    roomy = _roomy(placements, memory_limit, memory)
    named = [
        schedule
        for schedule in served(ALL_SCHEDULES if schedules is None else schedules, num_ranks, num_microbatches)
        if schedule.placement in placements
        or (placement is None and schedule.placement.num_pipes == 1 and _can_cost(costs, schedule.placement))
    ]
    goal = _bounds(roomy, num_microbatches, costs, memory_limit, memory)
    hunt = _Hunt(num_microbatches, costs, memory, named, min(goal.values()), memory_limit)
    ends = math.inf if seconds is None else time.monotonic() + seconds
    ladder = _ladder(placements, memory, hunt.turns())
    shares = {rung: min(1.0, _WHOLE * part / sum(ladder.values())) for rung, part in ladder.items()}
    climbed = [rung for rung in shares if rung <= memory_limit * (1 + HAIR)]
    for number, rung in enumerate(climbed):
        if hunt.is_over():
            break
        now = time.monotonic()
        within = _roomy(placements, rung, memory)
        hunt.climb(rung, _bounds(within, num_microbatches, costs, rung, memory))
        hunt.until = now + max(0.0, ends - now) / (len(climbed) - number)
        hunt.try_policies(1.5e6 * effort * shares[rung], round(_MOST_POLICIES * shares[rung]))
        hunt.improve(5e6 * effort * shares[rung], _MOST_TRIES * shares[rung])
    return validate(dataclasses.replace(hunt.best_within(memory_limit), name="search"))


def check_amounts(memory_limit: float, effort: float, seconds: float | None) -> None:
    """Raise ValueError unless these are amounts; only the limit may be infinite."""
    for name, amount in (("effort", effort), ("seconds", seconds)):
        if amount is not None and not 0 <= amount < math.inf:
            raise ValueError(f"search: got {name}={amount}; it must be finite and at least 0, such as 1")
    if math.isnan(memory_limit):
        raise ValueError("search: got memory_limit=nan; give a number, or leave it out for no limit")


def _ladder(
    placements: Sequence[Placement], memory: MemoryModel, turns: Iterable[float]
) -> dict[float, float]:
    """The limits to climb through, ascending, whatever the limit that is asked for; and the part of each.

    Where a longer named schedule gives way to a shorter one, without limit, and for as many activations as 1F1B
    keeps, it is a whole part; on the way between those half a part.
    """
    ranks, unit = placements[0].num_ranks, memory.live
    least = min(least_memory(p, memory.divided(stages_a_share(p)))[0] for p in placements)
    kept = 1.0  # of activations, where the least has one
    ladder: dict[float, float] = {}
    while unit and kept <= 1.5 * ranks:
        ladder[least + (kept - 1) * unit] = 0.5
        kept = max(kept + 0.5, math.floor(2.5 * kept) / 2)
    whole = (least + (ranks - 1) * unit, math.inf, *turns)
    ladder |= dict.fromkeys((rung for rung in whole if rung > least), 1.0)
    return dict(sorted(ladder.items()))


def _can_cost(costs: CostModel, placement: Placement) -> bool:
    """Whether its stages are not so fine that an extra takes more away than there is."""
    try:
        costs.divided(stages_a_share(placement))
    except ValueError:
        return False
    return True


def _in_rounds(placement: Placement) -> bool:
    stages = stages_a_share(placement)
    return stages > 1 and placement == Placement.interleaved(placement.num_ranks, int(stages))


def _bounds(
    placements: Iterable[Placement],
    num_microbatches: int,
    costs: CostModel,
    memory_limit: float,
    memory: MemoryModel,
) -> dict[Placement, float]:
    """Of each placement the time below which nothing ends."""
    return {
        p: lower_bound(p.num_ranks, num_microbatches, costs, memory_limit, placement=p, memory=memory)
        for p in placements
    }


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
        "interleaved": Placement.interleaved(num_ranks, 2),
        "interleaved_4": Placement.interleaved(num_ranks, 4),
        "bidirectional": Placement.bidirectional(num_ranks),
    }
    if placement is None:
        return list(dict.fromkeys(known[name] for name in PLACEMENTS[:-1]))
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
    roomy = [p for p, needs in zip(placements, least, strict=True) if needs <= memory_limit * (1 + HAIR)]
    if not roomy:
        modest = placements[least.index(min(least))]
        raise ValueError(
            f"search: got memory_limit={memory_limit:g}, but no schedule runs in less than {min(least):g}, "
            f"which one microbatch at a time takes on the placement {modest.pipes}; "
            f"try memory_limit={min(least):g} or more"
        )
    return roomy


@dataclasses.dataclass(frozen=True)
class _Found:
    """A schedule, what it takes, what it keeps, and the ``fill`` of the player that made it, if one did."""

    makespan: float
    number: int
    schedule: Schedule
    kept: float
    fill: float | None


class _Hunt:
    """What has been found so far, and the ways to find more within a limit."""

    def __init__(
        self,
        num_microbatches: int,
        costs: CostModel,
        memory: MemoryModel,
        named: Iterable[Schedule],
        goal: float,
        memory_limit: float,
    ):
        self.num_microbatches, self.costs, self.memory = num_microbatches, costs, memory
        self.goal, self.memory_limit = goal, memory_limit
        self.until, self.policies = math.inf, Policies()
        self.found: list[_Found] = []
        self.varied: set[int] = set()
        for schedule in named:
            self.add(schedule)

    def climb(self, limit: float, bounds: Mapping[Placement, float]) -> None:
        """Go on within another limit, by which nothing on each placement ends before its bound."""
        self.limit, self.bounds = limit, bounds
        self.players: dict[tuple[Placement, float], Player] = {}

    def player(self, placement: Placement, fill: float = 0.6) -> Player:
        """The player of a placement's moves."""
        if (placement, fill) not in self.players:
            parts = stages_a_share(placement)
            costs, memory = self.costs.divided(parts), self.memory.divided(parts)
            terms = make_terms(placement, self.num_microbatches, costs, self.limit, memory, who="search")
            self.players[placement, fill] = Player(terms, fill)
        return self.players[placement, fill]

    def add(self, schedule: Schedule, fill: float | None = None) -> None:
        """Keep a schedule."""
        timeline = simulate(schedule, self.costs.for_schedule(schedule))
        kept = max(timeline.memory(self.memory.for_schedule(schedule)))
        self.found.append(_Found(timeline.makespan, len(self.found), schedule, kept, fill))

    def best(self, count: int, limit: float) -> list[_Found]:
        """The shortest found that fit a limit, one of each makespan; of equals the first."""
        distinct: list[_Found] = []
        fitting = (found for found in self.found if found.kept <= limit * (1 + HAIR))
        for found in sorted(fitting, key=lambda found: (found.makespan, found.number)):
            if not distinct or found.makespan > distinct[-1].makespan * (1 + HAIR):
                distinct.append(found)
        return distinct[:count]

    def turns(self) -> list[float]:
        """What those keep that are shorter than all that keep less."""
        kept, shortest = [], math.inf
        for found in sorted(self.found, key=lambda found: (found.kept, found.makespan)):
            if found.makespan < shortest * (1 - HAIR):
                kept.append(found.kept)
                shortest = found.makespan
        return kept

    def best_within(self, limit: float) -> Schedule:
        """The shortest that fits a limit."""
        return self.best(1, limit)[0].schedule

    def shortest(self, limit: float) -> float:
        """The makespan of that, infinite if nothing fits."""
        return next((found.makespan for found in self.best(1, limit)), math.inf)

    def is_over(self) -> bool:
        """Is what fits the limit that was asked for proven to be the best?"""
        return self.shortest(self.memory_limit) <= self.goal * (1 + HAIR)

    def hopeful(self, makespan: float) -> list[Placement]:
        """The placements that are not proven to take at least as long as a makespan; none if time is up."""
        if time.monotonic() >= self.until:
            return []
        return [placement for placement, bound in self.bounds.items() if makespan > bound * (1 + HAIR)]

    def go_on(self, makespan: float) -> bool:
        """Is there time left, and something to gain over a makespan?"""
        return bool(self.hopeful(makespan))

    def try_policies(self, budget: float, most: int) -> None:
        """At most so many greedy schedules under random policies, but one; the budget counts actions."""
        shortest, policies, turns = self.shortest(self.limit), self.policies, 0
        policies.begin()
        while placements := self.hopeful(shortest) or list(self.bounds)[: shortest == math.inf]:
            # In rounds they come to little; there the named schedules are what is improved.
            placements = [p for p in placements if not _in_rounds(p)] or placements
            placement = placements[turns % len(placements)]
            shortest = min(shortest, policies.try_one(self.player(placement).terms))
            turns += 1
            if policies.spent > budget or turns > most:
                break
        for orders, placement in policies.best(lambda p: self.player(p).terms):
            self.add(Schedule("greedy", placement, self.num_microbatches, orders))

    def improve(self, budget: float, most: float) -> None:
        """Change the best found so far for the better; half of the budget, in moves played, is for one."""
        starts: list[tuple[float, Player, Moves]] = []
        for found in self.best(6, self.limit):
            if self.go_on(self.shortest(self.limit)):
                starts += self._variants(found)
        starts.sort(key=lambda start: start[0])
        for keep, share in ((4, 0.25), (2, 0.25), (1, 0.5)):
            improved = []
            for _, player, moves in starts[:keep]:
                tries = round(min(most, budget / sum(map(len, moves)) * share / keep))
                moves, makespan = improve(player, moves, tries, seed=keep, go_on=self.go_on)
                improved.append((makespan, player, moves))
            starts = sorted(improved, key=lambda start: start[0])
        for _, player, moves in starts:
            self.add(player.schedule(moves, "search"), player.fill)

    def _variants(self, found: _Found) -> Iterator[tuple[float, Player, Moves]]:
        """A schedule's moves as they are; at first also with neighbours paired, and backwards split or whole."""
        moves, new = moves_of(found.schedule), found.fill is None and found.number not in self.varied
        self.varied.add(found.number)
        fill = 0.6 if found.fill is None else found.fill
        player = self.player(found.schedule.placement, fill)
        starts = [(player, moves)]
        if new:
            starts += [(player, paired(player.terms, moves))]
            starts += [(player, split_alone(moves, split)) for split in (True, False)]
            starts += [(self.player(found.schedule.placement, fill), moves) for fill in (0.3, 1.0)]
        for player, variant in starts:
            play = player.play(variant)
            if play is not None:
                yield play.makespan, player, variant
