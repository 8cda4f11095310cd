"""Layers on stages: balanced, none forgotten, none run in vain."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dualpipe_jax import At
from dualpipe_jax.schedule import dualpipe, dualpipe_v, interleaved_1f1b, one_f_one_b
from models.config import tiny, v2, v2_lite, v3
from models.plan import PAPER, Costs, lay_out, layer_plan, matmul_costs, stage_times
from models.transformer import deepseek
from tests.jaxprs import equations

V3 = v3(num_mtp_layers=1)


def rank_times(config, plan, schedule, costs):
    """Of each rank, by the stages that the schedule puts there."""
    times = stage_times(config, plan, costs)
    placement = schedule.placement
    busy = np.zeros(1 + max(map(max, placement.pipes)))
    for pipe in placement.pipes:
        for stage, rank in enumerate(pipe):
            busy[rank] += times[stage]
    return busy


def every_plan(num_layers, num_stages):
    """All that give each stage between the ends a layer, if there are so many."""
    least = [0, *[int(num_layers >= num_stages - 2)] * (num_stages - 2), 0]
    for cuts in itertools.combinations_with_replacement(range(num_layers + 1), num_stages - 1):
        shares = np.diff([0, *cuts, num_layers])
        if np.all(shares >= least):
            yield tuple(int(share) for share in shares)


@pytest.mark.parametrize("stages", [16, dualpipe(16, 64)])
def test_v3_on_16_stages_is_the_papers(stages):
    """The embedding and 3 dense layers; 14 times 4; 2, the module and the heads: four units each."""
    plan = layer_plan(V3, stages, PAPER)
    assert plan == (3, *(4,) * 14, 2)
    assert stage_times(V3, plan, PAPER) == [4.0] * 16
    layout = lay_out(V3, plan)
    assert layout.kinds == ("first", *("middle",) * 14, "last")
    assert layout.contents[0].dense == range(3) and layout.contents[0].num_moe == 0
    assert layout.rows.shape == (16, 4) and layout.rows[-1].tolist() == [56, 57, 58, -1]


def test_no_other_plan_has_a_less_busy_rank():
    rng = np.random.default_rng(0)
    schedules = one_f_one_b(4, 8), dualpipe(4, 8), dualpipe_v(2, 6), interleaved_1f1b(2, 4, 2)
    for n in range(60):
        schedule, num_layers = schedules[n % 4], int(rng.integers(2, 10))
        costs = Costs(
            *(int(rng.integers(least, most)) for least, most in ((0, 5), (1, 5), (1, 5), (1, 5), (0, 7)))
        )
        config = tiny(
            num_layers=num_layers,
            num_dense_layers=min(int(rng.integers(0, 4)), num_layers - 1),
            num_mtp_layers=int(rng.integers(0, 3)),
        )
        plan = layer_plan(config, schedule, costs)
        assert sum(plan) == num_layers and len(plan) == 4 and min(plan[1:-1]) >= 1
        best = min(rank_times(config, other, schedule, costs).max() for other in every_plan(num_layers, 4))
        found = rank_times(config, plan, schedule, costs).max()
        assert found == pytest.approx(best), (config, schedule, costs)


@pytest.mark.parametrize("num_layers", [2, 3, 4, 5])
def test_no_other_plan_of_fewer_layers_than_stages_has_a_less_busy_rank(num_layers):
    schedule, config = interleaved_1f1b(2, 4, 4), tiny(num_layers=num_layers, num_dense_layers=1)
    for costs in Costs(dense=2, head=3), Costs(embed=0, moe=3, head=1):
        plan = layer_plan(config, schedule, costs)
        assert sum(plan) == num_layers and len(plan) == 8
        best = min(rank_times(config, other, schedule, costs).max() for other in every_plan(num_layers, 8))
        assert rank_times(config, plan, schedule, costs).max() == best, (plan, costs)


def test_v3_on_64_stages_leaves_some_to_the_head():
    """61 layers: the last stage has the head, and the three that have none stand on its rank and that beside it."""
    plan = layer_plan(v3(), interleaved_1f1b(16, 32, 4))
    assert [stage for stage, share in enumerate(plan) if not share] == [47, 62, 63] and max(plan) == 1


def test_every_layer_has_one_place():
    rng = np.random.default_rng(0)
    for _ in range(100):
        plan = rng.integers(0, 5, rng.integers(1, 7)).tolist()
        num_dense, num_mtp = int(rng.integers(0, 4)), int(rng.integers(0, 3))
        if sum(plan) <= num_dense:
            plan.append(num_dense + 1)
        num_layers = sum(plan)
        config = tiny(num_layers=num_layers, num_dense_layers=num_dense, num_mtp_layers=num_mtp)
        layout, case = lay_out(config, plan), f"{plan} {num_dense} {num_mtp}"
        assert [layer for c in layout.contents for layer in c.dense] == list(range(num_dense)), case
        rows = layout.rows[layout.rows >= 0]
        np.testing.assert_array_equal(rows, np.arange(num_layers - num_dense + num_mtp), err_msg=case)
        for stage, content in enumerate(layout.contents):
            assert len(content.dense) + content.num_moe == plan[stage], case
            assert (layout.rows[stage] >= 0).sum() == content.num_moe + (num_mtp if content.last else 0), case
        assert all(layout.rows[layout.slot_of(row)] == row for row in rows), case
        by_name = {}
        for name, content in zip(layout.kinds, layout.contents, strict=True):
            assert by_name.setdefault(name, content) == content, case


def test_kinds_are_named_by_content_where_it_differs():
    config = tiny(num_layers=8, num_dense_layers=3)
    assert lay_out(config, (1, 3, 2, 2)).kinds == ("first", "middle_dense_1_to_2_1", "middle_2", "last")
    assert lay_out(config, (8,)).kinds == ("only",)


def test_kinds_alike_trace_alike():
    """Equation by equation as JAX traces them; a stage with another number of layers is another program."""
    config, plan = tiny(num_layers=10, num_dense_layers=5), (1, 1, 2, 1, 3, 2)
    layout, model = lay_out(config, plan), deepseek(config, plan)
    dense_1, both, dense_3, deep = layout.kinds[1:-1]
    assert layout.alike == {dense_3: dense_1} == model.staged.alike
    params = jax.eval_shape(model.init, jax.random.key(0))
    own = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), params["stages"])
    x, word = jnp.zeros((2, 8, config.dim), config.compute_dtype), jnp.zeros((2, 8), jnp.int32)
    at = At({"inputs": word, "targets": word}, jnp.int32(0), jnp.int32(0), None)

    def traced(kind):
        jaxpr = jax.make_jaxpr(model.staged.kinds[kind])(own, params["shared"], x, at).jaxpr
        return [
            (*around, eqn.primitive.name, *(var.aval for var in (*eqn.invars, *eqn.outvars)))
            for around, eqn in equations(jaxpr)
        ]

    assert traced(dense_3) == traced(dense_1)
    assert len({len(traced(kind)) for kind in (dense_1, both, deep)}) == 3


@pytest.mark.parametrize("config, billions", [(v3(), 37.5), (v2_lite(), 2.66), (v2(), 21.4)])
def test_matmuls_are_priced_by_the_published_active_parameters(config, billions):
    """Two FLOPs a parameter and token; at a sequence of no length attention itself is free."""
    total = sum(stage_times(config, [config.num_layers], matmul_costs(config, 0)))
    active = total / 2e9 + config.vocab * config.dim / 1e9
    assert active == pytest.approx(billions, rel=5e-3)


@pytest.mark.parametrize(
    "plan, message",
    [
        ((4, 4), "its sum is 8, the layers are 9, dense ones included.*See layer_plan"),
        ((10, -1), "none can have fewer than 0 layers"),
        ((), "it needs a stage at least"),
    ],
)
def test_plans_that_do_not_add_up_are_refused(plan, message):
    with pytest.raises(ValueError, match=message):
        lay_out(tiny(), plan)


def test_ranks_without_layers_are_refused():
    with pytest.raises(
        ValueError, match="on 12 ranks need a layer on each rank.* there are 9; from 1 to 11 ranks"
    ):
        layer_plan(tiny(), 12)
    with pytest.raises(ValueError, match="all 1 layers are dense"):
        lay_out(tiny(num_layers=1), (1,))
