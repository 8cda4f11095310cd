"""The trace as its viewers read it: every slot once, rows that never overlap, arrows that are data."""

import collections
import itertools
import json

import pytest

from dualpipe_jax.schedule import ALL_SCHEDULES, Action, CostModel, Op, Placement, parse_grid, simulate
from dualpipe_jax.schedule.blame import critical_path
from dualpipe_jax.schedule.formats.trace import to_chrome_trace
from dualpipe_jax.schedule.recipes import dualpipe, dualpipe_v, gpipe, one_f_one_b

COSTS = CostModel(0.7, 1.3, 1.01, FB=2.21, send=0.4)


recipes = pytest.mark.parametrize("recipe", ALL_SCHEDULES, ids=lambda recipe: recipe.__name__)


def read(trace):
    """By way of JSON: the events by phase, and what rows and processes are called."""
    events = collections.defaultdict(list)
    for event in json.loads(json.dumps(trace, allow_nan=False))["traceEvents"]:
        events[event["ph"]].append(event)
    titles = (event for event in events.pop("M") if event["args"])
    named = {(e["name"], e["pid"], e.get("tid")): next(iter(e["args"].values())) for e in titles}
    return events, named


def work_and_sends(trace):
    events, named = read(trace)
    rows = {"work": collections.defaultdict(list), "sends": collections.defaultdict(list)}
    for event in events["X"]:
        group = "sends" if named["process_name", event["pid"], None] == "sends" else "work"
        rows[group][named["thread_name", event["pid"], event["tid"]]].append(event)
    return rows["work"], rows["sends"]


@recipes
def test_every_slot_is_drawn_once_when_it_runs(recipe):
    timeline = simulate(recipe(4, 8), COSTS)
    rows, _ = work_and_sends(to_chrome_trace(timeline))
    assert sorted(rows) == [f"rank {rank}" for rank in range(4)]
    for rank, order in enumerate(timeline.schedule.orders):
        drawn = rows[f"rank {rank}"]
        assert [event["name"] for event in drawn] == ["+".join(map(str, slot)) for slot in order]
        starts, ends = timeline.starts[rank], timeline.ends[rank]
        assert [event["ts"] for event in drawn] == [round(1000 * start) for start in starts]
        assert [event["ts"] + event["dur"] for event in drawn] == [round(1000 * end) for end in ends]


@recipes
@pytest.mark.parametrize(("send", "unit_us"), [(0.4, 3.3), (5.0, 1000.0)])
def test_rows_never_overlap_and_time_ascends(recipe, send, unit_us):
    trace = to_chrome_trace(simulate(recipe(4, 8), CostModel(0.7, 1.3, 1.01, FB=2.21, send=send)), unit_us)
    for row in itertools.chain(*(rows.values() for rows in work_and_sends(trace))):
        for before, after in itertools.pairwise(row):
            assert before["ts"] >= 0 and before["dur"] >= 0
            assert before["ts"] + before["dur"] <= after["ts"]
    times = [event["ts"] for event in trace["traceEvents"] if event["ph"] != "M"]
    assert times == sorted(times) and all(type(time) is int for time in times)


def test_what_a_slice_says():
    rows, _ = work_and_sends(to_chrome_trace(simulate(dualpipe(4, 8))))
    drawn = {event["name"]: event for event in rows["rank 0"]}
    assert drawn["7F0"]["cat"] == "F"
    assert drawn["7F0"]["args"] == {"stage": 7, "op": "F", "microbatch": 0, "pipe": 1}
    assert drawn["0F3+7B1"]["cat"] == "FB"
    assert drawn["0F3+7B1"]["args"] == {
        "forward": {"stage": 0, "op": "F", "microbatch": 3, "pipe": 0},
        "backward": {"stage": 7, "op": "B", "microbatch": 1, "pipe": 1},
    }
    colours = collections.defaultdict(set)
    for event in itertools.chain(*rows.values()):
        colours[event["cat"]].add(event["cname"])
    assert set(colours) == {"F", "B", "I", "W", "FB"}
    assert len(set.union(*colours.values())) == sum(map(len, colours.values())) == 5


@recipes
@pytest.mark.parametrize("send", [0.0, 0.4])
def test_arrows_are_the_data_that_changes_ranks(recipe, send):
    schedule = recipe(4, 8)
    trace = to_chrome_trace(simulate(schedule, CostModel(0.7, 1.3, 1.01, FB=2.21, send=send)))
    events, named = read(trace)
    starts, finishes = ({e["id"]: e for e in events[phase]} for phase in "sf")
    assert len(starts) == len(events["s"]) and starts.keys() == finishes.keys()
    assert all(finish["bp"] == "e" for finish in finishes.values())

    def around(event):
        """The slice to which a viewer binds an arrow's end: the last begun of those around it, in the file's order."""
        return next(
            (named["thread_name", s["pid"], s["tid"]], s)
            for s in reversed(events["X"])
            if (s["pid"], s["tid"]) == (event["pid"], event["tid"])
            and s["ts"] <= event["ts"] < s["ts"] + s["dur"]
        )

    arrows = collections.Counter()
    for number, start in starts.items():
        (sender, made), (reader, used) = around(start), around(finishes[number])
        assert sender != reader and made["ts"] + made["dur"] + round(1000 * send) <= used["ts"] + 1
        arrows[start["name"], sender, made["name"], reader, used["name"]] += 1
    assert arrows == collections.Counter(expected_arrows(schedule))


def expected_arrows(schedule):
    placement = schedule.placement
    where = {
        action: (f"rank {rank}", "+".join(map(str, slot)))
        for rank, order in enumerate(schedule.orders)
        for slot in order
        for action in slot
    }
    for reader in where:
        stage, op, microbatch = reader
        if op is Op.F and not placement.is_first(stage):
            kind, makers = "y", [Action(stage - 1, Op.F, microbatch)]
        elif op in (Op.I, Op.B) and not placement.is_last(stage):
            kind, makers = "dx", [Action(stage + 1, op, microbatch) for op in (Op.I, Op.B)]
        else:
            continue
        maker = next(action for action in makers if action in where)
        if where[maker][0] != where[reader][0]:
            yield (kind, *where[maker], *where[reader])


def test_sends_have_rows_as_many_as_are_under_way():
    _, rows = work_and_sends(to_chrome_trace(simulate(gpipe(2, 4), CostModel(send=2.5))))
    sent = {name: [(e["name"], e["ts"], e["dur"]) for e in row] for name, row in rows.items()}
    assert sent == {
        "rank 0": [("0F0 to rank 1", 1000, 2500), ("0F3 to rank 1", 4000, 2500)],
        "rank 0 (2)": [("0F1 to rank 1", 2000, 2500)],
        "rank 0 (3)": [("0F2 to rank 1", 3000, 2500)],
        "rank 1": [("1B0 to rank 0", 9500, 2500), ("1B2 to rank 0", 13500, 2500)],
        "rank 1 (2)": [("1B1 to rank 0", 11500, 2500), ("1B3 to rank 0", 15500, 2500)],
    }
    assert work_and_sends(to_chrome_trace(simulate(dualpipe_v(3, 6))))[1] == {}, "they take no time"
    inside = CostModel(send_inside=0.5, ranks_per_node=2)
    assert work_and_sends(to_chrome_trace(simulate(gpipe(2, 1), inside)))[1].keys() == {"rank 0", "rank 1"}


def test_rows_stand_in_the_order_of_ranks():
    _, named = read(to_chrome_trace(simulate(one_f_one_b(12, 12), CostModel(send=3))))
    rows = [key[1:] for key in named if key[0] == "thread_name"]
    shown = sorted(rows, key=lambda row: (row[0], named["thread_sort_index", *row]))
    ranks = [(pid, int(named["thread_name", pid, tid].split()[1])) for pid, tid in shown]
    assert ranks == sorted(ranks)
    assert len({tid for _, tid in rows} | {pid for pid, _ in rows} | {0}) == len(rows) + len(dict(rows)) + 1


@recipes
def test_counters_follow_live_activations(recipe):
    timeline = simulate(recipe(4, 8), COSTS)
    events, _ = read(to_chrome_trace(timeline))
    peaks, last = {}, {}
    for event in events["C"]:
        assert event["ts"] > last.get(event["name"], (-1, 0))[0]
        last[event["name"]] = event["ts"], event["args"]["live activations"]
        peaks[event["name"]] = max(peaks.get(event["name"], 0), event["args"]["live activations"])
    assert peaks == {f"rank {rank}": peak for rank, peak in enumerate(timeline.peak_activations)}
    assert all(live == 0 for _, live in last.values())


def test_a_counter_step_by_step():
    schedule = parse_grid("0F0 0F1 0B0 0F2 0B1 0B2", Placement.linear(1))
    events, _ = read(to_chrome_trace(simulate(schedule), 10))
    steps = [(event["ts"], event["args"]["live activations"]) for event in events["C"]]
    assert steps == [(0, 1), (10, 2), (40, 2), (70, 1), (90, 0)]


def test_what_was_drawn():
    trace = to_chrome_trace(simulate(dualpipe(4, 8), COSTS), 50)
    _, named = read(trace)
    processes = [name for key, name in named.items() if key[0] == "process_name"]
    assert processes == ["dualpipe", "sends", "live activations"]
    said = trace["otherData"]
    assert (said["schedule"], said["ranks"], said["microbatches"]) == ("dualpipe", 4, 8)
    assert said["costs"] == repr(COSTS) and said["makespan"] == simulate(dualpipe(4, 8), COSTS).makespan


def test_a_unit_must_take_time():
    for unit in (0, -1.0, float("nan")):
        with pytest.raises(
            ValueError, match=f"unit_us={unit}; it must be finite and above 0, such as 1000.0"
        ):
            to_chrome_trace(simulate(gpipe(1, 1)), unit)


def test_a_chain_of_waiting_has_a_row_of_its_own():
    timeline = simulate(dualpipe_v(3, 6), CostModel(send=0.5))
    chain = critical_path(timeline)
    trace = to_chrome_trace(timeline, 10, chain=chain)
    process = next(
        event["pid"]
        for event in trace["traceEvents"]
        if event["name"] == "process_name" and event["args"]["name"] == "what waits for what"
    )
    found = [event for event in trace["traceEvents"] if event["ph"] == "X" and event["pid"] == process]
    assert sorted((event["ts"], event["name"]) for event in found) == sorted(
        (round(10 * link.start), f"{'+'.join(map(str, link.slot))} on rank {link.rank}") for link in chain
    )
