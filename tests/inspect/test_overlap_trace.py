"""The trace as its viewers read it: tracks, slices that nest, what each says."""

import json
from pathlib import Path

import pytest

from dualpipe_jax.inspect import gpu_rates, overlap, to_chrome_trace
from dualpipe_jax.inspect.rates import Rates, tpu_rates
from tests.inspect.by_hand import done, module, start, work

TEXTS = Path(__file__).parent / "texts"
LINES = (
    work("v", 10),
    start("a", scope="jvp(dispatch)"),
    work("w", 400, "transpose(jvp())", ", calls=%dot_fusion"),
    work("y", 100, "transpose(jvp())"),
    done("a"),
    work("z", 5),
)
KIB = 1024
RATES = {
    "v5e_pair": tpu_rates("v5e"),
    "h100_pair": gpu_rates("h100"),
    "v5e_ticks": Rates(),
    "cpu_ticks": None,
}


def by_track(trace):
    """Slices by the name of their track, in the order of the file."""
    events = json.loads(json.dumps(trace, allow_nan=False))["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    tracks = {name: [] for name in names.values()}
    for event in events:
        if event["ph"] == "X":
            tracks[names[event["tid"]]].append(event)
    return tracks


def drawn(clock=None):
    return to_chrome_trace(overlap(module(*LINES), Rates(link=2 * 0.75)), "main", clock)


def test_directions_hold_their_instructions():
    trace = drawn()
    assert trace["otherData"] == {
        "module": "by_hand", "computation": "main", "cycles": 15 + KIB, "cycles waited": KIB - 500,
        "one microsecond is": "one cycle",
    }  # fmt: skip
    tracks = by_track(trace)
    assert list(tracks) == ["computation", "all-to-all"]
    assert [(e["name"], e["ts"], e["dur"]) for e in tracks["computation"]] == [
        ("forward", 0, 10),
        ("v", 0, 10),
        ("backward", 10, 500),
        ("w", 10, 400),
        ("y", 410, 100),
        ("wait", 510, KIB - 500),
        ("forward", 10 + KIB, 5),
        ("z", 10 + KIB, 5),
    ]
    (exchange,) = tracks["all-to-all"]
    assert (exchange["name"], exchange["ts"], exchange["dur"]) == ("dispatch forward", 10, KIB)


def test_what_slices_say():
    tracks = by_track(drawn())
    slices = {e["name"]: e["args"] for e in tracks["computation"] if e["name"] != "forward"}
    assert slices["backward"] == {"cycles": 500, "instructions": 2}
    assert slices["w"] == {
        "op_name": "jit(f)/transpose(jvp())/mul", "opcode": "fusion", "direction": "backward", "cycles": 400,
        "matmuls": {"backward": 1},
    }  # fmt: skip
    assert slices["wait"] == {"for": "a", "cycles": KIB - 500, "instructions": 1}
    (exchange,) = tracks["all-to-all"]
    said = {key: exchange["args"][key] for key in ("op_name", "form", "payload", "group size", "cycles")}
    assert said == {
        "op_name": "jit(f)/jvp(dispatch)/all_to_all", "form": "async", "payload": KIB, "group size": 4,
        "cycles": KIB,
    }  # fmt: skip
    assert exchange["args"]["cycles exposed"] == exchange["args"]["cycles waited"] == KIB - 500
    assert exchange["args"]["hidden"] == pytest.approx(500 / KIB)
    assert exchange["args"]["matmuls between"] == {"forward": 0, "backward": 1, "unknown": 0}


def test_a_clock_gives_microseconds():
    trace = drawn(clock=1e6)
    assert trace["otherData"]["hertz"] == 1e6
    assert by_track(trace)["computation"][2]["dur"] == 500
    assert by_track(drawn(clock=16e6))["computation"][2]["dur"] == 500 / 16


@pytest.mark.parametrize("clock", [None, 1.5e9, 1.83e9])
@pytest.mark.parametrize("name", RATES)
def test_slices_nest_or_follow_each_other(name, clock):
    found = overlap((TEXTS / f"{name}.hlo").read_text(), RATES[name])
    for computation in found.computations:
        trace = to_chrome_trace(found, computation, clock)
        for track in by_track(trace).values():
            open_until = []
            for event in track:
                nanoseconds = 1000 * event["ts"], 1000 * event["dur"]
                assert all(n == int(n) for n in nanoseconds), "viewers cut off what is less"
                end = sum(nanoseconds)
                while open_until and open_until[-1] <= nanoseconds[0]:
                    open_until.pop()
                assert not open_until or end <= open_until[-1]
                open_until.append(end)
        times = [event["ts"] for event in trace["traceEvents"] if event["ph"] == "X"]
        assert times == sorted(times)


def test_unknown_durations_have_rows_as_many_as_are_in_flight():
    lines = (start("a"), start("b"), work("w", 40), done("a"), done("b"))
    tracks = by_track(to_chrome_trace(overlap(module(*lines)), "main"))
    assert list(tracks) == ["computation", "all-to-all", "all-to-all (2)"]
    (second,) = tracks["all-to-all (2)"]
    assert second["name"] == "all-to-all" and "cycles" not in second["args"]


@pytest.mark.parametrize("clock", [0, -1.5e9, float("nan")])
def test_a_clock_must_run(clock):
    with pytest.raises(ValueError, match=f"to_chrome_trace: clock={clock}; it must be above 0 hertz"):
        drawn(clock)


def test_directions_may_have_other_names():
    names = {"forward": ("microbatch A", "A"), "backward": ("microbatch B", "B")}
    tracks = by_track(to_chrome_trace(overlap(module(*LINES), Rates(link=2 * 0.75)), "main", None, names))
    stretches = [e["name"] for e in tracks["computation"]]
    assert stretches[0] == "microbatch A" and "microbatch B" in stretches
    assert [e["name"] for e in tracks["all-to-all"]] == ["dispatch microbatch A"]
    assert not {"forward", "backward"} & {e["cat"] for e in tracks["computation"]}
