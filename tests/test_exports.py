"""The public names: a change here is a change for users, and belongs in the changelog."""

import importlib
import inspect

import pytest

import dualpipe_jax
import dualpipe_jax.balance
import dualpipe_jax.schedule

FRONT_DOOR = """
At Out Pipeline PipelineModel PlacedStages StagedModel gpu_process_environment make_mesh pipeline_apply pipeline_loss
pipeline_value_and_grad place_stages recommended_compiler_options reference_loss
reference_value_and_grad sequential_loss sequential_value_and_grad split_backward split_vjp staged unplace_stages
"""
SCHEDULE = """
ALL_SCHEDULES Action Candidate CostModel MemoryModel Op Optimum Placement Schedule ScheduleError Slot TickTable
Timeline chimera choose dualpipe dualpipe_v format_grid from_json from_torch_csv gpipe hanayo html_page
interleaved_1f1b interleaved_1f1b_overlap interleaved_zero_bubble limit_stash looped_bfs lower lower_bound one_f_one_b
optimum parse_grid plot search simulate to_chrome_trace to_json to_torch_csv v_half v_min validate zb_h1 zb_h2 zb_v
"""
BALANCE = """
Copies Layout LoadTracker Outlook Placement balance bound_of count_traffic is_due outlook plot random_traffic
rebalance_experts
"""


@pytest.mark.parametrize(
    ("room", "names"),
    [(dualpipe_jax, FRONT_DOOR), (dualpipe_jax.schedule, SCHEDULE), (dualpipe_jax.balance, BALANCE)],
)
def test_public_names(room, names):
    assert sorted(room.__all__) == names.split()


ROOMS = ["schedule", "balance", "split", "pair", "parallel", "engine", "inspect", "pods"]


@pytest.mark.parametrize("room", ["dualpipe_jax", *(f"dualpipe_jax.{room}" for room in ROOMS)])
def test_what_is_public_says_what_it_is(room):
    """Public functions and classes, their methods too; what is private says what its name does not."""
    exported = (
        getattr(importlib.import_module(room), name) for name in importlib.import_module(room).__all__
    )
    silent = []
    for thing in exported:
        if inspect.isclass(thing):
            fields = getattr(thing, "__dataclass_fields__", ())
            own = {
                f"{thing.__name__}.{n}": m for n, m in vars(thing).items() if n[0] != "_" and n not in fields
            }
            callables = {name: m for name, m in own.items() if callable(m) or isinstance(m, property)}
            silent += [
                name for name, member in {thing.__name__: thing, **callables}.items() if not member.__doc__
            ]
        elif inspect.isfunction(thing) and not thing.__doc__:
            silent.append(thing.__name__)
    assert not silent


def test_a_name_that_is_not_there():
    with pytest.raises(AttributeError, match="has no attribute 'dualpipes'"):
        dualpipe_jax.dualpipes  # noqa: B018  the access is the test
