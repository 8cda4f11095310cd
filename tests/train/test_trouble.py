"""What a run says of itself once it goes wrong: by records as a step writes them."""

import pytest

from train.trouble import WINDOW, WarningSigns


def said(records, worst=9.67):
    warning_signs = WarningSigns(worst, lambda step: 4e-3)
    return [
        (number, warning)
        for number, record in enumerate(records, 1)
        for warning in warning_signs.check(
            {"step": number, "max_vio": 0.5, "drop_rate": 0.0, "loss": 3.0} | record
        )
    ]


@pytest.mark.parametrize(("max_vio", "drop_rate"), [(9.6, 0.88), (8.8, 0.0), (2.0, 0.51)])
def test_routing_that_has_collapsed_is_told_once(max_vio, drop_rate):
    """As measured: v2-lite at four times the rate of its recipe. Each of the two signs is enough."""
    healthy, collapsed = {"max_vio": 2.0}, {"max_vio": max_vio, "drop_rate": drop_rate}
    ((step, told),) = said([healthy] * 5 + [collapsed] * (2 * WINDOW))
    assert step == 5 + WINDOW
    assert told == (
        f"routing has collapsed: for {WINDOW} steps few experts have had nearly all tokens (MaxVio {max_vio:.2f} of at "
        f"most 9.67, {drop_rate:.0%} of the assignments dropped); lower --learning-rate, now 0.004, or raise "
        "--bias-rate or --balance-factor"
    )


@pytest.mark.parametrize("records", [
    [{"max_vio": 9.6}, {"max_vio": 8.0}] * (2 * WINDOW),  # not for long
    [{"max_vio": 6.0, "drop_rate": 0.3}] * (2 * WINDOW),  # not nearly all
    [{"loss": 3.0 + 0.001 * n} for n in range(50)],       # within the noise
    [{"loss": 9.0 if n % 3 else 2.0} for n in range(WINDOW - 1)],  # too few to say
])  # fmt: skip
def test_what_may_come_right_is_not_told(records):
    assert said(records) == []


def test_experts_that_all_take_part_never_collapse():
    """With as many experts as a token takes, MaxVio is always nought: the worst there is, too."""
    assert said([{"max_vio": 0.0}] * (2 * WINDOW), worst=0.0) == []


def test_of_its_beginning_a_resumed_run_says_nothing():
    """Its own first loss is one among many that go up and down."""
    warning_signs = WarningSigns(9.67, lambda step: 4e-3)
    for step in range(500, 500 + 2 * WINDOW):
        assert (
            warning_signs.check(
                {"step": step, "max_vio": 0.5, "drop_rate": 0.0, "loss": 2.0 if step == 500 else 2.2}
            )
            == []
        )


def test_a_loss_that_is_higher_than_it_began_is_told_once():
    ((step, told),) = said([{"loss": 5.0}] + [{"loss": 5.5}] * (2 * WINDOW))
    assert step == WINDOW
    assert told == (
        f"the loss is higher than it began: 5.5 over the last {WINDOW} steps, 5 at first; lower --learning-rate, now "
        "0.004, or warm up for longer"
    )
