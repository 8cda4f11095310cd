"""Actions, placements and schedules by hand."""

import pytest

from dualpipe_jax.schedule import Action, Op, Placement, Schedule


def test_an_action_prints_and_parses_back_and_anything_else_is_none():
    for text in ("3F0", "0B12", "12I7", "1W1"):
        assert str(Action.parse(text)) == text
    for text in ("", "F0", "3F", "3X0", "3F0x", "0REDUCE_GRAD", "-1F0"):
        with pytest.raises(ValueError, match="expected stage, one of F B I W, microbatch"):
            Action.parse(text)
    # An action is found by plain letters too.
    assert [hash(op) for op in Op] == [hash(letter) for letter in "FBIW"]
    assert {Action(0, Op.F, 0): 1}[(0, "F", 0)] == 1


def test_stages_are_numbered_through_all_pipes():
    placement = Placement.bidirectional(4)
    assert placement.rank_of == (0, 1, 2, 3, 3, 2, 1, 0)
    assert placement.stages_on == ((0, 7), (1, 6), (2, 5), (3, 4))
    assert (placement.num_pipes, placement.num_model_stages, placement.num_stages) == (2, 4, 8)
    assert [placement.model_stage(stage) for stage in range(8)] == [0, 1, 2, 3] * 2
    assert [stage for stage in range(8) if placement.is_first(stage)] == [0, 4]
    assert [stage for stage in range(8) if placement.is_last(stage)] == [3, 7]


def test_a_v_rounds_and_waves():
    placement = Placement.v(3)  # turns around on the last rank
    assert placement.rank_of == (0, 1, 2, 2, 1, 0)
    assert placement.stages_on == ((0, 5), (1, 4), (2, 3))
    assert {placement.pipe_of(stage) for stage in range(6)} == {0}
    assert Placement.interleaved(4, 2).pipes == ((0, 1, 2, 3, 0, 1, 2, 3),)
    assert Placement.interleaved(4, 2).stages_on == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert Placement.interleaved(3, 1) == Placement.linear(3)
    assert Placement.wave(3, 2).pipes == ((0, 1, 2, 2, 1, 0, 0, 1, 2, 2, 1, 0),)
    assert Placement.wave(3, 2).stages_on[0] == (0, 5, 6, 11)
    assert Placement.wave(3, 1) == Placement.v(3)


@pytest.mark.parametrize(
    ("pipes", "message"),
    [
        ((), "at least one pipe"),
        (((),), "at least one stage"),
        (((0, 1), (0,)), r"differ in depth: \[2, 1\]"),
        (((0, 2),), r"0\.\.1 with none left out, got \[0, 2\]"),
    ],
)
def test_placements_that_make_no_sense_are_refused(pipes, message):
    with pytest.raises(ValueError, match=message):
        Placement(pipes)


def test_names_are_one_line_of_printable_characters():
    for name in ("a\nvalid: b", "a\x1b[31m", "a\tb", "\u202eb"):
        with pytest.raises(ValueError, match="Schedule: name .* has line breaks or control characters"):
            Schedule(name, Placement.linear(1), 1, ((),))
    assert Schedule('mine, $x_$ "é"', Placement.linear(1), 1, ((),)).name
    assert Schedule("none", Placement.bidirectional(2), 6, ()).microbatches_per_pipe == 3, "pipes share them"
