"""The compiled program: what is copied, what runs unguarded, what it needs of memory."""

import functools

import jax
import jax.numpy as jnp
import pytest

from dualpipe_jax import Pipeline, PipelineModel, make_mesh, pipeline_value_and_grad, split_backward, staged
from dualpipe_jax.parallel.p2p import BESIDE_OTHERS
from dualpipe_jax.schedule import ALL_SCHEDULES, dualpipe, lower, one_f_one_b, zb_v
from tests import hlo
from tests.engine import models

RANKS, WIDTH, SIZE = 4, 32, 8
SCHEDULES = pytest.mark.parametrize("make", ALL_SCHEDULES, ids=lambda make: make.__name__)


def stage(params, x):
    """Wide layers, so that residuals are many times the stage's input."""
    for layer in params:
        x = x + jax.nn.gelu(x @ layer["up"]) @ layer["down"]
    return x


MODEL = PipelineModel(models.embed, stage, models.head_loss)


def parameters(num_stages, num_layers=3):
    key = jax.random.key(0)
    layer = {"up": (num_stages, WIDTH, 4 * WIDTH), "down": (num_stages, 4 * WIDTH, WIDTH)}
    stages = [
        {name: jax.random.normal(key, shape) for name, shape in layer.items()} for _ in range(num_layers)
    ]
    return {
        "embed": jnp.ones((models.VOCAB, WIDTH)),
        "stages": stages,
        "head": jnp.ones((WIDTH, models.VOCAB)),
    }


@functools.cache
def compiled(make, num_microbatches=8, size=SIZE, num_layers=3):
    schedule = make(RANKS, num_microbatches)
    params = parameters(schedule.placement.num_model_stages, num_layers)
    step = pipeline_value_and_grad(MODEL, schedule, make_mesh(RANKS, 1))
    return schedule, step.lower(params, *models.data(num_microbatches, size)).compile()


def pools_and_sums(schedule):
    """Shapes, as HLO prints them, of what must not be copied at every tick."""
    pipeline = Pipeline(staged(MODEL, schedule.placement.num_model_stages), schedule, make_mesh(RANKS, 1))
    given = parameters(schedule.placement.num_model_stages)
    params = {"stages": given["stages"], "shared": {"embed": given["embed"], "head": given["head"]}}
    inputs, targets = models.data(8, SIZE)
    state = pipeline.state(params, {"inputs": inputs, "targets": targets})
    held = [v for k, v in state.items() if k.split(".")[0] in ("residual", "stash")]
    held += [v for k, v in state.items() if k.startswith("own")]
    return {
        f"[{','.join(map(str, leaf.shape))}]"
        for leaf in jax.tree.leaves(held)
        if leaf.ndim > 2 or leaf.shape[0] > 8
    }


def plan_of(size=SIZE, num_layers=3):
    stages = parameters(1, num_layers)["stages"]
    params = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape[1:], p.dtype), stages)
    return split_backward(stage).trace(params, jax.ShapeDtypeStruct((size, models.SEQ, WIDTH), jnp.float32))


@pytest.mark.thin(4)
@SCHEDULES
def test_no_pool_and_no_sum_is_copied_in_a_loop(make):
    schedule, program = compiled(make)
    module = hlo.computations(program.as_text())
    held = pools_and_sums(schedule)
    bodies = hlo.loop_bodies(module)
    assert len(bodies) > 5, "the scan and its guards"
    copied = [
        (body, instruction.shape)
        for body in bodies
        for instruction in hlo.inside(module, body, enter_loops=True)
        if instruction.opcode in ("copy", "copy-start") and any(shape in instruction.shape for shape in held)
    ]
    assert not copied
    largest = SIZE * models.SEQ * 4 * WIDTH
    copies = [
        i for b in bodies for i in hlo.inside(module, b, True) if i.opcode == "copy" and i.elements > largest
    ]
    assert not copies, "nothing larger than one activation is copied either"


def test_the_sends_of_ticks_may_run_beside_other_collectives():
    """On GPU they would else wait for guards that hold all-to-alls. What is borrowed moves outside the scan."""
    schedule = dualpipe(RANKS, 8)
    params = parameters(schedule.placement.num_model_stages)
    step = pipeline_value_and_grad(MODEL, schedule, make_mesh(RANKS, 1))
    text = step.lower(params, *models.data(8, SIZE)).as_text()
    permutes = [line for line in text.splitlines() if "stablehlo.collective_permute" in line]
    beside = [line for line in permutes if all(f'{k} = "{v}"' in line for k, v in BESIDE_OTHERS.items())]
    assert len(beside) == len(lower(schedule).channels) == 4
    assert len(permutes) > len(beside)


@pytest.mark.thin(4)
@SCHEDULES
def test_no_stage_computation_outside_its_guard(make):
    _, program = compiled(make)
    module = hlo.computations(program.as_text())
    bodies = hlo.loop_bodies(module)
    heavy = {"dot", "tanh", "exponential", "convolution", "scatter"}
    scans = [b for b in bodies if any(i.opcode == "collective-permute" for i in hlo.inside(module, b, False))]
    assert len(scans) == 1
    unguarded = {i.opcode for i in hlo.inside(module, scans[0], enter_loops=False)} & heavy
    guarded = {i.opcode for i in hlo.inside(module, scans[0], enter_loops=True)} & heavy
    assert not unguarded
    assert {"dot", "tanh", "exponential"} <= guarded


def test_the_reader_sees_a_copy_and_an_unguarded_dot():
    """The two checks above can fail: the reader finds what a naive program holds."""

    def naive(pool, w):
        def tick(carry, i):
            pool, y = carry
            y = jnp.tanh(y @ w)
            old = pool
            pool = pool.at[i].set(y)
            return (pool, y + old.sum(0) + pool.sum(0)), None

        return jax.lax.scan(tick, (pool, pool[0]), jnp.arange(4))[0]

    text = jax.jit(naive).lower(jnp.ones((7, 16, 16)), jnp.ones((16, 16))).compile().as_text()
    module = hlo.computations(text)
    (body,) = set(hlo.loop_bodies(module))
    opcodes = {i.opcode for i in hlo.inside(module, body, enter_loops=False)}
    assert "dot" in opcodes and "tanh" in opcodes
    assert any(i.opcode == "copy" and "[7,16,16]" in i.shape for i in hlo.inside(module, body, True))


@pytest.mark.thin(3)
@pytest.mark.parametrize("make", [one_f_one_b, dualpipe, zb_v], ids=lambda make: make.__name__)
def test_program_does_not_grow_with_microbatches(make):
    """Compile time is flat because the program is: benchmarks/compile_time.py has the seconds."""
    sizes = [sum(map(len, hlo.computations(compiled(make, num)[1].as_text()).values())) for num in (16, 64)]
    assert sizes[1] <= 1.15 * sizes[0]


@pytest.mark.thin(2)
@pytest.mark.parametrize("make", [dualpipe, one_f_one_b], ids=lambda make: make.__name__)
def test_memory_is_what_the_pools_and_sums_need(make):
    """PP + 1 residual sets (with their inputs), stash, sums of gradients, mirrored parameters: and 10 %.

    A full backward holds one stash of its own while it works: XLA orders the weights' parts last. Not counting
    it the bound is missed, and with tanh for gelu DualPipe misses it even so: docs/engine.md has the figures.
    """
    size, num_layers = 64, 10
    schedule, program = compiled(make, 12, size, num_layers)
    plan, params = plan_of(size, num_layers), parameters(1, num_layers)

    def nbytes(tree):
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))

    num_local = len(schedule.placement.stages_on[0])
    residual_set = nbytes(plan.residuals_i) + nbytes(plan.residuals_w) + nbytes(plan.y)
    stash = (1 + lower(schedule).num_slots["stash"]) * nbytes(plan.stash)
    sums = num_local * nbytes(params["stages"]) + nbytes(params["embed"]) + nbytes(params["head"])
    mirrored = (num_local - 1) * nbytes(params["stages"])
    needed = (RANKS + (make is dualpipe)) * residual_set + stash + sums + mirrored
    assert program.memory_analysis().temp_size_in_bytes <= 1.1 * needed
