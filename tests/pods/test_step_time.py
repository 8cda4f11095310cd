"""A step's time from units' cycles given by hand; nothing is compiled."""

import pytest

from dualpipe_jax.inspect import Target
from dualpipe_jax.pods import Plan, predict, step_time
from dualpipe_jax.pods.dryrun import draw
from dualpipe_jax.pods.results import Compiled, Overheads, Shares, Unit
from dualpipe_jax.schedule import dualpipe, lower, one_f_one_b

TARGET = Target.parse("v5e:2x2")


def predicted(units, schedule="dualpipe", layers=2, **more):
    plan = Plan("tiny", layers, schedule=schedule, pp=2, ep=2, microbatches=8, sequence=64)
    found = {name: Unit(cycles, cycles, 0.0, 0.0, 0) for name, cycles in units.items()}
    compiled = Compiled("units", units=found, sends=Shares(each=1e4), **more)
    return step_time.predict_step(compiled, draw(plan, TARGET, None), TARGET.device)


def test_a_step_of_measured_units():
    step = predicted({"F": 1e6, "I": 1e6, "W": 5e5, "B": 1.4e6, "FB": 2e6})
    costs = predict.CostModel(1e6, 1e6, 5e5, FB=2e6, send=1e4)
    table = lower(dualpipe(2, 8), costs)
    assert step.cycles == table.makespan(costs) and step.assumed == ()
    assert step.seconds == step.cycles / TARGET.device.clock
    assert step.overhead_cycles == 0
    share, ms = step.share, 1e3 / TARGET.device.clock
    times = {"F": 1e6 * ms, "I": 1e6 * ms, "W": 5e5 * ms, "FB": 2e6 * ms, "send": 1e4 * ms}
    assert share["costs"].pop("extra") == {}
    assert share["costs"] == pytest.approx(times) and share["units"] == {"time": "ms", "memory": "B"}
    by_name = {each.name: each for each in step.schedules}
    sizes = predict.MemoryModel(**share["memory"]).for_schedule(dualpipe(2, 8))
    kept = max(predict.simulate(dualpipe(2, 8), costs).memory(sizes))
    assert kept == by_name["dualpipe"].memory, "the file's memory is what the schedules are ranked by"
    assert by_name["dualpipe"].seconds == pytest.approx(step.seconds)
    assert by_name["dualpipe"].mfu == pytest.approx(step.mfu)
    unsplit = predict.CostModel(1e6, 1.4e6 * 2 / 3, 1.4e6 / 3, FB=2e6, send=1e4)
    other = lower(one_f_one_b(2, 8), unsplit).makespan(unsplit) / TARGET.device.clock
    assert by_name["one_f_one_b"].seconds == pytest.approx(other), "a whole backward, not its halves"


def test_what_stands_beside_units_and_ticks():
    units = {"F": 1e6, "B": 2e6}
    bare = predicted(units, "one_f_one_b")
    step = predicted(units, "one_f_one_b", overheads=Overheads(100.0, 7.0))
    costs = predict.CostModel(1e6, 4e6 / 3, 2e6 / 3, send=1e4)
    assert step.cycles == bare.cycles + 100 * lower(one_f_one_b(2, 8), costs).num_ticks
    assert step.overhead_cycles == 7 and step.ideal_cycles == bare.ideal_cycles
    assert step.assumed == ("I", "W", "FB"), "which schedules that split or pair are priced by"
    more = {
        each.name: each.seconds - before.seconds
        for each in step.schedules
        for before in bare.schedules
        if each.name == before.name and each.seconds
    }
    assert more["dualpipe_v"] > 1.5 * more["dualpipe"] > 0, "half as deep, about twice as many ticks"


def test_a_v_with_stages_half_as_deep_costs_a_rank_as_much():
    units = {"F": 2e6, "I": 2e6, "W": 1e6, "FB": 4e6}
    deep = predicted(units | {"B": 3e6})
    half = predicted({name: cycles / 2 for name, cycles in units.items()}, "dualpipe_v", layers=1)
    of = {each.name: each.seconds for each in deep.schedules}
    assert half.seconds == pytest.approx(of["dualpipe_v"])
    assert half.costs["F"] == 1e6 and half.tokens == deep.tokens
