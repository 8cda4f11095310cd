import random

import numpy as np
import pytest

from dualpipe_jax.schedule import ALL_SCHEDULES, CostModel, Op, Schedule, gpipe, one_f_one_b, simulate
from dualpipe_jax.schedule.lower import TickTable, forward_only, lower

COSTS = (
    CostModel(F=1, I=1, W=1, FB=3),
    CostModel(F=1, I=1, W=1, FB=2),
    CostModel(F=1, I=1.64, W=0.97, FB=2.65),
    CostModel(F=1, I=1, W=1, FB=2.5, send=0.3),
)


def legal_schedules():
    found = []
    for make in ALL_SCHEDULES:
        for ranks in range(1, 9):
            for microbatches in (1, 2, 3, 4, 7, 8, 12, 16, 20):
                try:
                    found.append(make(ranks, microbatches))
                except ValueError:
                    continue
    return found


def name_of(schedule: Schedule) -> str:
    return f"{schedule.name}-{schedule.num_ranks}-{schedule.num_microbatches}"


SCHEDULES = legal_schedules()


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

    Returns what each rank did: (unit, model stage of all pipes, microbatch of the batch).
    """
    schedule, placement = table.schedule, table.schedule.placement
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
        fresh: list[dict[str, object]] = [{"y": None, "dx": None} for _ in ranks]

        for r, row in enumerate(rows):
            pool, held = pools[r], placement.stages_on[r]
            assert not (row["B"] >= 0 and row["I"] >= 0)
            if row["pair"]:
                assert row["F"] >= 0 and row["B"] >= 0

            def stage_of(local: int, microbatch: int, held=held) -> int:
                stage = held[local]
                assert placement.pipe_of(stage) == microbatch // per_pipe
                return stage

            def forward(row=row, pool=pool, r=r, stage_of=stage_of) -> None:
                mb, stage = row["F_microbatch"], stage_of(row["F"], row["F_microbatch"])
                assert row["F_first"] == placement.is_first(stage)
                assert row["F_last"] == placement.is_last(stage)
                if row["F_first"]:
                    pool["x"].write(row["F_x"], ("x", stage, mb))
                pool["x"].read(row["F_x"], ("x", stage, mb))
                if backward:
                    pool["residual_i"].write(row["F_residual_i"], ("residual_i", stage, mb))
                    pool["residual_w"].write(row["F_residual_w"], ("residual_w", stage, mb))
                y = ("x", stage + 1, mb)
                if row["F_last"]:
                    assert row["F_y"] == table.num_slots["x"] - 1
                    if backward:
                        pool["dy"].write(row["F_dy"], ("dy", stage, mb))
                else:
                    fresh[r]["y"] = y
                    here = placement.rank_of[stage + 1] == r
                    assert here == (row["F_y"] != table.num_slots["x"] - 1)
                pool["x"].write(row["F_y"], y)
                done[r].append(("F", stage, mb))

            def backward_of(full: bool, row=row, pool=pool, r=r, stage_of=stage_of) -> None:
                local, mb = row["B" if full else "I"], row["G_microbatch"]
                stage = stage_of(local, mb)
                assert row["G_first"] == placement.is_first(stage)
                pool["dy"].read(row["G_dy"], ("dy", stage, mb))
                if table.keep_input != "F":
                    pool["x"].read(row["G_x"], ("x", stage, mb))
                pool["residual_i"].read(row["G_residual_i"], ("residual_i", stage, mb))
                if full:
                    pool["residual_w"].read(row["G_residual_w"], ("residual_w", stage, mb))
                else:
                    pool["stash"].write(row["G_stash"], ("stash", stage, mb))
                if not row["G_first"]:
                    fresh[r]["dx"] = ("dy", stage - 1, mb)
                    here = placement.rank_of[stage - 1] == r
                    assert here == (row["G_dx"] != table.num_slots["dy"] - 1)
                pool["dy"].write(row["G_dx"], ("dy", stage - 1, mb))
                done[r].append(("B" if full else "I", stage, mb))

            def backward_weight(k: int, row=row, pool=pool, r=r, stage_of=stage_of) -> None:
                mb, stage = row[f"W{k}_microbatch"], stage_of(row[f"W{k}"], row[f"W{k}_microbatch"])
                pool["stash"].read(row[f"W{k}_stash"], ("stash", stage, mb))
                pool["residual_w"].read(row[f"W{k}_residual_w"], ("residual_w", stage, mb))
                if table.keep_input == "W":
                    pool["x"].read(row[f"W{k}_x"], ("x", stage, mb))
                done[r].append(("W", stage, mb))

            assert sorted(table.program) == ["B", "F", "FB", "I", "W"]
            for unit in table.program:
                if unit == "FB" and row["pair"]:
                    # The pair reads all it needs of the old before it writes anything, or the other way
                    # round: nothing that it writes may share a slot with what it reads.
                    before = {name: list(p.slots) for name, p in pool.items()}
                    forward()
                    after = {name: list(p.slots) for name, p in pool.items()}
                    backward_of(full=True)
                    for name, p in pool.items():
                        p.slots = list(before[name])
                    fresh[r], count = {"y": None, "dx": None}, len(done[r])
                    backward_of(full=True)
                    forward()
                    del done[r][count:]
                    for name, old in before.items():
                        for slot, token in enumerate(old):
                            if after[name][slot] != token:
                                pool[name].slots[slot] = after[name][slot]
                elif unit == "F" and row["F"] >= 0 and not row["pair"]:
                    forward()
                elif unit == "B" and row["B"] >= 0 and not row["pair"]:
                    backward_of(full=True)
                elif unit == "I" and row["I"] >= 0:
                    backward_of(full=False)
                elif unit == "W":
                    for k in range(table.num_w):
                        if row[f"W{k}"] >= 0:
                            backward_weight(k)

        for destination, k, payload, token in flying:
            pools[destination]["x" if payload == "y" else "dy"].write(rows[destination][f"arrive{k}"], token)
        for r, row in enumerate(rows):
            for k, channel in enumerate(table.channels):
                if (r, k) not in brought:  # a permute brings zeros to those who are no destination
                    pools[r]["x" if channel.payload == "y" else "dy"].write(row[f"arrive{k}"], None)
        out = fresh
    return done


def done_by_schedule(schedule: Schedule) -> list[list[tuple[str, int, int]]]:
    placement, per_pipe = schedule.placement, schedule.microbatches_per_pipe
    return [
        sorted(
            (a.op.value, a.stage, placement.pipe_of(a.stage) * per_pipe + a.microbatch)
            for slot in order
            for a in slot
        )
        for order in schedule.orders
    ]


def check(table: TickTable) -> None:
    assert [sorted(did) for did in play(table)] == done_by_schedule(table.schedule)
    assert table.array.dtype == np.int32
    for channel in table.channels:
        assert len({s for s, _ in channel.pairs}) == len({d for _, d in channel.pairs}) == len(channel.pairs)


@pytest.mark.parametrize("keep_input", ["F", "I", "W"])
@pytest.mark.parametrize("schedule", SCHEDULES, ids=name_of)
def test_every_unit_reads_what_it_should(schedule, keep_input):
    check(lower(schedule, keep_input=keep_input))
