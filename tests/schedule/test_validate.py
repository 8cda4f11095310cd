import dataclasses
import random
import re

import pytest

from dualpipe_jax.schedule import ALL_SCHEDULES, Action, Op, Placement, Schedule, ScheduleError, validate
from dualpipe_jax.schedule.formats.text import parse_grid
from dualpipe_jax.schedule.recipes import dualpipe, dualpipe_v, gpipe, one_f_one_b, zb_h1


def refusal(schedule):
    with pytest.raises(ScheduleError) as caught:
        validate(schedule)
    return str(caught.value)


def with_order(schedule, rank, change):
    """The schedule with one rank's order changed in place by a function of its list of slots."""
    order = list(schedule.orders[rank])
    change(order)
    orders = (*schedule.orders[:rank], tuple(order), *schedule.orders[rank + 1 :])
    return dataclasses.replace(schedule, orders=orders)


def slot(text):
    return tuple(map(Action.parse, text.split("+")))


def put(order, index, text):
    order[index] = slot(text)


def swap(order, i, j):
    order[i], order[j] = order[j], order[i]


def test_returns_the_schedule():
    schedule = dualpipe(4, 8)
    assert validate(schedule) is schedule


def test_a_rank_that_runs_backward_too_early():
    wrong = with_order(dualpipe_v(2, 4), 1, lambda order: swap(order, 1, 5))
    assert refusal(wrong) == (
        "dualpipe_v: rank 1, slot 1 runs 2B0 before 2F0.\n"
        "\n"
        "rank 0: 0F0 0F1   0F2 3F0 3I0 3W0 3F1     0F3+3B1 ...\n"
        "rank 1: 1F0 [2B0] 1F1 2F1 1F2 2F0 2F2+1B0 1F3+2B1 ...  <-- here\n"
        "\n"
        "A stage runs F, then B (or I, later W), and hands over in pipe order. "
        "Check the order given to rank 1."
    )


def test_a_v_handed_over_against_the_pipe():
    wrong = with_order(dualpipe_v(3, 6), 2, lambda order: swap(order, 0, 1))
    assert "dualpipe_v: rank 2, slot 0 runs 3F0 before 2F0." in refusal(wrong)


def test_a_w_before_its_i():
    wrong = with_order(zb_h1(2, 4), 0, lambda order: swap(order, 2, 3))
    assert "zb_h1: rank 0, slot 2 runs 0W0 before 0I0." in refusal(wrong)


def test_a_missing_action_is_named_where_it_is_missing_not_where_it_is_awaited():
    message = refusal(with_order(gpipe(4, 3), 1, lambda order: order.pop(2)))
    assert message == (
        "gpipe: rank 1 never runs 1F2, though slot 4 runs 1B2.\n"
        "\n"
        "rank 0: 0F0 0F1 0F2 0B0 0B1   0B2\n"
        "rank 1: 1F0 1F1 1B0 1B1 [1B2]  <-- here\n"
        "rank 2: 2F0 2F1 2F2 2B0 2B1   2B2\n"
        "rank 3: 3F0 3F1 3F2 3B0 3B1   3B2\n"
        "\n"
        "Each stage runs each microbatch of its pipe once: F, and B or both I and W. Add 1F2."
    )


@pytest.mark.parametrize(
    ("schedule", "rank", "change", "message"),
    [
        (gpipe(2, 2), 1, lambda o: o.clear(), "rank 1 never runs 1F0."),
        (gpipe(2, 2), 1, lambda o: o.pop(), "never runs 1B1 (nor 1I1 and 1W1), though slot 1 runs 1F1."),
        (zb_h1(2, 2), 1, lambda o: o.pop(), "never runs 1W1, though slot 3 runs 1I1."),
        (zb_h1(2, 2), 1, lambda o: o.pop(1), "never runs 1I0, though slot 3 runs 1W0."),
        (gpipe(2, 2), 0, lambda o: put(o, 1, "0F0"), "rank 0, slot 1 runs 0F0 again; slot 0 ran it already."),
        (gpipe(2, 2), 0, lambda o: o.append(slot("0W0")), "slot 4 runs 0W0, though slot 2 runs 0B0."),
        (zb_h1(2, 2), 0, lambda o: o.append(slot("0B0")), "slot 6 runs 0B0, though slot 2 runs 0I0."),
        (gpipe(3, 2), 1, lambda o: put(o, 1, "2F1"), "rank 1, slot 1 runs 2F1, but stage 2 lives on rank 2."),
        (gpipe(3, 2), 1, lambda o: put(o, 1, "3F1"), "slot 1 runs 3F1, but there is no stage 3."),
        (dualpipe(2, 4), 0, lambda o: put(o, 0, "0F2"), "slot 0 runs 0F2, but there is no microbatch 2."),
        (dualpipe(4, 8), 0, lambda o: put(o, 7, "7B1+0F3"), "rank 0, slot 7 pairs what cannot be paired."),
        (dualpipe(4, 8), 0, lambda o: put(o, 7, "0F3+7I1"), "rank 0, slot 7 pairs what cannot be paired."),
        (dualpipe(4, 8), 0, lambda o: put(o, 0, "0F0+0F1+7B0"), "slot 0 pairs what cannot be paired."),
        (dualpipe_v(2, 4), 0, lambda o: put(o, 7, "0F1+3B1"), "slot 7 pairs 0F1 with 3B1, one microbatch"),
        (gpipe(2, 2), 0, lambda o: o.insert(0, ()), "rank 0, slot 0 is (), not a tuple of actions."),
        (gpipe(2, 2), 0, lambda o: o.insert(0, Action(0, Op.F, 0)), "slot 0 is Action(stage=0, op=<Op.F"),
        (gpipe(2, 2), 0, lambda o: o.insert(0, (Action(0, "F", 0),)), "not a tuple of actions"),
    ],
)
def test_faults_of_one_slot(schedule, rank, change, message):
    text = refusal(with_order(schedule, rank, change))
    assert message in text
    here = [line for line in text.splitlines() if line.endswith("  <-- here")]
    assert [line.split(":")[0] for line in here] == [f"rank {rank}"]


def test_a_pair_of_equal_numbers_from_two_pipes_is_independent():
    rows = "0F0 3F0 3B0 0F1 3F1+0B0 3B1 0B1\n2F0 1F0 1B0 2F1 1F1+2B0 1B1 2B1"
    validate(parse_grid(rows, Placement.bidirectional(2)))
    paired = "0F0 3F0 3B0 0F1 3F1 0B0 3B1 0B1\n2F0 1F0 2F1+1B0 1F1 2B0 1B1 2B1"
    validate(parse_grid(paired, Placement.bidirectional(2)))


def test_counts_of_the_schedule_itself():
    schedule = gpipe(2, 2)
    assert refusal(dataclasses.replace(schedule, orders=schedule.orders[:1])) == (
        "gpipe: has orders for 1 ranks, but its placement ((0, 1),) has 2; give one order for each rank"
    )
    odd = Schedule("mine", Placement.bidirectional(2), 3, ((), ()))
    assert "3 microbatches cannot be shared by 2 pipe(s)" in refusal(odd)
    assert "positive multiple of 1" in refusal(Schedule("mine", Placement.linear(1), 0, ((),)))


def test_a_knot_is_laid_at_the_rank_that_tied_it():
    wrong = with_order(one_f_one_b(4, 6), 1, lambda order: order.insert(1, order.pop(3)))
    assert refusal(wrong) == (
        "one_f_one_b: rank 1, slot 1 runs 1B0 before 1F1, and so waits for itself.\n"
        "\n"
        "rank 0: 0F0 0F1   0F2 0F3 0B0 0F4 0B1 0F5 ...\n"
        "rank 1: 1F0 [1B0] 1F1 1F2 1F3 1B1 1F4 1B2 ...  <-- here\n"
        "rank 2: 2F0 2F1   2B0 2F2 2B1 2F3 2B2 2F4 ...\n"
        "rank 3: 3F0 3B0   3F1 3B1 3F2 3B2 3F3 3B3 ...\n"
        "\n"
        "Rank 1, slot 1 (1B0) waits for rank 2, slot 2 (2B0).\n"
        "Rank 2, slot 1 (2F1) waits for rank 1, slot 2 (1F1).\n"
        "A stage runs F, then B (or I, later W), and hands over in pipe order. "
        "Check the order given to rank 1: 1F1 must come first."
    )


def test_ranks_that_only_wait_are_not_blamed():
    wrong = with_order(one_f_one_b(8, 16), 3, lambda order: order.insert(1, order.pop(5)))
    text = refusal(wrong)
    assert text.startswith("one_f_one_b: rank 3, slot 1 runs 3B0 before 3F1, and so waits for itself.")
    explained = text.split("\n\n")[2]
    assert re.findall(r"[Rr]ank (\d)", explained) == ["3", "4", "4", "3", "3"]


def test_a_rank_that_overtakes_is_blamed_before_its_neighbour():
    """Either rank could give way here; rank 0 alone runs its microbatches out of sequence."""
    wrong = with_order(one_f_one_b(4, 10), 0, lambda order: order.insert(13, order.pop(16)))
    assert "one_f_one_b: rank 0, slot 13 runs 0B6 before 0F8" in refusal(wrong)


@pytest.mark.parametrize("recipe", ALL_SCHEDULES, ids=lambda recipe: recipe.__name__)
def test_any_one_fault_is_found_on_the_rank_that_has_it(recipe):
    """Exchange, drop, repeat or alter slots at random; only truly ambiguous knots may name a neighbour."""
    rng = random.Random(recipe.__name__)
    schedule = recipe(6, 14)
    found = blamed_right = 0
    for _ in range(150):
        rank = rng.randrange(6)
        order = schedule.orders[rank]
        i, j = sorted(rng.sample(range(len(order)), 2))
        change = rng.choice(
            [
                lambda o, i=i, j=j: swap(o, i, j),
                lambda o, i=i: swap(o, i - 1, i),
                lambda o, i=i, j=j: o.insert(i, o.pop(j)),
                lambda o, i=i: o.pop(i),
                lambda o, i=i, j=j: o.append(o[i]),
                lambda o, i=i, j=j: o.__setitem__(i, o[j]),
            ]
        )
        try:
            validate(with_order(schedule, rank, change))
        except ScheduleError as error:
            found += 1
            blamed_right += int(re.search(r": rank (\d+)", str(error))[1]) == rank
    assert found > 75
    assert blamed_right >= 0.98 * found


def test_long_rings_and_many_ranks_stay_readable():
    schedule = dualpipe(32, 64)
    wrong = with_order(schedule, 3, lambda order: order.insert(2, order.pop(60)))
    text = refusal(wrong)
    assert "rank 3, slot 2" in text
    assert len(text.splitlines()) < 25
    assert max(map(len, text.splitlines())) < 200
