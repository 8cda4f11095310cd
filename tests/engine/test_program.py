"""The compiled program: what is copied, what runs unguarded, what it needs of memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dualpipe_jax import Pipeline, PipelineModel, make_mesh, pipeline_value_and_grad, split_backward, staged
from dualpipe_jax.engine import tick
from dualpipe_jax.parallel.p2p import CONCURRENT_PERMUTE
from dualpipe_jax.schedule import (
    chimera,
    dualpipe,
    dualpipe_v,
    gpipe,
    hanayo,
    interleaved_1f1b_overlap,
    interleaved_zero_bubble,
    lower,
    one_f_one_b,
    zb_h1,
    zb_v,
)
from tests import hlo
from tests.engine import models

WIDTH, SIZE = 32, 8


def stage(params, x):
    """Wide layers, so that residuals are many times the stage's input."""
    for layer in params:
        x = x + jax.nn.gelu(x @ layer["up"]) @ layer["down"]
    return x


MODEL = PipelineModel(models.embed, stage, models.head_loss)


def parameters(num_stages, num_layers):
    shapes = {"up": (num_stages, WIDTH, 4 * WIDTH), "down": (num_stages, 4 * WIDTH, WIDTH)}
    stages = [{name: np.ones(shape, np.float32) for name, shape in shapes.items()} for _ in range(num_layers)]
    ends = {"embed": (models.VOCAB, WIDTH), "head": (WIDTH, models.VOCAB)}
    return {"stages": stages} | {name: np.ones(shape, np.float32) for name, shape in ends.items()}


def lowered(schedule, size=SIZE, num_layers=2):
    params = parameters(schedule.placement.num_model_stages, num_layers)
    step = pipeline_value_and_grad(MODEL, schedule, make_mesh(schedule.num_ranks, 1))
    return step.lower(params, *models.data(schedule.num_microbatches, size))


def pools_and_sums(schedule):
    """Shapes, as HLO prints them, of what must not be copied at every tick."""
    stages = schedule.placement.num_model_stages
    pipeline = Pipeline(staged(MODEL, stages), schedule, make_mesh(schedule.num_ranks, 1))
    given = parameters(stages, 2)
    params = {"stages": given["stages"], "shared": {"embed": given["embed"], "head": given["head"]}}
    inputs, targets = models.data(schedule.num_microbatches, SIZE)
    state = pipeline.state(params, {"inputs": inputs, "targets": targets})
    held = state.family("residual"), state.family("stash"), state.own
    return {
        f"[{','.join(map(str, leaf.shape))}]"
        for leaf in jax.tree.leaves(held)
        if leaf.ndim > 2 or leaf.shape[0] > 8
    }


def opcodes_of(module, conditional):
    return {i.opcode for branch in conditional.called.values() for i in hlo.inside(module, branch, False)}


# Whole backwards and halves; one stage a rank, rounds of them, waves, two pipes; with pairs and without.
QUICK = dualpipe, zb_v
SLOW = gpipe, zb_h1, interleaved_1f1b_overlap, interleaved_zero_bubble, hanayo, chimera, dualpipe_v
MAKES = [*QUICK, *(pytest.param(make, marks=pytest.mark.slow) for make in SLOW)]


@pytest.mark.parametrize("make", MAKES, ids=lambda make: make.__name__)
def test_nothing_large_is_copied_and_nothing_heavy_runs_unguarded(make):
    """Of all that a loop holds; and no stage is computed in the scan's body but inside a guard."""
    schedule = make(4, 8)
    module = hlo.computations(lowered(schedule).compile().as_text())
    bodies = hlo.loop_bodies(module)
    assert len(bodies) > 5, "the scan and its guards"
    copies = [i for b in bodies for i in hlo.inside(module, b, True) if i.opcode in ("copy", "copy-start")]
    held = pools_and_sums(schedule)
    assert held and not [i.shape for i in copies if any(shape in i.shape for shape in held)], "pools and sums"
    largest = SIZE * models.SEQ * 4 * WIDTH
    assert not [i for i in copies if i.opcode == "copy" and i.elements > largest], "more than an activation"

    heavy = {"dot", "tanh", "exponential", "convolution", "scatter"}
    scans = [b for b in bodies if any(i.opcode == "collective-permute" for i in hlo.inside(module, b, False))]
    assert len(scans) == 1
    branching = [i for i in hlo.inside(module, scans[0], False) if i.opcode == "conditional"]
    meeting = [i for i in branching if "collective-permute" in opcodes_of(module, i)]
    assert len(meeting) == 1, "permutes in two conditionals lose their order: see test_reloaded"
    unguarded = {i.opcode for i in hlo.inside(module, scans[0], enter_loops=False)} & heavy
    guarded = {i.opcode for i in hlo.inside(module, scans[0], enter_loops=True)} & heavy
    assert not unguarded
    assert {"dot", "tanh", "exponential"} <= guarded


def test_the_reader_sees_a_copy_and_an_unguarded_dot():
    """The checks above can fail: the reader finds what a naive program holds."""

    def naive(pool, w):
        def tick(carry, i):
            pool, y = carry
            y = jnp.tanh(y @ w)
            old = pool
            pool = pool.at[i].set(y)
            return (pool, y + old.sum(0) + pool.sum(0)), None

        return jax.lax.scan(tick, (pool, pool[0]), jnp.arange(4))[0]

    text = jax.jit(naive).lower(np.ones((7, 16, 16)), np.ones((16, 16))).compile().as_text()
    module = hlo.computations(text)
    (body,) = set(hlo.loop_bodies(module))
    opcodes = {i.opcode for i in hlo.inside(module, body, enter_loops=False)}
    assert "dot" in opcodes and "tanh" in opcodes
    assert any(i.opcode == "copy" and "[7,16,16]" in i.shape for i in hlo.inside(module, body, True))


def test_the_sends_of_ticks_may_run_beside_other_collectives():
    """On GPU they would else wait for guards that hold all-to-alls. What is borrowed moves outside the scan."""
    schedule = dualpipe(4, 8)
    permutes = [
        line for line in lowered(schedule).as_text().splitlines() if "stablehlo.collective_permute" in line
    ]
    beside = [line for line in permutes if all(f'{k} = "{v}"' in line for k, v in CONCURRENT_PERMUTE.items())]
    table = lower(schedule)
    assert len(table.channels) == 4 and len(beside) == sum(map(sum, table.together)) >= 4
    assert len(permutes) > len(beside)


@pytest.mark.thin(2)
@pytest.mark.parametrize("make", [dualpipe, zb_v], ids=lambda make: make.__name__)
def test_program_does_not_grow_with_microbatches(make):
    """Compile time is flat because the program is: benchmarks/compile_time.py has the seconds."""
    few, many = (lowered(make(4, num)).as_text().count("\n") for num in (16, 64))
    assert many <= 1.15 * few


@pytest.mark.slow
@pytest.mark.parametrize("make", [one_f_one_b, dualpipe], ids=lambda make: make.__name__)
def test_memory_is_what_the_pools_and_sums_need(make):
    """PP + 1 residual sets (with their inputs), stash, sums of gradients, mirrored parameters: and 10 %.

    A full backward holds one stash of its own while it works: XLA orders the weights' parts last. Not counting
    it the bound is missed (1.17 times), and with tanh for gelu DualPipe misses it even so (1.14 times).
    """
    size, num_layers, schedule = 64, 10, make(4, 12)
    params = parameters(1, num_layers)
    one = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape[1:], p.dtype), params["stages"])
    plan = split_backward(stage).trace(one, jax.ShapeDtypeStruct((size, models.SEQ, WIDTH), jnp.float32))

    def nbytes(tree):
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))

    num_local = len(schedule.placement.stages_on[0])
    residual_set = nbytes(plan.residuals_i) + nbytes(plan.residuals_w) + nbytes(plan.y)
    stash = (1 + lower(schedule).num_slots["stash"]) * nbytes(plan.stash)
    sums = num_local * nbytes(params["stages"]) + nbytes(params["embed"]) + nbytes(params["head"])
    mirrored = (num_local - 1) * nbytes(params["stages"])
    needed = (4 + (make is dualpipe)) * residual_set + stash + sums + mirrored
    compiled = lowered(schedule, size, num_layers).compile()
    assert compiled.memory_analysis().temp_size_in_bytes <= 1.1 * needed


def test_no_two_buffers_to_send_from_look_alike():
    """XLA for TPU makes one of two that do, and copies it at every tick: read from its program of a pair."""
    leaf, other = (jax.ShapeDtypeStruct((SIZE, WIDTH), dtype) for dtype in (jnp.float32, jnp.int32))
    made = jax.make_jaxpr(lambda: tick.empty_payloads({"a": leaf, "b": leaf, "c": other}, ("y", "dx")))()
    empty = [e.outvars[0].aval for e in made.eqns if e.primitive.name == "empty"]
    assert len(empty) == 5 == len({(aval.shape, aval.dtype) for aval in empty})
    assert [aval.shape for aval in made.out_avals] == [(SIZE, WIDTH)] * 5
