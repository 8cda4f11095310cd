"""Experts in any slots, some more than once: the model's outputs and gradients are those of the paper's formulas."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dualpipe_jax import Pipeline
from dualpipe_jax.balance import Placement
from dualpipe_jax.engine import PlacedStages
from dualpipe_jax.engine.reference import reference_value_and_grad
from dualpipe_jax.engine.stages import from_placed
from dualpipe_jax.parallel import EP, make_mesh
from dualpipe_jax.schedule import dualpipe, one_f_one_b
from models import tiny
from models.placement import count_once, expert_tables, map_experts, place_experts, placed_specs, sum_copies
from models.transformer import deepseek
from tests.models import plain
from tests.models.test_transformer import a_params, by_row, floats, quick, same_gradients
from tests.parallel.test_placement import tables

CONFIG = tiny(
    dim=16, num_layers=3, num_dense_layers=1, num_heads=2, q_lora_rank=0, kv_lora_rank=8, dense_hidden=16,
    expert_hidden=8, num_experts=8, top_k=2, num_groups=1, top_groups=1, vocab=32, num_mtp_layers=1,
)  # fmt: skip
ONE_LAYER = dataclasses.replace(CONFIG, num_layers=1, num_dense_layers=0, num_mtp_layers=0)
ALPHA = 0.05


def a_batch(shape):
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 32, (2, *shape)).astype(np.int32)
    valid = np.arange(shape[-1]) < rng.integers(4, shape[-1] + 1, (*shape[:2], 1))
    return {"inputs": tokens[0], "targets": tokens[1], "valid": valid}


@functools.cache
def wanted_from(config, plan, shape):
    """The paper's formulas on one device, which know neither slots nor copies."""
    model = deepseek(config, plan)
    run = functools.partial(plain.loss, model=model, mtp_weight=0.3, balance_factor=ALPHA)
    return quick(jax.value_and_grad(run, has_aux=True, allow_int=True))(
        a_params(config, plan), a_batch(shape)
    )


def in_model_order(grads, schedule):
    """Gradients as the engine gives them, without those of integers."""
    placed = grads["stages"]
    own = tuple({"layers": s["layers"], "routing": {"bias": s["routing"]["bias"]}} for s in placed.local)
    return grads | {"stages": from_placed(PlacedStages(own, placed.model_stages), schedule.placement)}


def logical(grads, table):
    """Of each expert the gradient that its first copy has; that all copies have the same is asserted."""

    def pick(leaf, routing):
        stages = []
        for held, experts in zip(routing["held"], np.asarray(leaf), strict=True):
            flat = held.reshape(-1)
            firsts = [int(np.flatnonzero(flat == e)[0]) for e in range(CONFIG.num_experts)]
            np.testing.assert_array_equal(experts, experts[firsts][flat])
            stages.append(experts[firsts])
        return np.stack(stages)

    return map_experts(pick, grads, {"stages": {"routing": table}})


@pytest.mark.parametrize(
    "schedule, num_devices, num_slots, options, shape",
    [
        (one_f_one_b(1, 2), 4, 3, {}, (2, 4, 8)),
        pytest.param(one_f_one_b(2, 3), 4, 2, {}, (3, 4, 8), marks=pytest.mark.slow),
        pytest.param(dualpipe(2, 4), 2, 5, {"dispatch": "capacity"}, (4, 4, 8), marks=pytest.mark.slow),
    ],
    ids=["one rank", "1f1b, no copies", "dualpipe, capacity"],
)
def test_outputs_and_gradients_are_those_without_a_placement(
    schedule, num_devices, num_slots, options, shape
):
    """One compiled program for all placements: tables are arguments. Dispatch has room for all."""
    config, plan = (ONE_LAYER, (1,)) if schedule.num_ranks == 1 else (CONFIG, (2, 1))
    model = deepseek(config, plan, ep_axis=EP, balance_factor=ALPHA, **options)
    mesh = make_mesh(schedule.num_ranks, num_devices)
    pipeline = Pipeline(model.staged, schedule, mesh, param_specs=placed_specs(model.param_specs, EP))
    (wanted, (terms, counts)), wanted_grads = wanted_from(config, plan, shape)

    def run(params, batch):
        params = pipeline.placed(params)
        (loss, report), grads = pipeline.value_and_grad(params, batch)
        summed = sum_copies(grads, params, mesh)
        counted = count_once(summed, params)
        norms = [
            jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(gs) if g.dtype == jnp.float32))
            for gs in (summed, counted)
        ]
        return loss, report, in_model_order(summed, schedule), norms

    compiled, place, params = quick(run), quick(place_experts), a_params(config, plan)
    for seed in (0, 1, 2):
        held = tables(model.layout.rows.max() + 1, CONFIG.num_experts, num_devices, num_slots, seed=seed)
        table = expert_tables(model.layout, held, CONFIG.num_experts, num_nodes=1 + seed % 2, near=seed < 2)
        loss, report, grads, norms = jax.device_get(compiled(place(params, table), a_batch(shape)))
        np.testing.assert_allclose(loss, wanted, rtol=1e-6)
        for name, term in terms.items():
            np.testing.assert_allclose(report.losses[name], term, rtol=1e-6, err_msg=name)
        np.testing.assert_array_equal(report.metrics["counts"], counts)
        assert report.metrics["dropped"] == 0
        loads = np.asarray(report.metrics["devices"])
        np.testing.assert_array_equal(loads.sum(-1), np.asarray(counts).sum(-1))
        if num_devices * num_slots == CONFIG.num_experts:
            told = Placement(held, CONFIG.num_experts).device_loads(counts)
            np.testing.assert_array_equal(loads, told)
        found = logical(grads, table)
        same_gradients(by_row(found, model.layout), by_row(wanted_grads, model.layout))
        whole = np.sqrt(sum(np.sum(np.square(g)) for _, g in floats(wanted_grads)))
        np.testing.assert_allclose(norms[1], whole, rtol=1e-5)
        assert num_devices * num_slots == CONFIG.num_experts or norms[0] > 1.001 * norms[1]
    assert compiled._cache_size() == 1


def test_tables_of_too_few_layers_are_refused():
    model = deepseek(CONFIG, (2, 1))
    with pytest.raises(
        ValueError, match=r"held is \[2, 4, 2\]; the model has 3 layers with experts, give \[3,"
    ):
        expert_tables(model.layout, tables(2, 8, 4, 2), 8)


@pytest.mark.parametrize("wrong, message", [(0.7, "held is float64"), (2**32, "held has expert 42949672")])
def test_tables_are_not_rounded_to_experts(wrong, message):
    model = deepseek(CONFIG, (2, 1))
    with pytest.raises(ValueError, match=message):
        expert_tables(model.layout, tables(3, 8, 4, 2) + wrong, 8)


@pytest.mark.slow
def test_eight_bits_know_no_placement():
    """What is rounded is a token's, wherever its experts lie: the same numbers as on one device with all of them."""
    shape, held = (2, 4, 8), tables(1, CONFIG.num_experts, 4, 3, seed=0)
    alone, model = (deepseek(ONE_LAYER, (1,), ep_axis=axis, payload="float8") for axis in (None, EP))
    params, batch = a_params(ONE_LAYER, (1,)), a_batch(shape)
    (wanted, report), wanted_grads = quick(reference_value_and_grad(alone.staged, num_parts=4))(params, batch)
    mesh = make_mesh(1, 4)
    specs = placed_specs(model.param_specs, EP)
    pipeline = Pipeline(model.staged, one_f_one_b(1, 2), mesh, param_specs=specs)
    table = expert_tables(model.layout, held, CONFIG.num_experts)
    placed = quick(place_experts)(params, table)
    (loss, found), grads = quick(pipeline.value_and_grad)(placed, batch)
    np.testing.assert_allclose(loss, wanted, rtol=1e-6)
    np.testing.assert_array_equal(found.metrics["counts"], report.metrics["counts"])
    summed = jax.device_get(quick(lambda grads, params: sum_copies(grads, params, mesh))(grads, placed))
    same_gradients(by_row(logical(summed, table), model.layout), by_row(wanted_grads, model.layout))
