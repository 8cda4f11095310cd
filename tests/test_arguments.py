"""Public functions given arguments of wrong types, values and shapes, one at a time, drawn at random from a fixed seed.

What each argument may be is judged by typeguard from the signature, which is not what the functions ask themselves.
``python -m tests.test_arguments MINUTES`` goes on for longer and counts.
"""

import collections
import inspect
import re
import sys
import time
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import typeguard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dualpipe_jax import parallel, schedule
from dualpipe_jax.parallel.expert_groups import grouped_matmul
from tests.public_calls import GOOD, HANDLE, SMALL, TINY, TOPK, X, function_of

ARGUMENTS = [(name, argument) for name, good in GOOD.items() for argument in good]
SLOW = "schedule.choose", "schedule.search", "schedule.optimum", "split.hoist"
"""They play or solve something for every right argument."""

SHAPES = st.lists(st.integers(0, 4), max_size=4).map(tuple)
DTYPES = st.sampled_from(["float32", "int32", "bool", "complex64", "uint8"])
HUGE = st.integers(10**12, 10**40)
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 9),
    st.floats(-1e6, 1e6),
    st.sampled_from([np.nan, np.inf, -np.inf]),
    st.text(max_size=4),
    st.binary(max_size=2),
    st.complex_numbers(),
    st.sampled_from([object(), len, int, SMALL, TINY]),
    st.integers(-3, 9).map(np.int64),
    st.floats(-2, 9, width=32).map(np.float32),
)
WRONG = st.one_of(
    SCALARS,
    st.lists(SCALARS, max_size=1),  # of a longer list one item is looked at, whichever
    st.lists(SCALARS, max_size=1).map(tuple),
    st.dictionaries(st.text(max_size=2), SCALARS, max_size=1),
    st.builds(np.ones, SHAPES, DTYPES),
    st.builds(jnp.ones, SHAPES, DTYPES),
    st.just(np.array(["a"])),
)


def annotation(name, argument):
    function = function_of(name)
    hints = typing.get_type_hints(
        function.__init__ if isinstance(function, type) else inspect.unwrap(function)
    )
    return hints.get(argument, typing.Any)


def is_of(value, hint):
    """Whether typeguard takes a value for the type of a signature; a bool is no number, NumPy's are."""
    kinds = typing.get_args(hint) or (hint,)
    if typing.get_origin(hint) is collections.abc.Callable:
        return callable(value)
    if isinstance(value, bool | np.bool_) and bool not in kinds:
        return False
    if isinstance(value, np.integer | np.floating):
        value = value.item()
    if isinstance(value, tuple) and value and isinstance(value[0], np.integer | np.floating):
        value = (value[0].item(),)
    if isinstance(value, np.ndarray) and jax.Array in kinds:
        value = jnp.ones(1)
    try:
        typeguard.check_type(
            value, hint, collection_check_strategy=typeguard.CollectionCheckStrategy.ALL_ITEMS
        )
    except typeguard.TypeCheckError:
        return False
    return True


def names(argument, message):
    """Whether a message names an argument: itself, or one of its words, and of a text the place."""
    words = re.sub("_[A-Z]+$|^num_", "", argument).split("_")
    if argument == "text":
        words = ["line"]
    return argument in message or any(word.rstrip("s") in message.lower() for word in words if len(word) > 2)


def outcome(name, argument, value):
    """ "right" or "named"; fails for anything else."""
    hint = annotation(name, argument)
    try:
        function_of(name)(**GOOD[name] | {argument: value})
    except (TypeError, ValueError) as error:
        assert names(argument, str(error)), f"{name}({argument}={value!r}): {error}"
        return "named"
    assert is_of(value, hint), f"{name}({argument}={value!r}) was taken, though it is no {hint}"
    return "right"


CHECKED = [(n, a) for n, a in ARGUMENTS if n not in SLOW and annotation(n, a) is not typing.Any]
COUNTS = [(n, a) for n, a in ARGUMENTS if n.startswith("schedule.") and a.startswith("num_")]


@pytest.mark.parametrize("name", GOOD)
def test_what_is_right_is_taken(name):
    function_of(name)(**GOOD[name])


def test_what_is_given_and_needed_is_told():
    with pytest.raises(
        TypeError, match=r"gpipe\(\) parameter num_ranks=2.5 violates type hint <class 'int'>"
    ):
        schedule.gpipe(2.5, 4)
    with pytest.raises(ValueError, match=r"combine: weights_TK must be of shape \[T, K\], got \[3\]"):
        parallel.combine(X, jnp.ones(3), HANDLE)
    with pytest.raises(
        ValueError, match=r"D is 3 in x_RD \[4, 3\] and 4 in w_GDF \[2, 4, 2\]; they must be equal"
    ):
        grouped_matmul(X, jnp.ones((2, 4, 2)), jnp.ones(2, jnp.int32))


def test_numpys_numbers_and_arrays_are_numbers_and_arrays():
    assert schedule.gpipe(np.int64(2), np.uint8(4)) == schedule.gpipe(2, 4)
    assert schedule.CostModel(F=np.float32(2), I=1) == schedule.CostModel(F=2.0)
    slots = parallel.plan_capacity(np.asarray(TOPK), np.int64(4)).slot_TK
    np.testing.assert_array_equal(slots, parallel.plan_capacity(TOPK, 4).slot_TK)


@settings(derandomize=True, max_examples=500, suppress_health_check=list(HealthCheck))
@given(st.sampled_from(CHECKED), WRONG)
def test_what_is_wrong_is_named_or_it_is_right(argument, value):
    outcome(*argument, value)


@settings(derandomize=True, max_examples=100)
@given(st.sampled_from(COUNTS), HUGE)
def test_counts_that_no_machine_can_hold_are_told_at_once(argument, value):
    outcome(*argument, value)


def main(minutes):
    """Draw for so many minutes, and print how many arguments were tried and what became of them."""
    seen, until = collections.Counter(), time.monotonic() + 60 * minutes

    @settings(max_examples=200, database=None, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.sampled_from(CHECKED), WRONG)
    def draw(argument, value):
        try:
            seen[outcome(*argument, value)] += 1
        except BaseException as error:
            seen["wrong"] += 1
            print(*argument, repr(value)[:60], type(error).__name__, str(error)[:200].replace("\n", " "))

    while time.monotonic() < until:
        draw()
    print(dict(seen))


if __name__ == "__main__":
    main(float(sys.argv[1]))
