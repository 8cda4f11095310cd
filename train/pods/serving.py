"""The layers of a serving step as shapes: prefill or decode on all devices of a target, compiled and analysed.

The settings are those of DeepSeek's published profile data: for prefill 16,384 tokens per device in prompts
of 4096, for decode 128 requests per device with 4096 positions each; the experts of a layer are sharded over
all devices.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import models
from dualpipe_jax.inspect.target import Target
from dualpipe_jax.parallel import EP, make_mesh
from dualpipe_jax.pods import ahead
from dualpipe_jax.pods.dryrun import compile_ahead, describe, platform_of
from dualpipe_jax.pods.plan import Plan
from dualpipe_jax.pods.readings import read, totals
from dualpipe_jax.pods.request import Request
from dualpipe_jax.pods.results import Answer, Compiled
from dualpipe_jax.pods.units import unit_of
from dualpipe_jax.schedule.lowering.unit_key import UnitKey
from models.decode import Decoder, Rows, decoder, init_cache
from models.decode.experts import weight_specs
from models.decode.programs import BLOCKS, ROWS, in_one_batch, in_two_microbatches, jit_step
from train.model import check_eight_bits, in_precision, named_config

SERVING_STEPS = "prefill", "decode"
"""The steps of serving that can be compiled."""

PREFILL_TOKENS, DECODE_REQUESTS = 16384, 128
"""The tokens of a prefill and the requests of a decode step per device, both microbatches together."""

NUM_LAYERS, BLOCK_SIZE = 4, 64
"""The number of layers that are compiled by default, all with experts, and the positions of a block of the
cache."""

MICROBATCH_NAMES = {"forward": ("microbatch A", "A"), "backward": ("microbatch B", "B")}
"""The names of the inspector's two directions here: the first half of the rows and the second."""

Tree = Any


@dataclasses.dataclass(frozen=True)
class ServingStep:
    """A step of serving on a mesh.

    Attributes:
      what: the kind of step, one of ``SERVING_STEPS``.
      config: the model's configuration.
      model: the model's functions.
      mesh: the mesh, with the axis "ep".
      num_rows: the number of requests per device.
      num_tokens: the number of new tokens of a row.
      table_size: the number of blocks of a row.
    """

    what: str
    config: models.Config
    model: Decoder
    mesh: Mesh
    num_rows: int
    num_tokens: int
    table_size: int


def study(
    request: Request, target: Target, devices: Sequence[Any] | None, say: Callable[[str], None]
) -> Answer:
    """Build a step of serving, compile it for the target, and return what the compiler made of it.

    Raises:
      ValueError: the options do not fit together or the target.
    """
    assert devices is not None
    say(f"drawing {request.compile}")
    step = build_step(request, target, devices)
    actual_plan = dataclasses.replace(request.plan, ep=step.mesh.shape[EP])
    return Answer(describe(target), actual_plan, compiled=compile_and_read(request, step, target, say))


def build_step(request: Request, target: Target, devices: Sequence[Any]) -> ServingStep:
    """Find the sizes of the step and build its model.

    Raises:
      ValueError: the options do not fit together or the target.
    """
    plan, what = request.plan, request.compile
    plan.check()
    config = serving_config(plan)
    if config.num_experts % len(devices):
        raise ValueError(
            f"--target {target}: {len(devices)} devices do not share {config.num_experts} experts equally"
        )
    check_eight_bits(plan, devices[0])
    if plan.sequence % BLOCK_SIZE:
        raise ValueError(f"--sequence {plan.sequence}: must be a multiple of {BLOCK_SIZE}")
    num_rows = request.requests or (
        DECODE_REQUESTS if what == "decode" else max(2, PREFILL_TOKENS // plan.sequence)
    )
    if num_rows % 2:
        raise ValueError(f"--requests {num_rows}: two microbatches must share them equally")
    model = decoder(
        config,
        dispatch=models.Dispatch(plan.dispatch, plan.room, EP, plan.dispatch_payload),
        kernels=models.Kernels(plan.attention, plan.matmul),
        fresh=what == "prefill",
        platform=platform_of(target),
    )
    num_tokens = 1 if what == "decode" else plan.sequence
    mesh = make_mesh(1, len(devices), devices)
    return ServingStep(what, config, model, mesh, num_rows, num_tokens, plan.sequence // BLOCK_SIZE)


def serving_config(plan: Plan) -> models.Config:
    """The model's configuration with a few layers, none of which is dense unless that is asked for."""
    changes = {"num_dense_layers": 0} | plan.changes
    return in_precision(named_config(plan.model, plan.layers_per_stage or NUM_LAYERS, changes), plan)


def lower(step: ServingStep, *, overlap: bool) -> Any:
    """Lower the layers of a step: in two microbatches that overlap, or in one of all rows."""
    mesh, num_devices = step.mesh, step.mesh.shape[EP]

    def abstract_arrays(tree: Tree, specs: Any) -> Tree:
        if isinstance(specs, PartitionSpec):
            specs = jax.tree.map(lambda _: specs, tree)
        return jax.tree.map(
            lambda leaf, spec: jax.ShapeDtypeStruct(
                leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec)
            ),
            tree,
            specs,
        )

    params = jax.eval_shape(models.deepseek(step.config, 1).init, jax.random.key(0))
    weights = jax.eval_shape(step.model.prepare, params)
    num_rows = step.num_rows * num_devices
    num_blocks = num_rows * step.table_size
    cache = jax.eval_shape(functools.partial(init_cache, step.config, num_blocks, BLOCK_SIZE))
    per_row, shape = np.zeros(num_rows, np.int32), (num_rows, step.num_tokens)
    rows = Rows(
        jax.ShapeDtypeStruct(shape, jnp.int32),  # type: ignore[arg-type]
        per_row,
        per_row,
        jax.ShapeDtypeStruct((num_rows, step.table_size), jnp.int32),  # type: ignore[arg-type]
    )
    # Prompts are whole, so no half attends to the other. The head is left out: a model has only one, which
    # would weigh too much beside these few layers.
    forward = step.model.forward
    run = (
        functools.partial(in_two_microbatches, forward, False)
        if overlap
        else functools.partial(in_one_batch, forward)
    )
    arguments = (
        abstract_arrays(weights, weight_specs(weights)),
        abstract_arrays(cache, BLOCKS),
        (abstract_arrays(rows, ROWS),),
    )
    return jit_step(run, mesh).lower(*arguments)


def compile_and_read(
    request: Request, step: ServingStep, target: Target, say: Callable[[str], None]
) -> Compiled:
    """Compile a step, and read what the compiler made of it."""
    made = compile_ahead(
        request,
        target,
        list(step.mesh.devices.flat),
        functools.partial(lower, step, overlap=request.plan.overlap),
        step.what,
        f"{request.plan.model}, {step.what}, ep {step.mesh.shape[EP]} on {target}",
        say,
        MICROBATCH_NAMES,
        forward=(r"\bmicrobatch_a\b",),
        backward=(r"\bmicrobatch_b\b",),
    )
    if isinstance(made, str):
        return Compiled(step.what, out_of_memory=made)
    module, report = made.module, made.report
    names = {_cache_name(step)}
    found = read(step.what, module, report, made.memory, names, options=made.options, seconds=made.seconds)
    named = (
        dataclasses.replace(row, direction=MICROBATCH_NAMES.get(row.direction or "", ("", "both"))[1])
        for row in found.all_to_alls
    )
    units = {UnitKey(step.what): unit_of(report, module, module.entry)}
    # Not the last all-to-all: in a whole model the next layer, or the head, follows it.
    followed = totals(report.select("all-to-all")[:-1])
    return dataclasses.replace(found, all_to_alls=tuple(named), units=units, followed=followed)


def _cache_name(step: ServingStep) -> str:
    blocks = step.num_rows * step.table_size
    shape = jax.eval_shape(functools.partial(init_cache, step.config, blocks, BLOCK_SIZE))
    return ahead.array_name(ahead.hlo_dtype(shape.dtype), shape.shape)
