"""What other schedules need, told from one that was counted, against what the engine sets aside for each itself."""

import dataclasses
import functools
import itertools
import json

import pytest

from dualpipe_jax.pods import Plan, ahead, planner
from dualpipe_jax.pods.dryrun import draw
from dualpipe_jax.pods.plain import filled, plain
from dualpipe_jax.pods.results import Memory, weigh
from dualpipe_jax.schedule import CostModel

PLAN = Plan(
    "tiny", pp=4, ep=2, microbatches=16, microbatch_size=2, sequence=16, remat="wide", set=("num_layers=8",)
)
ONE_A_RANK = {
    "dualpipe": {},
    "dualpipe with one stash": {"schedule": "dualpipe", "max_stash": 1},
    "one_f_one_b": {},
    "zb_h1": {},
}
TWO_A_RANK = {
    "dualpipe_v": {},
    "dualpipe_v with no stash": {"schedule": "dualpipe_v", "max_stash": 0},
    "zb_v": {},
    "interleaved_1f1b_overlap": {},
}


def plan_of(name):
    options = {"schedule": name} | (ONE_A_RANK | TWO_A_RANK)[name]
    return dataclasses.replace(PLAN, **options)


@functools.cache
def counted(name):
    """By a schedule's own blueprint: the arrays of its step."""
    return count(plan_of(name))


def count(plan):
    blueprint = draw(plan, None, None)
    share = plain(ahead.rank_memory(blueprint))
    return weigh(ahead.memory_by_kind(blueprint), None, 0, share, ahead.stage_memory_of(blueprint))


@pytest.mark.parametrize("alike", [ONE_A_RANK, TWO_A_RANK], ids=["one stage a rank", "two"])
def test_what_schedules_of_as_many_stages_need_is_told_exactly(alike):
    """Stages here are of three kinds, the first and the last of which keep other things than those between."""
    for this, other in itertools.product(alike, repeat=2):
        told = planner.needed(plan_of(other), counted(this))
        assert told == counted(other).total, (this, other)


def test_of_half_as_many_stages_it_is_told_nearly():
    for this, other in itertools.product(ONE_A_RANK, TWO_A_RANK):
        told = planner.needed(plan_of(other), counted(this))
        assert told == pytest.approx(counted(other).total, rel=0.05), (this, other)


def test_slots_of_two_pools_are_there_though_they_are_not_full_at_once():
    """DualPipe keeps least for W when it keeps most for I: what it keeps at once is less than what is set aside."""
    memory = counted("dualpipe")
    assert memory.total == sum(memory.kinds.values())
    stays = memory.kinds["residuals"] + memory.kinds["stash"] + memory.kinds["boundary"]
    empty = dataclasses.replace(memory.kept, sizes=(0,) * len(memory.kept.sizes), boundary=0)
    at_rest = planner.needed(plan_of("dualpipe"), dataclasses.replace(memory, kept=empty))
    assert at_rest == memory.total - stays


def test_twice_the_tokens_take_twice_the_slots():
    wide = dataclasses.replace(plan_of("dualpipe"), microbatch_size=2 * PLAN.microbatch_size)
    told, own = counted("dualpipe").kept.scaled(2), ahead.stage_memory_of(draw(wide, None, None))
    assert told.boundary == own.boundary
    assert told.sizes == pytest.approx(own.sizes, rel=0.02, abs=64), (
        "numbers of tokens by expert stay as many"
    )


def test_gradients_wait_where_the_engine_places_actions():
    """On eight ranks interleaved pairs keep one gradient more at once if a pair takes as long as its parts."""
    plan = dataclasses.replace(
        PLAN, schedule="interleaved_1f1b_overlap", pp=8, microbatches=8, set=("num_layers=16",)
    )
    memory = count(plan)
    assert planner.needed(plan, memory) == memory.total
    slow = dataclasses.replace(memory, kept=dataclasses.replace(memory.kept, placed=CostModel()))
    assert planner.needed(plan, slow) == memory.total + memory.kept.boundary


def test_it_comes_through_json():
    memory = counted("zb_v")
    costs = dataclasses.replace(memory.kept.placed, extra={-1: (1.0, 2.0, 3.0)})
    memory = dataclasses.replace(memory, kept=dataclasses.replace(memory.kept, placed=costs))
    assert filled(Memory, json.loads(json.dumps(plain(memory)))) == memory
