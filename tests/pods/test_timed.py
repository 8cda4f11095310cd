"""Units timed on CPU devices: what is read of rounds given by hand, and a small program really run."""

import dataclasses
import json
import re

import chex
import jax
import numpy as np
import pytest

from dualpipe_jax.__main__ import main
from dualpipe_jax.command import child
from dualpipe_jax.inspect import target as targets
from dualpipe_jax.inspect.target import Target
from dualpipe_jax.pods import Plan, ahead, step_time, timed
from dualpipe_jax.pods.cache import Cache
from dualpipe_jax.pods.dryrun import answer, draw
from dualpipe_jax.pods.plain import filled, plain
from dualpipe_jax.pods.request import Request
from dualpipe_jax.pods.results import Compiled
from dualpipe_jax.pods.timed import FIRST_TOUCH, IDLE, IDLE_FEW, UPDATE, CpuTime, TickRunner
from dualpipe_jax.schedule import CostModel, lower, one_f_one_b
from dualpipe_jax.schedule.lowering.alone import unit_everywhere
from dualpipe_jax.schedule.lowering.unit_key import UnitKey

TARGET = Target.parse("cpu:4")
PLAN = Plan("tests.pods.own_program:blocks", pp=2, ep=2, schedule="1f1b", microbatches=4, microbatch_size=4)


def blueprint(**changes):
    return draw(dataclasses.replace(PLAN, **changes), TARGET, jax.devices()[:4])


def test_units_of_rounds_by_hand(monkeypatch):
    """A tick of nothing takes 0.5 core seconds, a step beside its ticks 3 and 1 for its memory; two cores, ranks of two
    devices."""
    monkeypatch.setattr(timed, "num_cores", lambda: 2)
    drawn = blueprint()
    table = drawn.pipeline.table(drawn.params, drawn.batch)
    seconds = {("F", "first"): 1.0, ("F", "last"): 2.0, ("B", "first"): 3.0, ("B", "last"): 5.0}
    kinds = {0: "first", 1: "last"}
    found = {
        IDLE: CpuTime(3 + 10 * 0.5, 10),
        IDLE_FEW: CpuTime(3 + 4 * 0.5, 4),
        UPDATE: CpuTime(8.0, 0),
        FIRST_TOUCH: CpuTime(1.0, 0),
    }
    for number, unit in enumerate(table.units):
        (stand,) = (stand for stand in unit[1:] if stand is not None)
        found[number] = CpuTime(3 + 6 * (0.5 + seconds[unit.op, kinds[stand.kind]]), 6)
    slow, fast = (
        {number: CpuTime(times * spent.seconds, spent.ticks) for number, spent in found.items()}
        for times in (2, 0.5)
    )
    read = timed.read(table, drawn, [slow, fast, found], {})
    # A rank's two devices keep both cores busy, so a unit of 2 core seconds takes one on the clock.
    assert read.units[UnitKey("F")].cycles == pytest.approx(2.0 / 2 * 1e9), (
        "the slower of both kinds stands for most"
    )
    assert read.units[UnitKey("F", ("first",))].cycles == pytest.approx(1.0 / 2 * 1e9)
    assert read.units[UnitKey("B", ("last",))].cycles == pytest.approx(5.0 / 2 * 1e9)
    assert (read.cores, read.at_once) == (2, 1)
    assert read.overheads.tick == pytest.approx(0.5 / 2 * 1e9)
    assert read.overheads.step == pytest.approx((3 + 1) / 2 * 1e9)
    assert read.update.cycles == pytest.approx(8 / 2 * 1e9)


def test_two_cores_run_two_ranks_of_one_device_at_once(monkeypatch):
    monkeypatch.setattr(timed, "num_cores", lambda: 2)
    drawn = draw(dataclasses.replace(PLAN, ep=1, microbatch_size=2), TARGET, jax.devices()[:2])
    table = drawn.pipeline.table(drawn.params, drawn.batch)
    found = {number: CpuTime(2.0, 2) for number in timed.table_units(table)}
    found |= {IDLE: CpuTime(0, 9), IDLE_FEW: CpuTime(0, 4), FIRST_TOUCH: CpuTime(0, 0)}
    read = timed.read(table, drawn, [found], {})
    assert read.at_once == 2 and read.update is None
    assert read.units[UnitKey("F")].cycles == 1e9, "of one rank, which one core works for"


def test_each_stage_of_a_v_is_priced_by_its_own_depth(monkeypatch):
    """Two cores at work for one rank of two devices: a step takes what all stages take for all microbatches."""
    monkeypatch.setattr(timed, "num_cores", lambda: 2)
    plan = dataclasses.replace(PLAN, pp=4, schedule="zb_v", set=("deep=2",))
    drawn = draw(plan, Target.parse("cpu:8"), jax.devices())
    table = drawn.pipeline.table(drawn.params, drawn.batch)
    # Of F, I and W; stages behind the first run two layers, the others one.
    seconds = {"first": (2.0, 1.0, 2.0), "last": (5.0, 6.0, 5.0)}
    seconds |= {"middle_2": (6.0, 7.0, 8.0), "middle_1": (3.0, 4.0, 4.0)}
    names = ["first", "middle_2", "middle_2", "middle_1", "middle_1", "middle_1", "middle_1", "last"]
    found = {IDLE: CpuTime(0.0, 10), IDLE_FEW: CpuTime(0.0, 4), FIRST_TOUCH: CpuTime(0.0, 0)}
    for number, unit in enumerate(table.units):
        (stand,) = (stand for stand in unit[1:] if stand is not None)
        each = seconds[names[table.keeps.kind_of.index(stand.kind)]]["FIW".index(unit.op)]
        ranks = {rank for rank in range(4) if (table.column("unit")[:, rank] == number).any()}
        found[number] = CpuTime(6 * each * len(ranks), 6)
    read = timed.read(table, drawn, [found], {})
    assert read.units[UnitKey("F")].cycles == pytest.approx(3.0 / 2 * 1e9), (
        "of most stages, not of the deepest"
    )
    assert read.units[UnitKey("F", ("middle_2",))].cycles == pytest.approx(6.0 / 2 * 1e9)
    assert (read.units[UnitKey("F")].stages, read.units[UnitKey("F", ("middle_2",))].stages) == (
        (3, 4, 5, 6),
        (1, 2),
    )
    device = dataclasses.replace(Target.parse("cpu:8").device, flops=1e9)
    step = step_time.predict_step(read, drawn, plan, device)
    whole = 4 * sum(sum(seconds[name]) for name in names) / 2  # four microbatches, two cores
    assert step.seconds == pytest.approx(whole)
    assert sum(part.seconds for part in step.account) == pytest.approx(whole)
    again = filled(Compiled, json.loads(json.dumps(plain(read))))
    assert again == read, "a child process answers in JSON"


def test_the_table_of_a_pipeline_is_the_one_that_its_schedule_lowers_to():
    drawn = blueprint(schedule="dualpipe")
    table, plain = drawn.pipeline.table(drawn.params, drawn.batch), lower(drawn.schedule)
    assert [unit.op for unit in table.units] and table.num_ticks == plain.num_ticks
    ops = [[table.units[n].op if n >= 0 else "" for n in row] for row in table.column("unit")]
    assert ops == [[plain.units[n].op if n >= 0 else "" for n in row] for row in plain.column("unit")]


def test_a_tick_is_rehearsed_as_often_as_is_said():
    """A forward of the last stage adds its loss each time, and a backward its gradients."""
    drawn = blueprint()
    table = drawn.pipeline.table(drawn.params, drawn.batch)
    (forward,) = (n for n, unit in enumerate(table.units) if unit.op == "F" and unit.forward.kind == 1)
    tick = unit_everywhere(table, forward)
    runner = TickRunner(drawn, np.stack([tick, tick]))
    once = float(runner.run(tick, 1)[0])
    assert once > 0 and runner.run(tick, 0)[0] == once
    assert runner.run(tick, 5)[0] == pytest.approx(6 * once, rel=1e-5)
    runner.fill_slots()
    assert runner.run(tick, 0)[0] == pytest.approx(8 * once, rel=1e-5)


def test_options_of_the_compiler_are_not_passed_over():
    drawn = blueprint()
    table = drawn.pipeline.table(drawn.params, drawn.batch)
    with pytest.raises(ValueError, match="the compiler refuses this program: .*xla_no_such_option"):
        TickRunner(drawn, table.array[:2], {"xla_no_such_option": "True"})


def test_what_is_rehearsed_in_the_tables_order_is_the_step():
    """So a unit finds in its slots what the units before it left, as it does in a step."""
    drawn = blueprint(schedule="dualpipe")
    table = drawn.pipeline.table(drawn.params, drawn.batch)
    runner = TickRunner(drawn, table.array)
    runner.fill_slots()
    objective, gradients, _ = runner.run(table.array[0], 0)
    params, batch = timed.random_arrays((drawn.params, drawn.batch))
    (wanted, _), wanted_gradients = drawn.pipeline.value_and_grad(params, batch)
    assert objective == wanted
    chex.assert_trees_all_equal(
        jax.tree.leaves(gradients),
        jax.tree.leaves(drawn.pipeline.trained(drawn.pipeline.placed(wanted_gradients))),
    )


def test_memory_takes_longer_the_first_time(monkeypatch):
    took = []

    def cpu_time(call):
        took.append(call())
        return CpuTime(3.0 if len(took) % 2 else 1.0, 0)

    monkeypatch.setattr(timed, "cpu_time", cpu_time)
    assert timed.first_touch(2**20).seconds == 2 and timed.first_touch(0).seconds == 2
    assert len(took) == 4, "written once and again"


def test_a_program_is_timed_and_its_step_predicted(monkeypatch):
    """By a clock of its own, for a busy machine's may say that a tick takes no time."""
    column = lower(one_f_one_b(2, 4)).columns.index("unit")

    def cpu_time(call, ticks=0):
        jax.block_until_ready(call())
        busy = ticks and (call.args[0][:, column] >= 0).sum()
        return CpuTime(0.3 + ticks * (0.01 + 0.2 * busy), ticks)

    monkeypatch.setattr(timed, "cpu_time", cpu_time)
    monkeypatch.setattr(timed, "ROUNDS", 2)
    said = []
    request = Request(PLAN, "cpu:4", "units")
    found = answer(request, TARGET, jax.devices()[:4], said.append)
    compiled, step = found.compiled, found.step
    assert {"F", "F/first", "F/last", "B", "B/first", "B/last"} == set(map(str, compiled.units))
    assert said[-2:] == ["timing 4 units, round 2 of 2", "simulating the step"]
    cores = timed.num_cores()
    assert compiled.overheads.tick == pytest.approx(0.01 / cores * 1e9)
    assert compiled.overheads.step == pytest.approx(0.3 / cores * 1e9)
    assert compiled.update.cycles == pytest.approx(0.3 / cores * 1e9) and found.target.flops > 1e8
    extra = {int(k): v for k, v in step.costs["extra"].items()}
    costs, table = CostModel(**{n: step.costs[n] for n in "FIW"}, extra=extra), lower(one_f_one_b(2, 4))
    makespan = table.shared_makespan(costs, compiled.at_once)
    assert step.cycles == pytest.approx(makespan + table.num_ticks * compiled.overheads.tick)
    rest = compiled.overheads.step + compiled.update.cycles
    assert step.seconds == pytest.approx((step.cycles + rest) / 1e9)
    assert sum(part.seconds for part in step.account) == pytest.approx(step.seconds)
    monkeypatch.setattr(timed, "peak", lambda: 1e9)
    monkeypatch.setattr(timed, "measure", lambda *_: compiled)
    more = answer(
        dataclasses.replace(request, target="cpu:8"), Target.parse("cpu:8"), jax.devices(), said.append
    )
    done = more.step.mfu * more.step.seconds * 1e9
    assert done == pytest.approx(12 * 4 * 8 * 2 * 16), "all cores work, though four devices are left over"


def test_a_count_is_that_of_the_devices():
    """Without devices, as in `dualpipe plan`: pairs are not fused on CPU, so actions stand in other ticks."""
    shape = {"pp": 8, "ep": 1, "microbatches": 32, "microbatch_size": 1}
    plan, target = Plan(PLAN.model, schedule="interleaved_1f1b_overlap", **shape), Target.parse("cpu:8")
    counted, real = (ahead.memory_by_kind(draw(plan, target, d)) for d in (None, jax.devices()))
    assert counted == real


def test_cpu_devices_are_told_by_name(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--already=there")
    target = Target.parse("cpu:16")
    assert (target.platform, target.num_devices, target.device.clock) == ("cpu", 16, 1e9)
    flags = target.environment["XLA_FLAGS"].split()
    assert flags[:2] == ["--already=there", "--xla_force_host_platform_device_count=16"]
    assert Target.parse("cpu:4").device.memory == 4 * target.device.memory
    with pytest.raises(ValueError, match="target cpu:16: JAX has 8 CPU devices; set XLA_FLAGS='--already"):
        target.devices()
    message = "cpu wants 1 sizes with x between them, for instance .*cpu:8; got 2x2"
    with pytest.raises(ValueError, match=message):
        Target.parse("cpu:2x2")


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        (["overlap"], "on CPU nothing overlaps, .* its units are timed by `dualpipe plan`"),
        (["dryrun", "--compile", "step"], "on CPU nothing overlaps"),
        (["dryrun", "-o", "x.svg"], "its units are run and timed, not read; drop --output"),
        (["dryrun", "--rates", "r.json"], "not read; drop --rates"),
    ],
)
def test_what_makes_no_sense_on_cpu(asked, why, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r.json").write_text(json.dumps({"rates": {"memory": 1.0}}))
    monkeypatch.setattr(child, "ask", lambda *_: pytest.fail("nothing is to be asked"))
    assert main([*asked, "--target", "cpu:4", "--program", "tiny", "--pp", "2", "--ep", "2"]) == 2
    assert re.search(why, capsys.readouterr().err)


def test_what_was_timed_elsewhere_is_not_known_here(monkeypatch, tmp_path):
    """Compiled costs are the same on every machine, timed ones are not."""
    cache = Cache(tmp_path)
    timed_here, compiled = (cache.file(Request(PLAN, target, "units")) for target in ("cpu:4", "v5e:2x2"))
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0})
    assert cache.file(Request(PLAN, "cpu:4", "units")) != timed_here, "on one core"
    assert cache.file(Request(PLAN, "v5e:2x2", "units")) == compiled
    monkeypatch.undo()
    monkeypatch.setattr("platform.node", lambda: "another")
    assert cache.file(Request(PLAN, "cpu:4", "units")) != timed_here
    assert cache.file(Request(PLAN, "v5e:2x2", "units")) == compiled
    assert targets.DEVICES.keys() >= {"v5e", "h100"} and "cpu" not in targets.DEVICES
