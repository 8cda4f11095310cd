"""Timelines from traces: of traces that were made from known timelines, what was put in must come out."""

import dataclasses
import json

import pytest

from dualpipe_jax import Pipeline, PipelineModel
from dualpipe_jax.command.share_files import read_share_file
from dualpipe_jax.inspect import read
from dualpipe_jax.pods.program import abstract_mesh
from dualpipe_jax.profile import ProfileError, measure, write_profile
from dualpipe_jax.profile.capture import Event
from dualpipe_jax.profile.match import Execution, Unit, executions, match, unit_guards
from dualpipe_jax.profile.timelines import read_timelines
from dualpipe_jax.profile.write import summary
from dualpipe_jax.schedule import (
    CostModel,
    Op,
    dualpipe,
    dualpipe_v,
    lower,
    one_f_one_b,
    simulate,
    zb_h1,
    zb_v,
)
from dualpipe_jax.schedule.formats.measured import read_measured
from dualpipe_jax.schedule.lowering.unit_key import SCOPES

COSTS = CostModel(F=2.0, I=3.0, W=1.5, extra={0: (0.25, 0.5, 0.0), -1: (0.75, 0.0, 0.0)})
LOCAL = 2


def program(fused):
    """The text of a program with a guard for each unit and local stage, each two instructions and an inner loop."""
    kinds = [kind for kind in SCOPES if fused or kind != "FB"]
    names = [f"{SCOPES[kind]}_{k}" for kind in kinds for k in range(LOCAL)]
    state, parts = "(f32[])", []
    parts += [
        f"%inner (p: {state}) -> {state} {{\n  %many = f32[] add()\n  ROOT %t = {state} tuple(%many)\n}}"
    ]
    for name in names:
        parts.append(
            f"%{name} (p: {state}) -> {state} {{\n"
            f"  %{name}.a = f32[] add()\n"
            f'  %{name}.loop = {state} while(%{name}.a), body=%inner, metadata={{op_name="x/while/body/while"}}\n'
            f"  ROOT %{name}.b = {state} tuple(%{name}.a)\n}}"
        )
    loops = "\n".join(
        f"  %while.{name} = {state} while(%p), body=%{name}, "
        f'metadata={{op_name="jit(step)/while/body/closed_call/{name[:-2]}/usual/while"}}'
        for name in names
    )
    parts.append(f"%tick (p: {state}) -> {state} {{\n{loops}\n  ROOT %last = {state} tuple(%p)\n}}")
    parts.append(f"ENTRY %main (p: {state}) -> {state} {{\n  ROOT %scan = {state} while(%p), body=%tick\n}}")
    return read("HloModule jit_step, is_scheduled=true\n\n" + "\n\n".join(parts))


def trace(schedule, costs, *, fused=False, run=7, at=1000.0, late=0.0):
    """Events of a step that runs as simulated; a second device of each rank starts and ends everything later."""
    timeline, placement, events = simulate(schedule, costs), schedule.placement, []

    def emit(rank, kind, stage, start, end):
        name = f"{SCOPES[kind]}_{placement.stages_on[rank].index(stage)}"
        middle = start + (end - start) / 3
        spans = (f"{name}.a", start, middle), ("many", start, middle), (f"{name}.b", middle, end)
        for device, by in ((2 * rank, 0.0), (2 * rank + 1, late)):
            for op, a, b in spans:
                events.append(Event(device, run, op, at + a + by, at + b + by))

    for rank, order in enumerate(schedule.orders):
        for slot, start, end in zip(order, timeline.starts[rank], timeline.ends[rank], strict=True):
            if fused and len(slot) > 1:
                emit(rank, "FB", slot[0].stage, start, end)
                start = end
            for action in slot:
                stage, op, _ = action
                alone = {Op.F: costs.F, Op.B: costs.B, Op.I: costs.I, Op.W: costs.W}[op]
                parts = {Op.F: (0,), Op.B: (1, 2), Op.I: (1,), Op.W: (2,)}[op]
                alone += sum(costs.more(placement, stage)[part] for part in parts)
                if not (fused and len(slot) > 1):
                    emit(rank, op.value, stage, start, start + alone)
                    start += alone
            assert start == pytest.approx(end)
    return events[::-1]


def near(found, expected):
    return found == pytest.approx(expected)


def devices(schedule):
    return [[2 * rank, 2 * rank + 1] for rank in range(schedule.num_ranks)]


@pytest.mark.parametrize("recipe", [dualpipe, dualpipe_v, one_f_one_b, zb_h1, zb_v])
def test_what_was_simulated_is_measured(recipe):
    schedule = recipe(4, 12)
    theory = simulate(schedule, COSTS)
    found = measure(trace(schedule, COSTS), program(False), schedule, devices(schedule))
    assert found.makespan == pytest.approx(theory.makespan)
    assert found.busy == pytest.approx(theory.busy)
    assert found.bubble == pytest.approx(theory.bubble)
    ops = {action.op for order in schedule.orders for slot in order for action in slot}
    costs, halves = found.costs, COSTS.B / 2
    expected = (COSTS.I, COSTS.W) if Op.W in ops else (halves, halves)
    assert near((costs.F, costs.I, costs.W), (COSTS.F, *expected))
    assert near(costs.B, COSTS.B) and near(costs.FB, COSTS.FB)
    # A whole backward does not tell its halves apart.
    for stage in (0, -1):
        ahead, back, weight = COSTS.extra[stage]
        halves = (back, weight) if Op.W in ops else ((back + weight) * 2 / 3, (back + weight) / 3)
        assert near(costs.extra[stage], (ahead, *halves))
    assert set(found.assumed) == {"FB"} | ({"I", "W"} - ops)
    assert found.theory.makespan == pytest.approx(theory.makespan)
    for rank, order in enumerate(schedule.orders):
        for slot, start, end in zip(order, theory.starts[rank], theory.ends[rank], strict=True):
            spans = [found.spans()[action] for action in slot]
            assert (min(s for s, _ in spans), max(e for _, e in spans)) == pytest.approx((start, end))


def test_pairs_that_are_one_unit_are_measured_as_one():
    schedule, costs = dualpipe(4, 12), dataclasses.replace(COSTS, FB=4.0)
    found = measure(trace(schedule, costs, fused=True), program(True), schedule, devices(schedule))
    assert near(found.costs.FB, 4.0) and found.assumed == ()
    assert found.makespan == pytest.approx(simulate(schedule, costs).makespan)


def test_a_unit_lasts_until_the_last_of_its_ranks_devices():
    schedule = zb_h1(3, 4)
    found = measure(trace(schedule, COSTS, late=0.125), program(False), schedule, devices(schedule))
    assert near(found.costs.F, COSTS.F + 0.125)


def test_the_median_step_is_shown_and_all_steps_are_counted():
    schedule = one_f_one_b(3, 4)

    def scaled(by):
        return CostModel(F=by, I=by, W=by, extra={0: (by, by, 0), -1: (by, 0, 0)})

    steps = ((1, 1.0), (2, 3.0), (3, 1.5))
    events = [event for run, by in steps for event in trace(schedule, scaled(by), run=run, at=100.0 * run)]
    found = measure(events, program(False), schedule, devices(schedule))
    assert found.num_steps == 3
    assert found.makespan == pytest.approx(simulate(schedule, scaled(1.5)).makespan)
    assert len(found.durations["F"]) == 3 * 3 * 4 and near(found.costs.F, 1.5)


def test_a_trace_that_lost_events_still_tells_the_order():
    units = {"a": ("F", "one"), "b": ("F", "one"), "c": ("B", "two")}
    events = [Event(0, 0, op, t, t + 1) for op, t in (("a", 0), ("b", 1), ("c", 3), ("a", 5))]
    expected = [Execution("F", 0, 1), Execution("B", 3, 4), Execution("F", 5, 6)]
    assert executions(events, units) == expected


def test_inner_loops_and_shared_instructions_are_no_units():
    found = unit_guards(program(False))
    assert found["forward_0.a"] == ("F", "forward_0") and found["backward_weight_1.b"][0] == "W"
    assert "many" not in found and "while.forward_0" not in found


def test_other_programs_may_have_instructions_of_the_same_names():
    schedule = one_f_one_b(2, 4)
    step = [event._replace(program="jit_step") for event in trace(schedule, COSTS)]
    other = [Event(0, 3, "forward_0.a", 0, 1, "jit_other"), Event(0, 7, "forward_0.a", 9, 10, "jit_other")]
    found = measure([*other, *step], program(False), schedule, devices(schedule))
    assert found.num_steps == 1 and found.makespan == pytest.approx(simulate(schedule, COSTS).makespan)


def test_another_schedules_trace_is_refused():
    schedule = one_f_one_b(2, 4)
    with pytest.raises(ProfileError, match="rank 0: the trace has 12 units of work, the schedule"):
        measure(trace(zb_h1(2, 4), COSTS), program(False), schedule, devices(schedule))
    with pytest.raises(ProfileError, match="the trace has no unit of this program"):
        measure([Event(0, 0, "other", 0, 1)], program(False), schedule, devices(schedule))
    ticks = [[Unit("F", ())], [Unit("B", ())]]
    with pytest.raises(ProfileError, match="here, tick 1: the trace has W, the schedule B"):
        match([Execution("F", 0, 1), Execution("W", 1, 2)], ticks, "here")


def test_files_of_a_profile(tmp_path):
    schedule = zb_v(4, 8)
    found = measure(trace(schedule, COSTS), program(False), schedule, devices(schedule))
    device = type("Device", (), {"platform": "tpu"})()
    said = write_profile(found, tmp_path / "profile", [device] * 8)
    for words in (f"bubble {found.bubble:.1%}", "at the measured costs", "F 2  I 3  W 1.5", "costs.json"):
        assert words in said
    measured, theory = read_timelines(tmp_path)
    assert near(measured.bubble, theory.bubble) and near(measured.makespan, theory.makespan)
    assert sorted(box[:5] for box in measured.boxes) == sorted(box[:5] for box in theory.boxes)
    events = json.loads((tmp_path / "profile" / "timeline.trace").read_text())["traceEvents"]
    groups = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    both = ("measured", "simulated")
    assert groups == {f"{what}: {of}" for what in both for of in ("zb_v", "live activations")}
    for name in ("measured.json", "timeline.trace"):
        step, _ = read_measured((tmp_path / "profile" / name).read_text())
        assert step.schedule.orders == schedule.orders
        assert step.makespan == pytest.approx(found.makespan, abs=0.01)
    slices = [event for event in events if event["ph"] == "X"]
    assert len(slices) == 2 * sum(map(len, schedule.orders))
    assert (tmp_path / "profile" / "timeline.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize("schedule, fused", [(one_f_one_b(4, 16), False), (dualpipe(8, 32), True)])
def test_the_engines_ticks_are_those_that_it_has(schedule, fused):
    """It places actions by costs of its own, before anything is measured."""
    costs = dataclasses.replace(COSTS, FB=5.0)
    found = measure(trace(schedule, costs, fused=fused), program(fused), schedule, devices(schedule))
    model = PipelineModel(lambda w, x: x, lambda w, x: x, lambda w, x, y: x)
    pipeline = Pipeline(model, schedule, abstract_mesh(schedule.num_ranks, 1), fuse_pairs=fused)
    ticks = lower(schedule, pipeline.placing_costs).makespan(found.costs)
    assert f"({ticks:.4g} ms in the engine's ticks)" in summary(found, found.theory, "")
    assert ticks > 1.001 * lower(schedule, found.costs).makespan(found.costs)


def test_costs_are_replayed_as_they_were_measured(tmp_path):
    """A V cuts a rank's share into two stages: the file has the share, the simulator is given half of it."""
    schedule = zb_v(4, 8)
    found = measure(trace(schedule, COSTS), program(False), schedule, devices(schedule))
    file = tmp_path / "costs.json"
    file.write_text(json.dumps(found.replay()))
    costs = read_share_file(file).costs
    assert near((costs.F, costs.I, costs.W, costs.FB), (4.0, 6.0, 3.0, 13.0))
    assert near(costs.extra[0], COSTS.extra[0]) and near(costs.extra[-1], COSTS.extra[-1])
    assert simulate(schedule, costs.for_schedule(schedule)).makespan == pytest.approx(found.makespan)
