"""Timelines made ready for drawing: nothing is lost, nothing overlaps, waits stay as they are."""

import itertools

import pytest

from dualpipe_jax.inspect import overlap
from dualpipe_jax.inspect.cycles import Event
from dualpipe_jax.inspect.lanes import exchange_name, rows, segments
from dualpipe_jax.inspect.rates import Rates
from tests.inspect.by_hand import done, module, start, work

LETTERS = {"F": "forward", "B": "backward", "?": "unknown", "w": "unknown"}


def laid(text):
    """Events laid end to end from "F10 B20 w5": direction, or w for a wait, and cycles."""
    clock, events = 0.0, []
    for word in text.split():
        end = clock + float(word[1:])
        kind = "wait" if word[0] == "w" else "fusion"
        events.append(Event(clock, end, word, kind, LETTERS[word[0]], "compute"))
        clock = end
    return events


@pytest.mark.parametrize(
    ("text", "least", "wanted"),
    [
        ("", 10, []),
        ("F10 F20 B5 ?1 ?2 F3", 0, ["forward 30", "backward 5", "unknown 3", "forward 3"]),
        ("F10 B1 F2 B1 F20", 10, ["forward 34"]),
        ("F3 B4 B5 F3 F10", 10, ["backward 12", "forward 13"]),
        ("B30 F1 F1", 10, ["backward 32"]),
        ("F20 w1 B2 w3 w4 F2", 10, ["forward 20", "wait 1", "backward 2", "wait 7", "forward 2"]),
    ],
)
def test_segments(text, least, wanted):
    events = laid(text)
    found = segments(events, least)
    assert [f"{s.label} {s.end - s.start:g}" for s in found] == wanted
    assert [e for s in found for e in s.events] == events


def test_rows_hold_one_event_at_a_time():
    lines = [start("a"), start("b"), start("c", "collective-permute"), work("w", 40)]
    lines += [done("a"), work("v", 5), done("c", "collective-permute"), done("b")]
    known = rows(overlap(module(*lines), Rates(link=1.0)).timeline("main"))
    assert list(known) == ["compute", "all-to-all", "collective-permute"]
    assert [len(lane) for lane in known.values()] == [1, 1, 1]
    unknown = rows(overlap(module(*lines)).timeline("main"))
    assert [len(lane) for lane in unknown.values()] == [1, 2, 1], "they last from start to done"
    for row in itertools.chain(*known.values(), *unknown.values()):
        assert all(a.end <= b.start for a, b in itertools.pairwise(row))


def test_a_named_scope_says_which_exchange_it_is():
    exchanges = {
        "jit(f)/transpose(jvp(combine))/all_to_all": "combine",
        "jit(f)/jvp(dispatch)/all_to_all": "dispatch",
        "jit(f)/combine/moe/dispatch/all_to_all": "dispatch",
        "jit(f)/jvp(recombined)/all_to_all": "",
        "": "",
    }
    for op_name, wanted in exchanges.items():
        assert exchange_name(Event(0, 1, "a", "all-to-all", "forward", "all-to-all", op_name)) == wanted, (
            op_name
        )
