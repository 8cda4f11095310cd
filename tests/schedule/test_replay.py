"""Measured steps beside simulated ones: made from known costs, what was put in must come out."""

import itertools
import json

import numpy as np
import pytest

from dualpipe_jax.present.numbers import Units
from dualpipe_jax.schedule import (
    ALL_SCHEDULES,
    Action,
    CostModel,
    Op,
    Placement,
    Schedule,
    simulate,
    to_json,
    validate,
)
from dualpipe_jax.schedule.formats.measured import read_measured
from dualpipe_jax.schedule.formats.trace import to_chrome_trace
from dualpipe_jax.schedule.recipes import dualpipe, dualpipe_v, gpipe, interleaved_1f1b, one_f_one_b, zb_h1
from dualpipe_jax.schedule.replay import Measured, fit, replay

ENDS = {0: (0.25, 0.5, 0.0), -1: (-0.5, -0.25, -0.25)}


def ran(schedule, costs):
    timeline = simulate(schedule, costs)
    return Measured(schedule, timeline.starts, timeline.ends)


@pytest.mark.parametrize("make", ALL_SCHEDULES, ids=lambda make: make.__name__)
def test_costs_come_out_as_they_were_put_in(make):
    """A schedule that runs whole backwards says how they are shared by the ends' thirds alone."""
    costs = CostModel(2, 3, 1.5, FB=5, send=0.25, extra=ENDS)
    measured = ran(make(4, 8), costs)
    found, told = measured.costs, {slot[0].op.value for order in measured.schedule.orders for slot in order}
    pairs = any(len(slot) == 2 for order in measured.schedule.orders for slot in order)
    assert pytest.approx(2) == found.F and pytest.approx(4.5) == found.B and found.send == pytest.approx(0.25)
    assert [more[0] for more in found.extra.values()] == pytest.approx([0.25, -0.5])
    assert [sum(more[1:]) for more in found.extra.values()] == pytest.approx([0.5, -0.5])
    if "I" in told:
        assert pytest.approx((3, 1.5)) == (found.I, found.W)
    if pairs:
        assert pytest.approx(5) == found.FB
    again = replay(measured)
    assert again.own == pytest.approx(measured.makespan) == pytest.approx(again.simulated.makespan)
    assert max(abs(unit.difference) for unit in again.units) < 1e-9


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("last", [(0.5, 0.6, 0.7), (-0.15, -0.2, -0.2)], ids=["longer", "shorter"])
def test_a_stage_of_whole_backwards_is_priced_by_these_though_others_split_theirs(ranks, last):
    """On two ranks the last stage runs B alone and the first I and W; on four, B runs alone in the middle."""
    measured = ran(dualpipe(ranks, 4), CostModel(1, 1.3, 0.7, FB=2.4, send=0.1, extra={-1: last}))
    again = replay(measured)
    assert again.simulated.makespan == pytest.approx(measured.makespan)
    assert max(abs(unit.difference) for unit in again.units) < 1e-9


@pytest.mark.parametrize("make", ALL_SCHEDULES, ids=lambda make: make.__name__)
def test_a_simulated_step_is_replayed_as_long_as_it_was(make):
    """Also where a rank waits for the ends of transfers only, and where it waits for none."""
    for num_microbatches, send in itertools.product((2, 6, 8), (0.0, 0.25, 0.5, 3.0)):
        for ranks in (2, 4):
            try:
                schedule = make(ranks, num_microbatches)
            except ValueError:
                continue  # not with these counts
            measured = ran(schedule, CostModel(2, 3, 1, FB=5, send=send))
            assert replay(measured).simulated.makespan == pytest.approx(measured.makespan)


@pytest.mark.parametrize("costs", [CostModel(F=0), CostModel(I=0, W=0)], ids=["forward", "backward"])
def test_what_took_no_time_was_measured(costs):
    measured = ran(one_f_one_b(2, 4), costs)
    assert (
        replay(measured).simulated.makespan
        == measured.makespan
        == simulate(one_f_one_b(2, 4), costs).makespan
    )


def test_without_forwards_or_backwards_there_are_no_costs():
    forward, halves = ("F", (Action(0, Op.F, 0),), 1.0), [("I", (Action(0, Op.I, 0),), 1.0)]
    for timed in ([forward], [forward, *halves], halves):
        with pytest.raises(ValueError, match="fit: no forwards or no backwards were measured"):
            fit(timed, Placement.linear(2))


def test_transfers_of_which_only_the_ends_are_waited_for():
    """Two ranks that run two forwards each while the first of them is sent; the last slots then come late besides."""
    first = "0F0 0F1 3F0 3F1 3B0 3B1 0B0 0B1", "2F0 2F1 1F0 1F1 1B0 1B1 2B0 2B1"
    orders = tuple(tuple((Action.parse(word),) for word in row.split()) for row in first)
    schedule = validate(Schedule("two pipes", Placement(((0, 1), (1, 0))), 4, orders))
    measured = ran(schedule, CostModel(send=1.5))
    assert measured.costs.send == 1.5 and replay(measured).simulated.makespan == 12.5
    starts, ends = (
        tuple((*row[:-2], row[-2] + 1, row[-1] + 1) for row in t) for t in (measured.starts, measured.ends)
    )
    assert Measured(schedule, starts, ends).costs.send == 1.5
    assert ran(schedule, CostModel(send=1)).costs.send == 0, "nobody waits: nothing is known of transfers"


def test_an_end_of_next_to_nothing_is_priced_still():
    """One of six stages holds a tenth of the layers of the others; its pairs hide less than theirs."""
    times = itertools.product(range(6), (("F", 2.0), ("B", 4.0)))
    timed = [(kind, (Action(stage, Op(kind), 0),), took) for stage, (kind, took) in times]
    timed = [(kind, on, took / 10 if on[0].stage == 5 else took) for kind, on, took in timed]
    timed += [("FB", (Action(stage, Op.F, 1), Action(stage, Op.B, 0)), 3.0) for stage in range(1, 5)]
    costs = fit(timed, Placement.linear(6))
    assert (costs.F, costs.B, costs.FB) == (2, 4, 3) and costs.extra[0] == (0, 0, 0)
    assert sum(costs.extra[-1]) == pytest.approx(-3), "5.4 by its single units, but a pair takes 3"
    alone = fit([one for one in timed if one[0] != "FB"], Placement.linear(6))
    assert alone.extra[-1] == pytest.approx((-1.8, -1.8, -1.8))


def test_of_transfers_that_differ_the_median_counts_and_the_bubble_is_of_all_ranks():
    class Links(CostModel):
        def transfer(self, here, there):
            return {(0, 1): 0.1, (1, 2): 0.2, (2, 1): 0.6, (1, 0): 0.9}.get((here, there), 0.0)

    assert ran(gpipe(3, 1), Links()).costs.send == pytest.approx((0.2 + 0.6) / 2)
    assert ran(gpipe(3, 4), CostModel()).bubble == pytest.approx(2 / 6), "of p ranks (p - 1) / (m + p - 1)"


def test_what_an_end_takes_beyond_the_others():
    """Of a longer backward I has two thirds, of a shorter one half; of two stages the faster is the usual one."""

    def timed(forwards, backwards):
        times = zip(("F", "B"), (forwards, backwards), strict=True)
        return [(op, (Action(s, Op(op), 0),), took) for op, row in times for s, took in enumerate(row)]

    costs = fit(timed((2, 2, 2, 2), (4.9, 4, 4, 3.1)), Placement.linear(4))
    assert (costs.F, costs.B) == (2, 4)
    assert costs.extra[0] == pytest.approx((0, 0.6, 0.3)) and costs.extra[-1] == pytest.approx(
        (0, -0.45, -0.45)
    )
    costs = fit(timed((2, 3), (5, 4)), Placement.linear(2))
    assert (costs.F, costs.B, costs.extra[-1]) == (2, 4, (1, 0, 0))
    assert costs.extra[0] == pytest.approx((0, 2 / 3, 1 / 3))


@pytest.mark.parametrize("hidden", [0.3, 0.5, 0.7])
def test_an_end_of_next_to_nothing_is_priced_whatever_rounds(hidden):
    """The last stage's parts, scaled to what a pair takes, must not sum to a hair more than that."""
    for forward, i, w in np.random.default_rng(0).uniform(0.1, 1, (100, 3)).tolist():
        times = itertools.product(range(4), (("F", forward), ("I", i), ("W", w)))
        timed = [(kind, (Action(stage, Op(kind), 0),), took * (stage < 3)) for stage, (kind, took) in times]
        pair = hidden * (forward + i + w)
        timed += [("FB", (Action(stage, Op.F, 1), Action(stage, Op.B, 0)), pair) for stage in (0, 1, 2)]
        costs = fit(timed, Placement.linear(4))
        assert (costs.FB, costs.extra[0]) == (pair, (0, 0, 0))
        assert sum(costs.extra[-1]) == pytest.approx(-pair)
        part = pair / (forward + i + w)
        assert costs.extra[-1] == pytest.approx((-part * forward, -part * i, -part * w))


def test_the_rank_and_the_unit_that_are_slow_come_first():
    schedule = zb_h1(6, 8)

    class Slow(CostModel):
        def of(self, slot, placement):
            slow = 1.5 if slot[0].stage == 3 else 0.0
            return super().of(slot, placement) + slow + 7 * (str(slot[0]) == "1I3")

    timeline = simulate(schedule, Slow(2, 3, 1, send=0.5))
    found = replay(Measured(schedule, timeline.starts, timeline.ends))
    assert found.ranks[:2] == (3, 1)
    for unit in found.units[:2]:
        assert (unit.stages, unit.difference) == ((3,), pytest.approx(8 * 1.5))
    first = found.slots[0]
    assert (first.rank, str(first.slot[0]), first.took - first.simulated) == (1, "1I3", pytest.approx(7))
    assert found.own == pytest.approx(timeline.makespan) and found.own > found.simulated.makespan
    assert found.measured.busy[3] - found.simulated.busy[3] == pytest.approx(1.5 * len(schedule.orders[3]))
    given = replay(found.measured, CostModel(2, 3, 1, send=0.5))
    assert given.simulated.makespan == simulate(schedule, CostModel(2, 3, 1, send=0.5)).makespan


def test_waits_that_nothing_explains():
    """Every slot of rank 1 starts later than its data came: neither units nor sends make the step that long."""
    schedule = one_f_one_b(2, 4)
    timeline = simulate(schedule)
    late = (
        tuple(tuple(t + 5 * (rank == 1) for t in row) for rank, row in enumerate(timeline.starts)),
        tuple(tuple(t + 5 * (rank == 1) for t in row) for rank, row in enumerate(timeline.ends)),
    )
    found = replay(Measured(schedule, *late), CostModel())
    assert found.own == found.simulated.makespan == timeline.makespan
    assert found.measured.makespan == max(late[1][1][-1], timeline.makespan)


@pytest.mark.parametrize("schedule", [dualpipe(4, 8), dualpipe_v(3, 7), interleaved_1f1b(2, 4)])
def test_traces_and_json_are_read(schedule):
    timeline = simulate(schedule, CostModel(2, 3, 1.5, FB=5, send=0.25))
    trace = to_chrome_trace(timeline)
    measured, units = read_measured(json.dumps(trace))
    assert units == Units("ms") and measured.schedule == schedule
    assert [list(map(pytest.approx, row)) for row in timeline.starts] == list(map(list, measured.starts))
    times = {"starts": timeline.starts, "ends": [[end + 3 for end in row] for row in timeline.ends]}
    times["starts"] = [[start + 3 for start in row] for row in times["starts"]]
    measured, units = read_measured(to_json(schedule, times | {"units": {"time": "s"}}))
    assert units == Units("s") and measured == ran(schedule, timeline.costs), "time begins with a slot"


def test_of_two_steps_in_a_trace_the_measured_one_is_read():
    played, real = simulate(gpipe(2, 2)), simulate(gpipe(2, 2), CostModel(5, 5, 5))
    events = []
    for timeline, what, apart in ((played, "simulated", 0), (real, "measured", 10)):
        for event in to_chrome_trace(timeline)["traceEvents"]:
            event = event | {"pid": event["pid"] + apart}
            if event["name"] == "process_name":
                event["args"] = {"name": f"{what}: {event['args']['name']}"}
            events.append(event)
    measured, _ = read_measured(json.dumps(events))
    assert measured.makespan == pytest.approx(real.makespan) and measured.schedule.name == "gpipe"


def without(text, *names):
    return json.dumps({name: value for name, value in json.loads(text).items() if name not in names})


STEP = to_json(gpipe(1, 1), {"starts": [[0, 1]], "ends": [[1, 3]]})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "read_measured: not JSON"),
        ("[" * 200_000, "read_measured: not JSON"),
        (without(STEP, "starts"), 'no "starts" and "ends"; give a schedule\'s JSON with them'),
        (STEP.replace("[[0, 1]]", "[[0]]"), r"starts of \[1\] slots, but the ranks of gpipe run \[2\]"),
        (STEP.replace("[[0, 1]]", "[[0, 5]]"), "rank 0, slot 1 runs from 5 to 3, the one before it from 0"),
        *(
            (text, 'no "starts" and "ends"; give a schedule\'s JSON with them')
            for text in ("5", "null", '"abc"')
        ),
        *(
            (STEP.replace("[[0, 1]]", times), "starts and ends are lists of numbers, one list for each rank")
            for times in ('[["a", 1]]', "[[null, 1]]", "7", '["01"]', f"[[1{'0' * 400}, 1]]")
        ),
        (STEP.replace("{", '{"units": "ms",'), r'units are "ms"; give words by name, such as {"time": "ms"}'),
        (
            STEP.replace("{", '{"of_a_share": {"units": {"day": 1}},'),
            r'units are {"day": 1}; give words by name',
        ),
        ('{"traceEvents": []}', 'no rows named "rank 0", "rank 1" ... with slices such as "0F3"'),
        ('{"traceEvents": [3, {"ph": "X"}]}', 'no rows named "rank 0"'),
    ],
)
def test_what_is_no_measured_step(text, message):
    with pytest.raises(ValueError, match=message):
        read_measured(text)


ROW = {"name": "thread_name", "ph": "M", "pid": 1, "tid": 2, "args": {"name": "rank 0"}}
SLICES = [
    {"name": name, "ph": "X", "pid": 1, "tid": 2, "ts": at, "dur": 1}
    for at, name in enumerate(("0F0", "0B0"))
]


def test_the_step_ends_with_the_slot_that_ends_last():
    overlapping = [SLICES[0] | {"dur": 5}, SLICES[1]]
    assert read_measured(json.dumps([ROW, *overlapping]))[0].makespan == pytest.approx(0.005)


def test_what_is_no_part_of_a_step_is_passed_over():
    """What other programs write into a trace, and no number of a rank."""
    more = [
        {"name": "thread_name", "args": None},
        {"name": "thread_name", "pid": [1], "tid": {}, "args": {"name": "rank 0"}},
        {"name": "process_name", "args": []},
        {"name": 7, "ph": "X", "pid": 1, "tid": 2, "ts": None},
        {"ph": "X", "pid": 1, "tid": 2},
        ROW | {"tid": 3, "args": {"name": f"rank {'9' * 5000}"}},
    ]
    slices = [SLICES[0] | {"args": None}, SLICES[1] | {"args": "of it"}]
    measured, _ = read_measured(json.dumps([*more, ROW, *slices]))
    assert measured.makespan == pytest.approx(0.002) and measured.schedule.orders == gpipe(1, 1).orders
    step = STEP.replace("{", '{"of_a_share": null,')
    assert read_measured(step)[0].makespan == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ts": "0"}, "the slice '0F0' has ts \"0\"; give a number of microseconds"),
        ({"ts": None}, "the slice '0F0' has ts null; give a number"),
        ({"dur": 10**400}, "the slice '0F0' has dur 1000*; give a number"),
        ({"ts": float("nan")}, "rank 0, slot 0 runs from nan to nan"),
        ({"dur": float("inf")}, "rank 0, slot 0 runs from 0 to inf, .*; times are finite"),
        ({"args": {"pipe": [0]}}, r"the slice of 0F0 has pipe \[0\]; give its number"),
        ({"name": "1000000000F0"}, "no slice of stage 1, but of stage 1000000000"),
        ({"name": "0F1000000000"}, "0B0"),
    ],
)
def test_a_slice_that_cannot_be_read_is_told(changes, message):
    with pytest.raises(ValueError, match=message):
        read_measured(json.dumps([ROW, SLICES[0] | changes, SLICES[1]]))


def test_a_rank_without_slices_is_told():
    far = [ROW | {"tid": 3, "args": {"name": "rank 100000000"}}, *(one | {"tid": 3} for one in SLICES)]
    with pytest.raises(
        ValueError, match="no slice of rank 1, but of rank 100000000; give those of all ranks"
    ):
        read_measured(json.dumps([ROW, *SLICES, *far]))


def test_a_trace_of_half_a_step_is_refused():
    trace = to_chrome_trace(simulate(gpipe(2, 2)))
    lost = [event for event in trace["traceEvents"] if event["name"] != "1B1"]
    with pytest.raises(ValueError, match="1B1"):
        read_measured(json.dumps(lost))
    one = [event for event in trace["traceEvents"] if not str(event["name"]).startswith("0")]
    with pytest.raises(ValueError, match="no slice of rank 0, but of rank 1; give those of all ranks"):
        read_measured(json.dumps(one))
