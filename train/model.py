"""The model that a run trains."""

import dataclasses
import difflib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp

import models
from dualpipe_jax.parallel import check_float8, mosaic
from dualpipe_jax.parallel.mesh import expert_axes
from dualpipe_jax.schedule import Schedule
from dualpipe_jax.step_options import StepOptions
from train.config import ConfigError, TrainConfig

BYTE_VOCAB = 256
"""The vocabulary size if tokens are bytes."""

REMAT: Mapping[str, Callable[..., Any] | None] = {
    "none": None,
    "keys": models.recompute_keys,
    "local": models.recompute_local,
    "wide": models.recompute_wide,
    "all": jax.checkpoint_policies.nothing_saveable,
}
"""Value of --remat -> the ``jax.checkpoint`` policy for what layers recompute in the backward; None: nothing."""


def has_selection_bias(numbers: models.Config) -> bool:
    """Whether the architecture's routers balance loads by a bias; the softmax routers of V2 use a loss instead."""
    return numbers.score == "sigmoid"


def model_config(config: TrainConfig, vocab: int = BYTE_VOCAB) -> models.Config:
    """The model's configuration. Raises ConfigError for an unknown model or number, or numbers that do not fit."""
    asked = config.model
    if asked.name not in models.MODELS:
        raise ConfigError(f"--model {asked.name}: there are {', '.join(models.MODELS)}")
    try:
        numbers = named_config(asked.name, asked.layers, asked.changes)
        changes: dict[str, Any] = {} if asked.mtp is None else {"num_mtp_layers": asked.mtp}
        return dataclasses.replace(in_precision(numbers, config.step), vocab=vocab, **changes)
    except ValueError as error:
        raise ConfigError(
            f"--set {' '.join(asked.numbers)}: {error}" if asked.numbers else str(error)
        ) from None


def named_config(
    name: str, num_layers: int | None = None, changes: Mapping[str, float] | None = None
) -> models.Config:
    """The configuration of a named model, with changes.

    Args:
      name: a name in ``models.MODELS``.
      num_layers: the number of layers with experts; None for the model's own.
      changes: values of other numeric fields of ``models.Config``, such as {"dim": 2048}.

    Raises:
      ValueError: there is no such model or field, or a value does not fit.
    """
    if name not in models.MODELS:
        near = difflib.get_close_matches(name, models.MODELS, n=1, cutoff=0.4)
        meant = f"did you mean {near[0]}? " if near else ""
        raise ValueError(f"model {name!r}: {meant}there are {', '.join(models.MODELS)}")
    numbers = models.MODELS[name]()
    given = dict(changes or {})
    fields = {
        field.name for field in dataclasses.fields(numbers) if field.type in (int, float, "int", "float")
    }
    if unknown := given.keys() - fields:
        raise ValueError(
            f"model {name}: no number {', '.join(sorted(unknown))}; there are {', '.join(sorted(fields))}"
        )
    if broken := [field for field in given if isinstance(getattr(numbers, field), int) and given[field] % 1]:
        raise ValueError(f"model {name}: {broken[0]} is {given[broken[0]]:g}, must be a whole number")
    given = {field: type(getattr(numbers, field))(number) for field, number in given.items()}
    if num_layers is not None:
        dense = int(given.get("num_dense_layers", numbers.num_dense_layers))
        given["num_layers"] = num_layers + dense
    return dataclasses.replace(numbers, **given)  # type: ignore[arg-type]


def in_precision(numbers: models.Config, step: StepOptions) -> models.Config:
    """A model's configuration with the compute dtype of ``step.precision``; unchanged if that is None."""
    if step.precision is None:
        return numbers
    return dataclasses.replace(numbers, compute_dtype=jnp.dtype(step.precision))


def staged(
    numbers: models.Config,
    stage_layers: Sequence[int],
    step: StepOptions,
    platform: Literal["cpu", "gpu", "tpu"] | None = None,
    **factors: Any,
) -> models.Model:
    """The model cut into stages, with experts, embedding and head sharded over ep; for runs and dry runs alike.

    Raises:
      ValueError: layers, ep or a kernel do not fit the model or the platform.
    """
    return models.deepseek(
        numbers,
        stage_layers,
        ep_axis=expert_axes(step.ep_nodes),
        dispatch=step.dispatch,
        capacity_factor=step.room,
        payload=step.dispatch_payload,
        remat=REMAT[step.remat],
        kernels=models.Kernels(step.attention, step.matmul),
        platform=platform,
        **factors,
    )


def make_model(
    config: TrainConfig, schedule: Schedule, vocab: int = BYTE_VOCAB, *, lossless: bool = False
) -> models.Model:
    """The model cut into stages by --stage-layers or by equal time, with experts, embedding and head sharded over ep.

    Args:
      config: the options.
      schedule: the schedule, which determines the stages.
      vocab: the vocabulary size; all tokens are below it.
      lossless: drop no tokens and use no eight-bit formats, whatever the options say. It is for evaluation, which must
        depend neither on the layout nor on the formats of training.

    Raises:
      ConfigError: there are fewer layers than stages, --stage-layers does not fit the stages or the layers, ep does not
        divide the experts, the vocabulary or the dims, or a kernel does not support this platform.
    """
    numbers, asked, step = model_config(config, vocab), config.model, config.step
    factors: dict[str, Any] = {"mtp_weight": asked.mtp_weight, "balance_factor": asked.balance_factor}
    for what, number in (
        ("experts of a layer", numbers.num_experts),
        ("words", vocab),
        ("dims", numbers.dim),
    ):
        if number % step.ep:
            raise ConfigError(f"--ep {step.ep}: must divide the {number} {what}")
    try:
        plan = models.given_plan(numbers, schedule, step.stage_layers)
    except ValueError as error:
        if given := step.stage_layers:
            raise ConfigError(f"--stage-layers {' '.join(map(str, given))}: {error}") from None
        raise ConfigError(
            f"--schedule {step.schedule} --pp {step.pp}: --model {asked.name}: {error}; see --layers"
        ) from None
    if lossless:
        matmul = "auto" if step.matmul == "float8" else step.matmul
        step = dataclasses.replace(
            step, dispatch="dropless", capacity_factor=None, dispatch_payload="plain", matmul=matmul
        )
    asked_for = {name: factor for name, factor in factors.items() if factor is not None}
    if step.matmul in mosaic.TILES and numbers.compute_dtype == jnp.float32:
        raise ConfigError(f"--matmul {step.matmul}: its kernels take 16 bits; add --precision bfloat16")
    try:
        return staged(numbers, plan, step, **asked_for)
    except ValueError as error:
        raise ConfigError(f"--model {asked.name}: {error}") from None


def check_eight_bits(step: StepOptions, device: jax.Device) -> None:
    """Raise ValueError if the options use float8 and the device does not support it."""
    if "float8" in (step.dispatch_payload, step.matmul):
        check_float8(device)


def refuse_eight_bits(config: TrainConfig, device: jax.Device) -> None:
    """Like ``check_eight_bits``, for a run's options, with ConfigError instead of ValueError."""
    asked = config.step
    try:
        check_eight_bits(asked, device)
    except ValueError as error:
        raise ConfigError(
            f"--dispatch-payload {asked.dispatch_payload} --matmul {asked.matmul}: {error}"
        ) from None


def describe_dispatch(config: TrainConfig) -> str:
    """Which tokens may be dropped and what is sent in eight bits, in words, to print at the start of a run."""
    step, spare, every = config.step, config.experts.redundant_experts, config.experts.rebalance_every
    factor = step.room
    if factor is None:
        words = "dropless: every token reaches its experts"
    elif step.dispatch == "dropless":
        words = f"dropless, bounded: what exceeds {factor:g} x an even load between two devices is dropped, and counted"
    else:
        words = (
            f"capacity: what exceeds {factor:g} x an even load of an expert is dropped, and counted; each of the "
            f"{step.ep} devices fills its own part of the room, so --ep changes what is dropped"
        )
    words += f"; {spare} redundant" if spare else ""
    words += f"; they move every {every} steps if that helps" if every else ""
    return words if step.dispatch_payload == "plain" else f"{words}; sent in eight bits"


def count_parameters(numbers: models.Config) -> tuple[int, int]:
    """(the number of all parameters, the number of those that are active for one token), without routing biases."""
    shapes = jax.eval_shape(models.deepseek(numbers, 1).init, jax.random.key(0))
    routed = sum(
        leaf.size
        for path, leaf in jax.tree_util.tree_leaves_with_path(shapes["stages"]["layers"])
        if "'experts'" in jax.tree_util.keystr(path)
    )
    total = models.num_params(shapes) - models.num_params(shapes["stages"]["routing"])
    return total, total - routed + routed * numbers.top_k // numbers.num_experts


def model_flops(numbers: models.Config, active: int, sequence: int) -> float:
    """Floating-point operations that training on one token needs, by the usual count for MFU.

    These are 6 for each ``active`` parameter except the embedding, which is looked up and not multiplied, and 3 times
    the forward attention to half of the sequence on average. Modules of multi-token prediction attend too, and each
    multiplies by the head once more. Neither recomputation in the backward nor padding of expert capacity is counted.
    """
    modules, table = numbers.num_mtp_layers, numbers.vocab * numbers.dim
    per_key = numbers.num_heads * (numbers.qk_nope_dim + numbers.qk_rope_dim + numbers.v_head_dim)
    attention = 2 * per_key * sequence / 2 * (numbers.num_layers + modules)
    return 6.0 * (active - table + modules * table) + 3.0 * attention
