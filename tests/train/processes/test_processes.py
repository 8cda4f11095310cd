"""Several processes as one program: what each draws, what they must have in common, how they meet."""

import json

import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from dualpipe_jax.parallel import make_mesh
from tests.two_processes import what_both_say
from train.config import ConfigError, configure
from train.processes import coordination
from train.processes.group import Processes, common_facts, differences, make_global_batch, refuse_idle
from train.processes.stragglers import Stragglers, describe, excess_over_median

SHAPE = (3, 4, 5)


def test_only_what_devices_hold_is_drawn():
    mesh, drawn = make_mesh(2, 4), []

    def draw(rows):
        drawn.append(rows)
        whole = np.arange(60, dtype=np.int32).reshape(SHAPE)
        return {"inputs": whole[rows], "targets": -whole[rows]}

    batch = make_global_batch(draw, SHAPE[:2], NamedSharding(mesh, PartitionSpec(None, "ep")))
    assert sorted(rows[1].start for rows in drawn) == [0, 1, 2, 3], (
        "once each, though two pipeline ranks hold it"
    )
    assert all(rows[1].stop - rows[1].start == 1 and rows[0] == slice(0, 3) for rows in drawn)
    np.testing.assert_array_equal(batch["inputs"], np.arange(60).reshape(SHAPE))
    np.testing.assert_array_equal(batch["targets"], -np.arange(60).reshape(SHAPE))


def test_what_differs_is_named_with_who():
    ours = common_facts(configure(seed=1), "abc")
    theirs = common_facts(configure(seed=2), "abd")
    assert differences([ours, ours]) == []
    assert differences([ours, ours, theirs, theirs]) == [
        "  option seed: 1 on process 0, 2 on process 2 and 1 more",
        "  corpus: abc on process 0, abd on process 2 and 1 more",
    ]
    one, other = (configure(process_id=n, coordinator_bind=f"{n}:1") for n in (0, 1))
    assert common_facts(one, "abc") == common_facts(other, "abc"), "who one is may differ"


def test_a_process_without_devices_of_the_mesh_is_refused():
    mesh = make_mesh(2, 2)  # all of this process
    refuse_idle(mesh, 1)
    with pytest.raises(ConfigError, match="process 1, 2 of 3 has no device of the mesh, whose 4 devices"):
        refuse_idle(mesh, 3)


def test_alone_nothing_waits():
    alone = Processes()
    alone.barrier()
    alone.check_equal({"corpus": "abc"})
    alone.connect(make_mesh(1, 1))
    assert alone.broadcast(lambda: [1, "a"]) == [1, "a"]
    assert alone.gather("x") == ["x"]
    assert alone.any_problem("broken") == "broken" and alone.any_problem(None) is None
    assert alone.decide(True) and not alone.decide(False) and not alone.preempted()
    assert Stragglers(alone, 1).report(1) is None


def test_what_is_gathered_is_in_the_order_of_processes(monkeypatch):
    monkeypatch.setattr(coordination, "wait_for_value", json.dumps)
    monkeypatch.setattr(coordination, "delete_value", lambda key: None)
    assert Processes(0, 4).gather("mine") == ["mine", "train/1/1", "train/1/2", "train/1/3"]


def test_the_slowest_and_its_excess():
    assert excess_over_median([1.0, 5.0]) == (1, 4.0, 1.0)
    assert excess_over_median([2.0, 1.0, 3.0, 9.0, 4.0]) == (3, 6.0, 3.0)
    assert excess_over_median([7.0, 1.0, 1.0, 1.0]) == (0, 6.0, 1.0)


MEETING = """
import json, sys, time
from pathlib import Path
process, address, answer = int(sys.argv[1]), *sys.argv[2:]
from train.config import ConfigError, LaunchConfig
from train.processes.launch import initialize, detect_launch
from train.processes.heartbeat import Heartbeat
asked = LaunchConfig(coordinator=address, num_processes=2, process_id=process)
initialize(detect_launch(asked), asked)
import jax, numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from train.processes.group import connected_processes, make_global_batch
from train.processes.stragglers import Stragglers, describe
processes = connected_processes(Heartbeat(patience=100.0))
told = {"devices": [jax.local_device_count(), jax.device_count()], "id": processes.id}
told["first"] = processes.broadcast(lambda: {"from": processes.id})
told["any"] = processes.any_problem("broken" if process else None)
told["none"] = processes.any_problem(None)
try:
    processes.check_equal({"same": "1", "corpus": "abc" if process else "abd"})
except ConfigError as error:
    told["differ"] = str(error)
mesh = jax.make_mesh((2,), ("ep",), axis_types=(jax.sharding.AxisType.Auto,))
processes.connect(mesh)
drawn = []
def draw(rows):
    drawn.append([rows[1].start, rows[1].stop])
    whole = np.arange(24, dtype=np.int32).reshape(2, 4, 3)
    return {"inputs": whole[rows], "positions": -whole[rows]}
batch = make_global_batch(draw, (2, 4), NamedSharding(mesh, PartitionSpec(None, "ep")))
total = jax.jit(lambda x: x.sum(), out_shardings=NamedSharding(mesh, PartitionSpec()))
told["drawn"], told["sum"] = drawn, [int(total(batch[name])) for name in ("inputs", "positions")]
told["decided"] = []
for asked in (process == 0, process == 1, [process, None]):
    total(batch["inputs"]).block_until_ready()  # a step: nobody is done with it who has not heard the last decision
    told["decided"].append(processes.decide(asked))
stragglers = Stragglers(processes, 2)
real, late = time.perf_counter, 0.0
time.perf_counter = lambda: real() + late
for step in (1, 2):
    with stragglers.timing_host_work():
        late += 1000.0 * process
    told["stragglers"] = stragglers.report(step)
Path(answer).write_text(json.dumps(told))
processes.leave()
"""


@pytest.fixture(scope="module")
def meeting():
    """Two real processes; what each told."""
    return what_both_say("-c", MEETING)


def test_processes_tell_one_another_and_draw_their_own_rows(meeting):
    for told in meeting:
        assert told["devices"] == [1, 2] and told["first"] == {"from": 0}
        assert told["any"] == "broken" and told["none"] is None
        assert told["decided"] == [True, False, [0, None]]
        assert "would not train the same model" in told["differ"] and "same" not in told["differ"][40:]
        assert "corpus: abd on process 0, abc on process 1" in told["differ"]
    assert [told["drawn"] for told in meeting] == [[[0, 2]], [[2, 4]]]
    assert [told["sum"] for told in meeting] == [[276, -276]] * 2


def test_the_straggler_is_named(meeting):
    report = meeting[0]["stragglers"]
    assert meeting[1]["stragglers"] is None
    assert report["slowest_host"] == 1 and report["slowest_host_excess_s"] == pytest.approx(1000.0, abs=100.0)
    assert report["median_device_s"] > 0
    assert "host work of a step: process 1, " in describe(report)
