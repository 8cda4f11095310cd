"""Lowered tables played with tokens: every read finds what it needs, no tick or slot is wasted."""

import itertools
import random
import re

import numpy as np
import pytest

from dualpipe_jax.schedule import ALL_SCHEDULES, Action, CostModel, Op, Placement, Schedule, simulate
from dualpipe_jax.schedule.lowering.flat import channels, flatten, topological
from dualpipe_jax.schedule.lowering.lower import forward_only, lower, tabulate
from dualpipe_jax.schedule.lowering.table import Keeps, TickTable
from dualpipe_jax.schedule.lowering.ticks import earliest
from dualpipe_jax.schedule.recipes import dualpipe, dualpipe_v, gpipe, one_f_one_b, zb_h1
from dualpipe_jax.schedule.recipes.bidirectional import hanayo
from dualpipe_jax.schedule.recipes.classic import interleaved_1f1b
from dualpipe_jax.schedule.recipes.zero_bubble import interleaved_zero_bubble

FEW = ((1, 1), (1, 4), (2, 1), (2, 4), (3, 2), (3, 7), (4, 2), (4, 8), (5, 3), (6, 12), (8, 4))
"""Of ranks and microbatches: either may be 1 or odd, fewer microbatches than ranks, as many, and more."""


def legal_schedules(counts) -> list[Schedule]:
    """Of every recipe those counts that it takes."""
    found = []
    for make, (ranks, microbatches) in itertools.product(ALL_SCHEDULES, counts):
        try:
            found.append(make(ranks, microbatches))
        except ValueError:
            continue
    return found


def handmade(placement: Placement, num_microbatches: int, *orders: str) -> Schedule:
    slots = [tuple(tuple(map(Action.parse, slot.split("+"))) for slot in order.split()) for order in orders]
    return Schedule("handmade", placement, num_microbatches, tuple(slots))


def random_costs(seed: int) -> CostModel:
    draw = random.Random(seed)
    F, I, W = (draw.uniform(0.5, 2) for _ in range(3))
    return CostModel(F, I, W, draw.uniform(max(F, I + W), F + I + W), draw.choice((0, 0, 0.1, 0.3)))


SCHEDULES = legal_schedules(FEW)


def test_every_recipe_is_there():
    assert all(sum(s.name == make.__name__ for s in SCHEDULES) >= 5 for make in ALL_SCHEDULES)


class Pool:
    """Slots that hold tokens. A token is what the engine would keep there."""

    def __init__(self, size: int):
        self.slots: list[object] = [None] * size

    def write(self, slot: int, token: object) -> None:
        assert 0 <= slot < len(self.slots)
        self.slots[slot] = token

    def read(self, slot: int, token: object) -> None:
        assert self.slots[slot] == token, f"found {self.slots[slot]}, not {token}"


def play(table: TickTable) -> list[list[tuple[str, int, int]]]:
    """Move tokens as the docstring of TickTable says; every read must find the token that it needs.

    Returns what each rank did: (unit, stage of all pipes, microbatch of the batch).
    """
    schedule, placement, keeps = table.schedule, table.schedule.placement, table.keeps
    per_pipe, ranks = schedule.microbatches_per_pipe, range(schedule.num_ranks)
    pools = [{name: Pool(size) for name, size in table.num_slots.items()} for _ in ranks]
    out: list[dict[str, object]] = [{"y": None, "dx": None} for _ in ranks]
    done: list[list[tuple[str, int, int]]] = [[] for _ in ranks]
    backward = any(a.op is not Op.F for order in schedule.orders for slot in order for a in slot)

    for t in range(table.num_ticks):
        rows = [dict(zip(table.columns, table.array[t, r].tolist(), strict=True)) for r in ranks]
        flying = []
        for k, channel in enumerate(table.channels):
            for source, destination in channel.pairs:
                flying.append((destination, k, channel.payload, out[source][channel.payload]))
        brought = {(d, k) for d, k, _, _ in flying}

        for r, row in enumerate(rows):
            if row["unit"] < 0:
                continue
            unit, pool, held = table.units[row["unit"]], pools[r], placement.stages_on[r]
            assert not clashes(table, row)

            def stage_of(letter: str, stand, row=row, held=held) -> tuple[int, int]:
                stage, microbatch = held[stand.local], row[f"{letter}_microbatch"]
                assert placement.pipe_of(stage) == microbatch // per_pipe
                assert placement.model_stage(stage) == row[f"{letter}_stage"]
                assert keeps.kind_of[row[f"{letter}_stage"]] == stand.kind
                return stage, microbatch

            def kept(lives: str, kind: int) -> list[str]:
                return [name for name, kinds in keeps.pools.items() if kinds.get(kind, "-") in lives.split()]

            if unit.forward is not None:
                stage, mb = stage_of("F", unit.forward)
                if not placement.is_first(stage):
                    pool["x"].read(row["F_x"], ("x", stage, mb))
            if unit.backward is not None:
                back, back_mb = stage_of("G", unit.backward)
                keep = keeps.keep_input[unit.backward.kind]
                if not placement.is_first(back) and (keep == "W" or (keep == "I" and unit.op != "W")):
                    pool["x"].read(row["G_x"], ("x", back, back_mb))
                for full in kept("FW IW" if unit.op == "W" else "FI FW", unit.backward.kind):
                    pool[full].read(row[f"G_{full}"], (full, back, back_mb))
                if unit.op != "W" and not placement.is_last(back):
                    pool["dy"].read(row["G_dy"], ("dy", back, back_mb))

            if unit.forward is not None:
                if backward:
                    for full in kept("FI FW", unit.forward.kind):
                        pool[full].write(row[f"F_{full}"], (full, stage, mb))
                if not placement.is_last(stage):
                    out[r]["y"] = y = ("x", stage + 1, mb)
                    here = placement.rank_of[stage + 1] == r
                    assert here == (row["F_y"] != table.num_slots["x"] - 1)
                    assert not here or "x" in table.hands_over
                    pool["x"].write(row["F_y"], y)
                done[r].append(("F", stage, mb))
            if unit.backward is not None:
                if unit.op == "I":
                    for full in kept("IW", unit.backward.kind):
                        pool[full].write(row[f"G_{full}"], (full, back, back_mb))
                if unit.op != "W" and not placement.is_first(back):
                    out[r]["dx"] = dx = ("dy", back - 1, back_mb)
                    here = placement.rank_of[back - 1] == r
                    assert here == (row["G_dx"] != table.num_slots["dy"] - 1)
                    assert not here or "dy" in table.hands_over
                    pool["dy"].write(row["G_dx"], dx)
                done[r].append((unit.op.removeprefix("F"), back, back_mb))

        for destination, k, payload, token in flying:
            pools[destination]["x" if payload == "y" else "dy"].write(rows[destination][f"arrive{k}"], token)
        for r, row in enumerate(rows):
            for k, channel in enumerate(table.channels):
                if (r, k) not in brought:  # a permute brings zeros to those who are no destination
                    pools[r]["x" if channel.payload == "y" else "dy"].write(row[f"arrive{k}"], None)
    return done


def clashes(table: TickTable, row: dict[str, int]) -> set[tuple[str, int]]:
    """Slots that a pair both writes for one of its two and reads for the other, or writes for both."""
    unit = table.units[row["unit"]]
    if unit.op != "FB":
        return set()
    placement, keeps = table.schedule.placement, table.keeps
    last = placement.num_model_stages - 1
    bins = {("x", table.num_slots["x"] - 1), ("dy", table.num_slots["dy"] - 1)}
    names = [(name, [k for k, life in kinds.items() if life != "IW"]) for name, kinds in keeps.pools.items()]
    forward = {(name, row[f"F_{name}"]) for name, kinds in names if unit.forward.kind in kinds}
    forward |= {("x", row["F_x"])} if row["F_stage"] > 0 else set()
    forward |= {("x", row["F_y"])} if row["F_stage"] < last else set()
    backward = {(name, row[f"G_{name}"]) for name, kinds in names if unit.backward.kind in kinds}
    backward |= {("dy", row["G_dy"])} if row["G_stage"] < last else set()
    backward |= {("dy", row["G_dx"])} if row["G_stage"] > 0 else set()
    if row["G_stage"] > 0 and keeps.keep_input[unit.backward.kind] != "F":
        backward |= {("x", row["G_x"])}
    return (forward & backward) - bins


def random_keeps(num_stages: int, seed: int) -> Keeps:
    """Stages of up to three kinds that share pools in all sorts of ways."""
    draw = random.Random(seed)
    num_kinds = draw.randint(1, 3)

    def pool() -> dict[int, str]:
        kinds = draw.sample(range(num_kinds), draw.randint(1, num_kinds))
        return {kind: draw.choice(("FI", "FW", "IW")) for kind in kinds}

    return Keeps(
        tuple(draw.randrange(num_kinds) for _ in range(num_stages)),
        tuple(draw.choice(("F", "I", "W")) for _ in range(num_kinds)),
        {f"pool{k}": pool() for k in range(draw.randint(0, 5))},
    )


def done_by_schedule(schedule: Schedule) -> list[list[tuple[str, int, int]]]:
    placement, per_pipe = schedule.placement, schedule.microbatches_per_pipe

    def done(a: Action) -> tuple[str, int, int]:
        return a.op.value, a.stage, placement.pipe_of(a.stage) * per_pipe + a.microbatch

    return [sorted(done(a) for slot in order for a in slot) for order in schedule.orders]


def check(table: TickTable) -> None:
    schedule = table.schedule
    told = f"{schedule.name} of {schedule.num_ranks} ranks and {schedule.num_microbatches} microbatches"
    assert [sorted(did) for did in play(table)] == done_by_schedule(schedule), told
    # One thing a tick: a W and an F in one would read slots that the other has written.
    runs = np.count_nonzero(table.column("unit") >= 0, axis=0)
    assert runs.tolist() == list(map(len, schedule.orders)), told
    assert table.counts().sum() == sum(map(len, schedule.orders)), told
    assert table.array.dtype == np.int32
    for channel in table.channels:
        assert len({s for s, _ in channel.pairs}) == len({d for _, d in channel.pairs}) == len(channel.pairs)


def test_every_unit_reads_what_it_should():
    check(lower(dualpipe(4, 8), CostModel(F=0, I=0, W=0)))
    check(lower(zb_h1(4, 8), CostModel(F=1, I=0, W=0)))
    for number, schedule in enumerate(SCHEDULES):
        stages = schedule.placement.num_model_stages
        check(lower(schedule, random_costs(number), Keeps.alike(stages, "FIW"[number % 3])))
        check(lower(schedule, random_costs(number + 1), random_keeps(stages, number)))


@pytest.mark.slow
def test_every_unit_of_many_more_reads_what_it_should():
    for number, schedule in enumerate(legal_schedules(itertools.product(range(1, 9), (1, 2, 3, 5, 8, 16)))):
        keeps = random_keeps(schedule.placement.num_model_stages, number)
        check(lower(schedule, random_costs(number), keeps))


def test_rounds_and_waves_over_few_ranks():
    """Where a rank hands over to itself, or to the same neighbour in both directions."""
    for counts in ((1, 2), (1, 5), (2, 2), (2, 5), (3, 5)):
        for seed, schedule in enumerate(
            (
                interleaved_1f1b(*counts, 3),
                interleaved_zero_bubble(*counts, 4),
                hanayo(*counts, num_waves=1),
                hanayo(*counts, num_waves=3),
            )
        ):
            stages = schedule.placement.num_model_stages
            for keep_input in ("F", "I", "W"):
                check(lower(schedule, random_costs(seed), Keeps.alike(stages, keep_input)))


def test_whatever_the_costs_it_takes_no_longer_than_with_every_unit_as_early_as_it_may():
    for seed in range(40):
        draw = random.Random(seed)
        schedule, costs = draw.choice(SCHEDULES), random_costs(seed)
        keeps = random_keeps(schedule.placement.num_model_stages, seed)
        table = lower(schedule, costs, keeps)
        flat = flatten(schedule)
        first = tabulate(flat, earliest(flat, topological(flat)), keeps)
        ideal = simulate(schedule, costs).makespan
        assert ideal - 1e-6 <= table.makespan(costs) <= first.makespan(costs) + 1e-6, (seed, schedule.name)


def test_a_pair_may_hand_over_on_its_own_rank():
    orders = "0F0 3F0 0F1+3B0 3F1 3B1 0B0 0B1", "1F0 2F0 1F1+2B0 2F1+1B0 2B1 1B1"
    for keep_input in ("F", "I", "W"):
        check(lower(handmade(Placement.v(2), 2, *orders), keeps=Keeps.alike(4, keep_input)))


def test_forwards_alone_need_no_slots_but_inputs():
    for schedule in SCHEDULES:
        alone = forward_only(schedule)
        table = lower(alone)
        check(table)
        assert {a.op for order in alone.orders for slot in order for a in slot} == {Op.F}
        assert all(size == 0 for name, size in table.num_slots.items() if name not in ("x", "dy"))
        assert table.num_slots["dy"] == 1
        assert {channel.payload for channel in table.channels} <= {"y"}


def test_channels_are_those_that_stage_boundaries_need():
    def told(schedule):
        return [(channel.payload, channel.pairs) for channel in channels(schedule)]

    there, back = ((0, 1), (1, 2), (2, 3)), ((1, 0), (2, 1), (3, 2))
    both = [("y", there), ("y", back), ("dx", there), ("dx", back)]
    assert told(gpipe(1, 4)) == told(dualpipe_v(1, 2)) == []
    assert told(gpipe(4, 4)) == [("y", there), ("dx", back)]
    assert told(dualpipe(4, 8)) == told(dualpipe_v(4, 8)) == both
    ring = ((0, 1), (1, 2), (2, 3), (3, 0))
    assert told(interleaved_1f1b(4, 4)) == [("y", ring), ("dx", tuple(sorted((b, a) for a, b in ring)))]
    assert told(interleaved_1f1b(1, 4)) == told(hanayo(1, 4)) == []
    assert told(hanayo(4, 4)) == both
    assert told(hanayo(2, 4)) == told(interleaved_1f1b(2, 4)) == told(dualpipe(2, 4))
    assert told(dualpipe(2, 4)) == [("y", ((0, 1), (1, 0))), ("dx", ((0, 1), (1, 0)))]


def test_no_more_slots_than_are_live_and_no_more_exchanges_than_there_is_something_to_bring():
    """Microbatches times boundaries between stages on different ranks, both ways; a permute serves many of them."""
    # The last one has the microbatches with which DualPipe's peaks are exact.
    for schedule in (*SCHEDULES, dualpipe(6, 16)):
        peaks = simulate(schedule)
        table, where = lower(schedule), (schedule.name, schedule.num_ranks, schedule.num_microbatches)
        assert table.num_slots["residual_i"] == max(peaks.peak_activations), where
        assert table.num_slots["residual_w"] <= max(peaks.peak_inputs), where
        assert table.num_slots["stash"] <= max(peaks.peak_weight_stashes) + 1, where
        enough = schedule.num_microbatches >= 2 * schedule.num_ranks - 2
        if schedule.name == "dualpipe" and schedule.num_ranks >= 4 and enough:
            assert table.num_slots["residual_w"] == schedule.num_ranks + 1, where
        crossings = sum(a != b for pipe in schedule.placement.pipes for a, b in itertools.pairwise(pipe))
        needed = 2 * crossings * schedule.microbatches_per_pipe
        most = max((len(channel.pairs) for channel in table.channels), default=1)
        used = sum(brought.sum() for brought in table.brings(table.array))
        assert used <= needed <= used * most, where
        bins = [table.num_slots[channel.pool] - 1 for channel in table.channels]
        arrivals = [table.column(f"arrive{k}") != unawaited for k, unawaited in enumerate(bins)]
        awaited = {tuple(bool(one[tick].any()) for one in arrivals) for tick in range(table.num_ticks)}
        assert table.together == tuple(sorted(awaited | {(True,) * len(bins)})), where


def test_makespan_is_that_of_the_plain_recursion():
    costs = CostModel(F=1, I=1.5, W=0.5, FB=2.5, send=0.2, extra={0: (0.5, 0.25, 0.125), 3: (0.0, 1.0, 2.0)})
    price = {"F": costs.F, "B": costs.B, "I": costs.I, "W": costs.W, "FB": costs.FB}
    parts = {"F": "", "B": "IW", "I": "I", "W": "W", "FB": "IW"}
    for schedule in (dualpipe(4, 8), one_f_one_b(4, 5), zb_h1(4, 6), dualpipe_v(2, 5)):
        table, placement = lower(schedule, costs), schedule.placement
        start = [0.0] * schedule.num_ranks
        for t in range(table.num_ticks):
            done = []
            for r, begun in enumerate(start):
                work, number = 0.0, table.column("unit")[t, r]
                if number >= 0:
                    op, forward, backward = table.units[number]
                    held, more = placement.stages_on[r], {None: (0.0, 0.0, 0.0)}
                    for s in filter(None, (forward, backward)):
                        more[s] = costs.extra.get(placement.model_stage(held[s.local]), more[None])
                    extra = sum(more[backward]["FIW".index(p)] for p in parts[op])
                    work = price[op] + more[forward][0] + extra
                sent = [start[a] + costs.send for c in table.channels for a, b in c.pairs if b == r]
                done.append(max([begun + work, *sent]))
            start = done
        assert table.makespan(costs) == pytest.approx(max(start))


def test_dualpipe_loses_nothing_to_ticks():
    even, gaining = CostModel(F=1, I=1, W=1, FB=3), CostModel(F=1, I=1, W=1, FB=2)
    known = CostModel(F=1, I=1.64, W=0.97, FB=2.65)
    for num_ranks, more, costs in (
        *((4, 0, costs) for costs in (even, gaining, known)),
        *((6, 8, costs) for costs in (even, gaining, known)),
        (8, 4, even),
        (8, 12, gaining),
        (8, 16, known),
        (10, 8, known),
        (14, 4, gaining),
        (16, 0, known),
    ):
        schedule = dualpipe(num_ranks, 2 * num_ranks + more)
        table, ideal = lower(schedule, costs), simulate(schedule, costs).makespan
        assert table.makespan(costs) <= 1.0001 * ideal, (num_ranks, more, costs)
        assert table.num_slots["residual_i"] == table.num_slots["residual_w"] == num_ranks + 1


def test_a_schedule_that_hangs_is_refused():
    schedule = handmade(Placement.linear(2), 1, "0B0 0F0", "1F0 1B0")
    with pytest.raises(ValueError, match=re.escape("lower: handmade never ends; call validate(schedule)")):
        lower(schedule)


def test_two_ranks_in_a_row_exchange_once_for_each_microbatch_and_way():
    for make in (gpipe, one_f_one_b, zb_h1):
        table = lower(make(2, 7))
        assert [brought.sum() for brought in table.brings(table.array)] == [7, 7], make.__name__
        units = table.column("unit").tolist()
        anywhere = [[number in row for row in units] for number in range(len(table.units))]
        assert [ticks.tolist() for ticks in table.runs(table.array)] == anywhere
