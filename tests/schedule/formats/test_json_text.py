import json

import numpy as np
import pytest

from dualpipe_jax.schedule import (
    ALL_SCHEDULES,
    CostModel,
    Placement,
    Schedule,
    dualpipe,
    gpipe,
    html_page,
    simulate,
    to_chrome_trace,
)
from dualpipe_jax.schedule.formats.json_text import from_json, to_json

GOOD = {"name": "a", "num_microbatches": 1, "pipes": [[0]], "orders": [["0F0", "0B0"]]}


def test_schedules_come_back():
    for recipe in ALL_SCHEDULES:
        assert from_json(to_json(recipe(4, 8))) == recipe(4, 8)


def test_the_entries_are_plain():
    entries = json.loads(to_json(dualpipe(2, 4), {"makespan": 7.5}))
    assert list(entries) == ["name", "num_microbatches", "pipes", "orders", "makespan"]
    assert entries["pipes"] == [[0, 1], [1, 0]]
    assert entries["orders"][0] == ["0F0", "3F0", "0F1", "3B0", "3F1+0B0", "3B1", "0I1", "0W1"]


def test_counts_of_numpy_are_written_too():
    placement = Placement(tuple(map(tuple, np.array([[0, 1], [1, 0]]))))
    schedule = Schedule("dualpipe", placement, np.int64(4), dualpipe(2, 4).orders)
    assert to_json(schedule) == to_json(dualpipe(2, 4))
    json.dumps(to_chrome_trace(simulate(schedule)))
    html_page(gpipe(2, np.int64(2)), CostModel(F=np.float32(2)), recipes=[gpipe])


def test_other_entries_and_spaces_count_for_nothing():
    assert from_json(json.dumps(GOOD | {"by": "hand"}, indent=4)) == from_json(json.dumps(GOOD))
    empty = Schedule("", Placement.linear(1), 1, ((),))
    assert from_json(to_json(empty)) == empty


def changed(**entries):
    return json.dumps(GOOD | entries)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (changed(name=1), "from_json: name must be a string, not 1"),
        (changed(num_microbatches=True), "num_microbatches must be a whole number, not true"),
        (changed(num_microbatches=2.5), "num_microbatches must be a whole number, not 2.5"),
        (changed(pipes=[0]), "pipes must be a list of lists of ranks, such as [[0, 1], [1, 0]], not [0]"),
        (changed(pipes=[[0, 2]]), "Placement: ranks must be 0..1 with none left out, got [0, 2]"),
        (changed(orders=["0F0"]), 'must be a list of lists of slots, such as [["0F0", "0B0"]], not ["0F0"]'),
        (changed(orders=[["0F0", "0G0"]]), "from_json: orders[0][1]: not an action: '0G0'"),
        ("{", "from_json: not JSON: Expecting property name"),
        ("[]", "name, num_microbatches, pipes, orders missing; a schedule has name, num_microbatches"),
        ('{"name": "a", "orders": []}', "from_json: num_microbatches, pipes missing"),
    ],
)
def test_texts_that_hold_no_schedule(text, message):
    with pytest.raises(ValueError) as error:
        from_json(text)
    assert message in str(error.value)
