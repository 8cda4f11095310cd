"""A step as shapes: what is counted against what lies on devices, and what is compiled against what is trained."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.errors import JaxRuntimeError
from jax.tree_util import keystr

import models
from dualpipe_jax.engine import Report
from dualpipe_jax.parallel import EP, make_mesh
from dualpipe_jax.pods import Plan, ahead
from dualpipe_jax.pods.dryrun import compile_with, draw, lower_part
from dualpipe_jax.pods.program import Blueprint, abstract_mesh
from dualpipe_jax.schedule import dualpipe, dualpipe_v, interleaved_1f1b_overlap, lower, one_f_one_b
from dualpipe_jax.schedule.lowering.unit_key import SCOPE
from train.pods.training import step_program
from train.state.layout import Layout
from train.state.sharing import shard_further
from train.step import make_optimizer, make_update

NUM_PP, NUM_EP, MICROBATCHES, SIZE, SEQ = 2, 2, 4, 4, 16


def numbers_of(stages=NUM_PP, dtype=jnp.float32):
    """A layer for each stage, and experts in two at least."""
    return models.byte(num_layers=max(3, stages), num_dense_layers=1, compute_dtype=dtype)


@functools.cache
def model_of(make, dtype=jnp.float32):
    schedule = make(NUM_PP, MICROBATCHES)
    stages = schedule.placement.num_model_stages
    numbers = numbers_of(stages, dtype)
    return models.deepseek(numbers, stages, ep_axis=EP, dispatch="capacity", capacity_factor=1.0)


@functools.cache
def blueprint(
    make=dualpipe, abstract=False, dtype=jnp.float32, shard="nothing", moments="float32", **options
):
    """Tracing the model for one takes a second: tests share these."""
    mesh = abstract_mesh(NUM_PP, NUM_EP) if abstract else make_mesh(NUM_PP, NUM_EP)
    schedule = make(NUM_PP, MICROBATCHES)
    optimizer = make_optimizer(1e-3, clip=1.0, weight_decay=0.1, moments=moments)
    layout = Layout(model_of(make, dtype), schedule, mesh, optimizer, shard)
    return Blueprint(step_program(layout, (MICROBATCHES, SIZE, SEQ)), schedule, mesh, **options)


def users(**changes):
    """Blocks without experts, on four ranks."""
    plan = Plan("tests.pods.own_program:blocks", pp=4, ep=1, microbatches=16)
    return ahead.memory_by_kind(draw(dataclasses.replace(plan, **changes), None, None))


OPTIMIZER = make_optimizer(1e-3, clip=1.0, weight_decay=0.1)


@functools.cache
def state(shard="nothing"):
    b = blueprint()
    return Layout(model_of(dualpipe), b.schedule, b.mesh, OPTIMIZER, shard).init(jax.random.key(0))


def on_one_device(tree):
    """Bytes of real arrays on the device that holds the most."""
    device = jax.devices()[0]
    shards = [shard for leaf in jax.tree.leaves(tree) for shard in leaf.addressable_shards]
    return sum(shard.data.nbytes for shard in shards if shard.device == device)


def test_parameters_and_optimizer_are_counted_as_they_lie():
    kinds, real = ahead.memory_by_kind(blueprint()), state()
    assert kinds["stages"] == kinds["mirrored"] == on_one_device(real.params["stages"])
    assert kinds["shared"] == on_one_device(real.params["shared"])
    assert kinds["optimizer"] == on_one_device(real.opt_state)
    assert kinds["cast"] == 0


@pytest.mark.slow
def test_stored_in_parts_they_are_counted_as_they_lie():
    """Every matrix lies over ep and what is shared over pp, too; only gathered ones are there twice."""
    kinds, real = ahead.memory_by_kind(blueprint(shard="parameters")), state(shard="parameters")
    whole = ahead.memory_by_kind(blueprint())
    assert kinds["stages"] == on_one_device(real.params["stages"]) < 0.8 * whole["stages"]
    assert kinds["shared"] == on_one_device(real.params["shared"]) < 0.4 * whole["shared"]
    assert kinds["optimizer"] == on_one_device(real.opt_state) < 0.7 * whole["optimizer"]
    for kind in ("mirrored", "gradients", "residuals", "stash"):
        assert kinds[kind] == whole[kind], kind
    assert kinds["cast"] == whole["stages"] + whole["shared"] - once(real.params)


def once(params):
    """Bytes on a device of what is stored as it is used: norms, what the router knows, and experts, over ep already."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    names = [(keystr(path, simple=True, separator="/"), leaf) for path, leaf in leaves]
    same = ("norm", "/experts/", "/routing/")
    return on_one_device([leaf for name, leaf in names if any(word in name for word in same)])


def test_what_is_cast_once_a_step_is_counted():
    """In bfloat16 a matrix has a copy of half its bytes, and no other in the second pipe."""
    b = blueprint(dtype=jnp.bfloat16)
    kinds = ahead.memory_by_kind(b)
    stages = jax.tree_util.tree_leaves_with_path(b.params["stages"].local)
    matrices = ahead.nbytes([leaf for path, leaf in stages if {"kernel", "experts"} & keys(path)])
    shared = jax.tree_util.tree_leaves_with_path(b.params["shared"])
    others = [leaf for path, leaf in shared if "kernel" in keys(path) and "lm_head" not in keys(path)]
    assert kinds["cast"] == (matrices + ahead.nbytes(others)) / 2 > 0
    assert kinds["mirrored"] == kinds["stages"] - matrices / 2


def keys(path):
    return {getattr(key, "key", None) for key in path}


def test_what_is_drawn_of_the_state_is_the_trainers():
    whole, b = state(), blueprint()
    for real, drawn in ((whole.params, b.params), (whole.opt_state, b.update.state)):
        assert jax.tree.structure(real) == jax.tree.structure(drawn)
        for a, b in zip(jax.tree.leaves(real), jax.tree.leaves(drawn), strict=True):
            assert (a.shape, a.dtype) == (b.shape, b.dtype)
            assert a.sharding.is_equivalent_to(b.sharding, a.ndim)


@pytest.mark.parametrize("make", [dualpipe, dualpipe_v, one_f_one_b])
def test_slots_are_counted_from_the_tables_numbers(make):
    b = blueprint(make)
    kinds = ahead.memory_by_kind(b)
    assert kinds["mirrored"] == (kinds["stages"] if make is dualpipe else 0) and kinds["cast"] == 0

    def sets(name):
        return sum(ahead.nbytes(held) for pool, held in b.state.pools.items() if pool.split(".")[0] == name)

    assert kinds["residuals"] == sets("residual") > 0
    assert kinds["stash"] == sets("stash") and (kinds["stash"] > 0) == (make is not one_f_one_b)
    activation = SIZE // NUM_EP * SEQ * models.byte().dim * 4
    slots = lower(b.schedule).num_slots
    assert kinds["boundary"] == (slots["x"] + slots["dy"] + 2) * activation
    sums = kinds["stages"] + kinds["mirrored"] + kinds["shared"]
    routing = ahead.nbytes([stage["routing"] for stage in b.params["stages"].local])
    assert kinds["gradients"] <= sums
    if not (model_of(make).layout.rows < 0).any():  # what no stage of a rank uses has no sum
        assert sums - 2 * routing <= kinds["gradients"]


def test_nothing_needs_devices_to_be_counted():
    assert ahead.memory_by_kind(blueprint(abstract=True)) == ahead.memory_by_kind(blueprint())


def test_more_microbatches_need_no_more_slots():
    few, many = users(), users(microbatches=64)
    assert few.pop("batch") < many.pop("batch") and few == many


@pytest.mark.slow
def test_the_compiled_step_takes_the_arguments_that_were_counted():
    b = blueprint(fuse_pairs=False)
    memory = ahead.lower_step(b).compile().memory_analysis()
    kinds = ahead.memory_by_kind(b)
    step_and_tokens, state = 4 + ahead.nbytes(b.batch), kinds["stages"] + kinds["shared"] + kinds["optimizer"]
    assert memory.argument_size_in_bytes == state + step_and_tokens
    assert memory.alias_size_in_bytes >= state, "donated"


def test_moments_and_sums_in_bfloat16_take_half_the_room():
    narrow = ahead.memory_by_kind(blueprint(moments="bfloat16", gradient_sums="bfloat16"))
    wide = ahead.memory_by_kind(blueprint())
    count = 4  # how many steps Adam has made
    assert narrow.pop("optimizer") == (wide.pop("optimizer") - count) // 2 + count
    assert narrow.pop("gradients") == wide.pop("gradients") // 2
    assert narrow == wide


@pytest.mark.slow
def test_moments_that_are_shared_out_change_no_step():
    real = state()
    shared = real._replace(opt_state=jax.device_put(real.opt_state, shardings(real.opt_state)))
    whole = on_one_device(real.opt_state)  # experts, embedding and head lie over ep already
    assert on_one_device(shared.opt_state) < 0.65 * whole
    results = []
    for start in (real, shared):
        update = make_update(slopes, OPTIMIZER, 1e-3, start)
        for _ in range(2):
            start, _ = update(jax.tree.map(jnp.copy, start), {})
        results.append(start)
    for a, c in zip(jax.tree.leaves(results[0].params), jax.tree.leaves(results[1].params), strict=True):
        np.testing.assert_allclose(a, c, rtol=1e-6, atol=1e-8)
        assert a.sharding.is_equivalent_to(c.sharding, a.ndim)
    old, new = jax.tree.leaves(shared.opt_state), jax.tree.leaves(results[1].opt_state)
    assert all(a.sharding.is_equivalent_to(c.sharding, a.ndim) for a, c in zip(old, new, strict=True))


def slopes(params, batch):
    """Stands in for the engine: gradients that depend on params, and an even load."""
    del batch
    gradients = jax.tree.map(lambda p: jnp.sin(9 * p) if jnp.issubdtype(p.dtype, jnp.floating) else p, params)
    bias = params["stages"].local[0]["routing"]["bias"]
    counts = jnp.ones((numbers_of().num_moe_layers, bias.shape[-1]), jnp.int32)
    report = Report({"lm": jnp.float32(0)}, {"counts": counts, "dropped": jnp.int32(0)}, jnp.int32(0))
    return (jnp.float32(0), report), gradients


def shardings(opt_state):
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), opt_state)
    return jax.tree.map(lambda a: shard_further(a).sharding, shapes)


def test_arrays_that_no_loop_should_copy():
    held = ahead.held_arrays(blueprint())
    width = models.byte().dim
    assert f"f32[256,{width // NUM_EP}]" in held, "the embedding's sum"
    slots = max(pool[0].shape[0] for pool in blueprint().state.family("residual").values())
    assert slots > 1 and any(name.startswith(f"f32[{slots},") for name in held)
    assert ahead.array_name("bf16", (1, 5, 1, 8)) == "bf16[5,8]"


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int16", "bfloat16", "float16", "float8_e4m3fn"])
def test_dtypes_are_named_as_in_compiled_programs(dtype):
    repeat = jax.jit(lambda x: jnp.broadcast_to(x, (3, 8)))
    text = repeat.lower(jax.ShapeDtypeStruct((8,), jnp.dtype(dtype))).compile().as_text()
    assert f" {ahead.hlo_dtype(jnp.dtype(dtype))}[3,8]{{" in text


@pytest.mark.parametrize("how", [{}, {"dtype": jnp.bfloat16}, {"shard": "parameters"}])
def test_sizes_of_a_ranks_share_are_those_of_the_slots(how):
    b = blueprint(**how)
    kinds, sizes = ahead.memory_by_kind(b), ahead.rank_memory(b)
    slots = lower(blueprint().schedule).num_slots
    assert (slots["x"] + slots["dy"] + 2) * sizes.boundary == kinds["boundary"]
    others = "residuals", "stash", "boundary"
    assert 2 * sizes.parameters + sizes.fixed == sum(kinds[kind] for kind in kinds if kind not in others)
    one, two = (ahead.rank_memory(blueprint(make)) for make in (dualpipe, dualpipe_v))
    assert two.boundary == one.boundary


@pytest.mark.parametrize("name", ["dualpipe", "zb_v"])
def test_a_ranks_share_is_that_of_most_stages(name):
    """The last of these stages keeps 16 bytes more than others, in one slot: its backward follows its forward."""
    b = draw(Plan("tests.pods.own_program:blocks", pp=4, ep=1, microbatches=16, schedule=name), None, None)
    kinds, sizes = ahead.memory_by_kind(b), ahead.rank_memory(b)
    slots, of = lower(b.schedule).num_slots, sizes.for_schedule(b.schedule)
    assert of.residual_w > 0 and kinds["stash"] == slots["stash"] * of.stash > 0
    assert (
        kinds["residuals"] - 16 == slots["residual_w"] * of.residual_w + slots["residual_i"] * of.residual_i
    )


def test_fewer_stashes_take_less_memory_and_nothing_else():
    kinds = [users(max_stash=most) for most in (None, 1, 0)]
    whole, one, none = (k.pop("stash") for k in kinds)
    assert whole > one > none
    assert kinds[0] == kinds[1] == kinds[2]


def test_residuals_of_more_stages_a_rank_are_counted():
    """By hand: rank 0 of 4 has (v + 1) x 4 stages' activations live, each of these blocks' size; a spare slot aside."""
    two, four = (
        users(schedule="interleaved_1f1b_overlap", stages_per_rank=v)["residuals"] for v in (None, 4)
    )
    assert four / two == pytest.approx((5 * 4) / (3 * 4), rel=0.04)


def test_only_interleaved_schedules_take_stages_a_rank():
    message = r"dualpipe takes no --stages-per-rank; interleaved_1f1b, .* can"
    with pytest.raises(ValueError, match=message):
        Plan(stages_per_rank=4).make_schedule()
    plan = Plan(schedule="interleaved_1f1b_overlap", stages_per_rank=4, pp=2, microbatches=8)
    assert plan.make_schedule() == interleaved_1f1b_overlap(2, 8, 4)


def test_a_negative_number_of_stashes_is_refused():
    with pytest.raises(ValueError, match="--max-stash -1: must not be negative"):
        Plan(max_stash=-1).check()


def test_of_the_usual_units_there_is_one_of_each_op():
    plan = Plan("tiny", schedule="dualpipe_v", pp=2, ep=2, microbatches=8, microbatch_size=2, sequence=16)
    text = lower_part("usual", draw(plan, None, jax.devices()[:4])).as_text(debug_info=True)
    ops = sorted(scope.split("/")[0] for scope in set(re.findall(rf"({SCOPE})/(?:while|branch)", text)))
    assert ops == ["backward", "backward_input", "backward_weight", "forward", "pair"]


class Lowered:
    """A program of which the compiler says something until it has been given an option."""

    def __init__(self, message, mends):
        self.message, self.mends, self.asked = message, mends, []

    def compile(self, options):
        self.asked.append(options)
        if self.mends in options:
            return "compiled"
        raise JaxRuntimeError(self.message)


def test_where_xla_finds_no_tiles_all_products_are_cublas():
    said, given = [], {"xla_gpu_autotune_level": "0"}
    lowered = Lowered("INTERNAL: Couldn't find output tile sizes that satisfy", "xla_gpu_enable_triton_gemm")
    compiled, options = compile_with(lowered, given, said.append)
    assert compiled == "compiled" and lowered.asked == [given, options]
    assert options == given | {"xla_gpu_enable_triton_gemm": "False"}
    assert said == ["compiling again: XLA finds no tiles for one of its products, so all are cuBLAS'"]


@pytest.mark.parametrize(
    "message", ["RESOURCE_EXHAUSTED: 99 GiB", "INTERNAL: Couldn't find output tile sizes"]
)
def test_what_is_refused_for_another_reason_or_again_is_not_tried_once_more(message):
    given = {} if "99" in message else {"xla_gpu_enable_triton_gemm": "False"}
    lowered = Lowered(message, "nothing")
    with pytest.raises(JaxRuntimeError, match=message):
        compile_with(lowered, given, print)
    assert lowered.asked == [given]
