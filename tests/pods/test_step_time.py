"""A step's time from units' cycles given by hand; nothing is compiled."""

import dataclasses

import pytest

from dualpipe_jax.command.dryrun import account_table
from dualpipe_jax.inspect.target import Target
from dualpipe_jax.pods import Plan, ahead, predict, step_time
from dualpipe_jax.pods.dryrun import draw
from dualpipe_jax.pods.readings import exposed_by_tick
from dualpipe_jax.pods.results import CollectiveTotals, Compiled, Overheads, Part, Prediction, Unit
from dualpipe_jax.schedule import dualpipe, gpipe, lower, one_f_one_b
from tests.pods.test_predict import keyed
from tests.pods.whole_backwards import WholeBackwards
from train.model import named_config
from train.pods.training import routed_flops

TARGET = Target.parse("v5e:2x2")
BLOCKS = "tests.pods.own_program:blocks"


def predicted(units, schedule="dualpipe", layers=2, **more):
    plan = Plan(BLOCKS, layers, schedule=schedule, pp=2, ep=2, microbatches=8, microbatch_size=4)
    found = keyed({name: Unit(cycles, cycles, 0.0, 0.0, 0) for name, cycles in units.items()})
    compiled = Compiled("units", units=found, sends=CollectiveTotals(each=1e4), **more)
    return step_time.predict_step(compiled, draw(plan, TARGET, None), plan, TARGET.device)


def test_a_step_of_measured_units():
    step = predicted({"F": 1e6, "I": 1e6, "W": 5e5, "B": 1.4e6, "FB": 2e6})
    costs = predict.CostModel(1e6, 1e6, 5e5, FB=2e6, send=1e4)
    table = lower(dualpipe(2, 8), predict.CostModel(FB=2))
    whole = WholeBackwards(1e6, 1e6, 5e5, FB=2e6, send=1e4)
    assert step.cycles == table.makespan(whole) < table.makespan(costs) and step.assumed == ()
    assert step.seconds == step.cycles / TARGET.device.clock
    assert step.overhead_cycles == 0
    share, ms = step.share, 1e3 / TARGET.device.clock
    times = {"F": 1e6 * ms, "I": 1e6 * ms, "W": 5e5 * ms, "FB": 2e6 * ms, "send": 1e4 * ms}
    assert share["costs"].pop("extra") == {}
    assert share["costs"] == pytest.approx(times) and share["units"] == {"time": "ms", "memory": "B"}
    by_name = {each.name: each for each in step.schedules}
    sizes = predict.MemoryModel(**share["memory"]).for_schedule(dualpipe(2, 8))
    kept = max(predict.simulate(dualpipe(2, 8), costs).memory(sizes))
    plan = Plan(BLOCKS, 2, schedule="dualpipe", pp=2, ep=2, microbatches=8, microbatch_size=4)
    own = sum(ahead.memory_by_kind(draw(plan, TARGET, None)).values())
    assert by_name["dualpipe"].memory == own, "the schedules are ranked by what the engine sets aside"
    assert 0.9 * own < kept < own, "the file has what most stages keep, at once"
    assert by_name["dualpipe"].seconds == pytest.approx(step.seconds)
    assert by_name["dualpipe"].mfu == pytest.approx(step.mfu)
    unsplit = predict.CostModel(1e6, 1.4e6 * 2 / 3, 1.4e6 / 3, FB=2e6, send=1e4)
    other = lower(one_f_one_b(2, 8), predict.CostModel(FB=2)).makespan(unsplit) / TARGET.device.clock
    assert by_name["one_f_one_b"].seconds == pytest.approx(other), "a whole backward, not its halves"


def test_what_stands_beside_units_and_ticks():
    units = {"F": 1e6, "B": 2e6}
    bare = predicted(units, "one_f_one_b")
    step = predicted(units, "one_f_one_b", overheads=Overheads(100.0, 7.0))
    assert step.cycles == bare.cycles + 100 * lower(one_f_one_b(2, 8)).num_ticks
    assert step.overhead_cycles == 7 and step.ideal_cycles == bare.ideal_cycles
    assert step.seconds == pytest.approx((step.cycles + 7) / TARGET.device.clock)
    assert step.assumed == ("I", "W", "FB"), "which schedules that split or pair are priced by"
    before = {each.name: each.seconds for each in bare.schedules}
    more = {each.name: each.seconds - before[each.name] for each in step.schedules if each.seconds}
    assert more["dualpipe_v"] > 1.5 * more["dualpipe"] > 0, "half as deep, about twice as many ticks"


def test_a_v_with_stages_half_as_deep_costs_a_rank_as_much():
    units = {"F": 2e6, "I": 2e6, "W": 1e6, "FB": 4e6}
    deep = predicted(units | {"B": 3e6})
    half = predicted({name: cycles / 2 for name, cycles in units.items()}, "dualpipe_v", layers=1)
    of = {each.name: each.seconds for each in deep.schedules}
    assert half.seconds == pytest.approx(of["dualpipe_v"])
    assert half.costs["F"] == 1e6 and half.tokens == deep.tokens


def test_the_account_of_a_step_by_hand():
    """1F1B on 2 ranks: each is busy with 8 F and 8 B, and where stages are equal idle for one of each."""
    units = {"F": Unit(1e6, 9e5, 1e5, 1e5, 0), "B": Unit(2e6, 1.7e6, 4e5, 3e5, 0)}
    units |= {"F/last": Unit(1.5e6, 1.5e6, 0.0, 0.0, 0), "B/last": Unit(2e6, 2e6, 0.0, 0.0, 0)}
    plan = Plan(BLOCKS, 2, schedule="one_f_one_b", pp=2, ep=2, microbatches=8, microbatch_size=4)
    compiled = Compiled("units", units=keyed(units), overheads=Overheads(100.0, 7.0))
    step = step_time.predict_step(compiled, draw(plan, TARGET, None), plan, TARGET.device)
    clock, ticks = TARGET.device.clock, lower(one_f_one_b(2, 8)).num_ticks
    account = {part.name: part.seconds * clock for part in step.account}
    least = step.mfu * step.seconds * clock
    assert sum(account.values()) == pytest.approx(step.seconds * clock)
    assert account.pop("the program's operations at the peak") == pytest.approx(least)
    waits = 8 * 4e5 / 2, "the last stage, one of two, waits for none"
    assert account.pop("waiting for collectives") == pytest.approx(waits[0])
    busy = 8 * 3e6 + 8 * 5e5 / 2, "the last stage takes half an F more, on one of two ranks"
    assert account.pop("work beyond the peak") == pytest.approx(busy[0] - waits[0] - least)
    assert account.pop("idle: bubble of equal stages") == pytest.approx(3e6)
    assert account.pop("ticks beside their units") == pytest.approx(100 * ticks)
    assert account.pop("beside the ticks") == pytest.approx(7)
    assert account.pop("the optimizer's update") == 0
    # The step ends after the first stage's F, eight times the last one's, and the first one's last B.
    whole = 1e6 + 8 * (1.5e6 + 2e6) + 2e6
    assert account == {"idle: stages that are not equal": pytest.approx(whole - busy[0] - 3e6)}


def test_every_part_of_the_account_by_hand():
    """GPipe on 2 ranks, room for a quarter more than an even load; FLOPs in multiples of what the program counts."""
    plan = Plan("tiny", 2, schedule="gpipe", pp=2, ep=2, microbatches=4, sequence=64)
    plan = dataclasses.replace(plan, dispatch="capacity", capacity_factor=1.25)
    drawn, clock = draw(plan, TARGET, None), TARGET.device.clock
    program, a_cycle = drawn.program, TARGET.device.flops / clock
    whole = program.flops * program.tokens / 4 / 4  # of a rank's device, of one microbatch
    forward, backward = 0.5 * whole, 1.3 * whole  # a third of it would be just enough; 0.3 are done again
    products = {"F": 2 * forward / a_cycle, "B": 3 * backward / a_cycle}
    units = {
        "F": Unit(products["F"] + 50, products["F"] + 40, 20, 10, 0, forward, products["F"]),
        "B": Unit(products["B"] + 200, products["B"] + 170, 40, 30, 0, backward, products["B"]),
    }
    update = Unit(7000, 7000, 0.0, 0.0, 0)
    compiled = Compiled("units", units=keyed(units), overheads=Overheads(100.0, 7.0), update=update)
    step = step_time.predict_step(compiled, drawn, plan, TARGET.device)
    account = {part.name: part.seconds * clock for part in step.account}
    assert sum(account.values()) == pytest.approx(step.seconds * clock)
    a_token = 6 * program.routed / 6  # of routed experts, which a quarter more is room for
    unfilled = 0.25 * a_token * program.tokens / 4 / a_cycle
    assert 0 < unfilled < 0.25 * 4 * whole / a_cycle
    expected = {
        "the program's operations at the peak": 4 * whole / a_cycle,
        "recomputation": 4 * 0.3 * whole / a_cycle,
        "capacity not filled": unfilled,
        "operations that the program does not count": 4 * 0.5 * whole / a_cycle - unfilled,
        "matrix units not full": 4 * (products["F"] + products["B"] - (forward + backward) / a_cycle),
        "no matrix product": 4 * (40 + 170),
        "waiting for collectives": 4 * (10 + 30),
        "idle: bubble of equal stages": units["F"].cycles + units["B"].cycles,
        "idle: stages that are not equal": 0,
        "ticks beside their units": 100 * lower(gpipe(2, 4)).num_ticks,
        "beside the ticks": 7,
        "the optimizer's update": 7000,
    }
    assert list(account) == list(expected)
    assert account == pytest.approx(expected, abs=1e-3 * units["F"].cycles / 100)
    assert step.update_cycles == 7000 and "6 for each parameter" in step.counted
    dropless = dataclasses.replace(plan, dispatch="dropless")  # does no work on room that nobody fills
    assert step_time.useful_seconds(drawn, TARGET.device, dropless).unfilled == 0


def test_routed_operations_of_v3_by_hand():
    """58 layers of 8 experts, three matrices of 7168 x 2048 each, forward and twice as much backward."""
    numbers = named_config("v3", None)
    assert routed_flops(numbers) == 6 * 58 * 8 * 3 * 7168 * 2048
    assert routed_flops(dataclasses.replace(numbers, num_mtp_layers=1)) == 6 * 59 * 8 * 3 * 7168 * 2048


def test_sends_are_exposed_by_kind_of_tick():
    work = {"F": 3.0, "FB": 8.0, "F/first": 1.0}
    units = keyed({name: Unit(9.0, each, 0.0, 0.0, 0) for name, each in work.items()})
    assert exposed_by_tick(5.0, units) == {"": 5.0, "F": 2.0, "FB": 0.0}
    assert exposed_by_tick(None, units) == {}


def test_the_account_of_pairs_of_ends_adds_up():
    units = {"F": 9e5, "I": 8e5, "W": 4e5, "B": 1.1e6, "FB": 1.3e6}
    units |= {"F/first": 5e5, "F/last": 1e6, "B/last": 9e5}
    ends = {"FB/first-last": 1.1e6, "FB/last-first": 1.5e6}
    step, bound = predicted(units | ends), predicted(units)
    for of in (step, bound):
        assert sum(part.seconds for part in of.account) == pytest.approx(of.seconds)
    assert step.cycles != bound.cycles


def test_waits_of_pairs_that_were_not_measured_by_hand():
    """DualPipe on 2 ranks: a pair of kinds of its own waits as it did, another as a usual one and its parts beyond."""
    waits = {"F": 10, "F/first": 10, "F/last": 25, "I": 7, "I/first": 9, "I/last": 7}
    waits |= {"W": 2, "W/first": 2, "W/last": 2, "B": 12, "B/first": 12, "B/last": 12}
    waits |= {"FB": 100, "FB/first-last": 130}
    units = keyed({name: Unit(1e6, 1e6 - each, 0.0, each, 0) for name, each in waits.items()})
    plan = Plan(BLOCKS, 2, schedule="dualpipe", pp=2, ep=2, microbatches=8, microbatch_size=4)
    step = step_time.predict_step(
        Compiled("units", units=units), draw(plan, TARGET, None), plan, TARGET.device
    )
    (found,) = (part.seconds for part in step.account if part.name == "waiting for collectives")
    # The last F waits for 15 more than a usual one, the first I for 2 more.
    by_hand = {
        "F first": 10,
        "F last": 25,
        "I first": 9,
        "I last": 7,
        "W first": 2,
        "W last": 2,
        "B first": 12,
    }
    by_hand |= {"B last": 12, "FB first last": 130, "FB last first": 100 + 15 + 2}
    slots = [slot for order in dualpipe(2, 8).orders for slot in order]
    names = [
        " ".join(
            ["FB" if len(slot) == 2 else slot[0].op.value, *(["first", "last"][a.stage % 2] for a in slot)]
        )
        for slot in slots
    ]
    assert {"FB first last", "FB last first"} <= set(names)
    assert found * TARGET.device.clock == pytest.approx(sum(by_hand[name] for name in names) / 2)


def test_what_rounding_leaves_is_printed_as_nothing():
    parts = (
        Part("the program's operations at the peak", 0.5),
        Part("idle", 1.863e-18),
        Part("all else", 0.5),
    )
    step = Prediction(1.0, 1.0, 0.0, 1.0, 1, 1.0, 0.5, False, account=parts)
    assert [row[1] for row in account_table(step).rows] == ["0.5", "0", "0.5", "1"]
