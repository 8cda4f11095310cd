"""Checks of input. Each error says what was given, what is needed and what to do."""

from collections.abc import Iterator, Mapping
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

from dualpipe_jax.arguments import UnfitError
from dualpipe_jax.contract import At, Out, StagedModel, StageFunction, Tree, checked_output
from dualpipe_jax.engine.stages import PlacedStages, is_listed
from dualpipe_jax.engine.storage import LeafSharding, axes_by_dim
from dualpipe_jax.engine.trees import types_in_words, types_of
from dualpipe_jax.parallel import EP, PP
from dualpipe_jax.parallel.mesh import AXES, BATCH_AXES, NODE
from dualpipe_jax.schedule import Schedule
from dualpipe_jax.split.jaxprs import collectives

PARAM_KEYS = ("shared", "stages")


def check_mesh(schedule: Schedule, mesh: Mesh | AbstractMesh) -> None:
    """Check that the mesh has axes pp and ep, with one rank of pp for each rank of the schedule.

    Raises ValueError otherwise, and if an axis with which the engine works is not of type Auto.
    """
    missing = [axis for axis in (PP, EP) if axis not in mesh.shape]
    if missing:
        raise ValueError(
            f"mesh has the axes {tuple(mesh.shape)}, but {' and '.join(map(repr, missing))} is missing: "
            "the pipeline needs a mesh with axes 'pp' and 'ep', such as dualpipe_jax.make_mesh(4, 2); "
            "an ep of size 1 will do."
        )
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    explicit = [axis for axis in AXES if types.get(axis, AxisType.Auto) != AxisType.Auto]
    if explicit:
        raise ValueError(
            f"mesh has the axis types {types}; {' and '.join(map(repr, explicit))} must be AxisType.Auto: "
            "jax.make_mesh(..., axis_types=(AxisType.Auto,) * n), or dualpipe_jax.make_mesh(4, 2)."
        )
    if mesh.shape[PP] != schedule.num_ranks:
        raise ValueError(
            f"{schedule.name} is a schedule for {schedule.num_ranks} ranks, but the mesh has {mesh.shape[PP]} "
            f"on its 'pp' axis (mesh {dict(mesh.shape)}): make the schedule with num_ranks={mesh.shape[PP]}, or "
            f"the mesh with make_mesh({schedule.num_ranks}, {mesh.shape[EP]})."
        )


def check_model(model: StagedModel, schedule: Schedule) -> None:
    """Check that the model has as many stages as a pipe of the schedule. Raises ValueError."""
    wanted = schedule.placement.num_model_stages
    if model.num_stages != wanted:
        raise ValueError(
            f"the model has {model.num_stages} stages, but {schedule.name} on {schedule.num_ranks} ranks has {wanted} "
            f"in a pipe: give kind_of {wanted} entries, or choose another schedule."
        )


def check_choice(name: str, given: str, choices: Any) -> None:
    """Check that ``given`` is one of the values of the Literal ``choices``. Raises ValueError."""
    known = get_args(choices)
    if given not in known:
        raise ValueError(f"{name}={given!r}: there are {', '.join(map(repr, known))}.")


def check_dtypes(**given: Tree) -> None:
    """Check that each given dtype is floating: in another dtype gradients would be zero. Raises ValueError."""
    for name, dtype in _named(given):
        if not _is_floating(dtype):
            raise ValueError(
                f"{name}={getattr(dtype, '__name__', dtype)}: gradients need a floating dtype, such as jnp.bfloat16 or "
                "jnp.float32; None for each leaf's own."
            )


def check_frozen(frozen: Tree) -> None:
    """Check that each entry is a bool: any other value, even "no", would count as True. Raises ValueError."""
    for path, stop in jax.tree_util.tree_leaves_with_path(frozen):
        if not isinstance(stop, bool | np.bool_):
            raise ValueError(
                f"frozen{jax.tree_util.keystr(path)}={stop!r}: give True for what has no gradient, else False or None."
            )


def _is_floating(dtype: Any) -> bool:
    try:
        return jnp.issubdtype(jnp.dtype(dtype), jnp.floating)
    except TypeError:  # no dtype
        return False


def check_arguments(
    schedule: Schedule, mesh: Mesh | AbstractMesh, params: Tree, batch: Tree, key: Any = None
) -> None:
    """Check params, batch and key against the schedule and the mesh.

    Raises ValueError, which lists all shapes that do not fit, also where jit is disabled. Raises TypeError
    for a key that is none.
    """
    if jax.config.jax_disable_jit:  # type: ignore[attr-defined]
        raise UnfitError(
            f"{schedule.name}: JAX_DISABLE_JIT or jax.disable_jit() is on, and a step is one program for all devices: "
            "operation by operation it would take hours. Turn it off; the plain model runs without jit: "
            "sequential_value_and_grad, or reference_value_and_grad for a StagedModel."
        )
    check_key(key)
    check_param_keys(params)
    problems = [*_data_problems(schedule, mesh, batch), *_stage_problems(schedule, params["stages"])]
    if problems:
        raise ValueError(
            f"{schedule.name}: the step's arguments do not fit.\n" + "\n".join(f"- {p}" for p in problems)
        )


def check_param_keys(params: Tree, keys: tuple[str, ...] = PARAM_KEYS) -> None:
    """Check that params is a dict with exactly the given keys. Raises ValueError."""
    if not isinstance(params, dict) or set(params) != set(keys):
        given = sorted(params) if isinstance(params, dict) else type(params).__name__
        raise ValueError(f"params must be a dict with the keys {list(keys)}, got {given}.")


def check_key(key: Any) -> None:
    """Check that a key is None, one typed PRNG key, or raw key data (uint32 [n]). Raises TypeError."""
    if key is None:
        return
    typed = hasattr(key, "dtype") and jnp.issubdtype(key.dtype, jax.dtypes.prng_key) and key.shape == ()
    raw = getattr(key, "dtype", None) == jnp.uint32 and jnp.ndim(key) == 1
    if not (typed or raw):
        given = f"{key.dtype}{list(key.shape)}" if hasattr(key, "dtype") else f"a {type(key).__name__}"
        raise TypeError(
            f"the third argument of a step is the key of its randomness: None or one typed PRNG key, such as "
            f"jax.random.key(step), not {given}. Inputs and targets both belong in the batch, the second argument."
        )


def _data_problems(schedule: Schedule, mesh: Mesh | AbstractMesh, batch: Tree) -> Iterator[str]:
    wanted = schedule.num_microbatches
    axes = [axis for axis in BATCH_AXES if axis in mesh.shape and (axis == EP or mesh.shape[axis] > 1)]
    parts = int(np.prod([mesh.shape[axis] for axis in axes]))
    where = " x ".join(f"'{axis}'" for axis in axes)
    sizes: dict[int, str] = {}
    for name, leaf in _named({"batch": batch}):
        if leaf.ndim < 2:
            yield f"{name} has shape {leaf.shape}; needed: [num_microbatches, microbatch size, ...]."
        elif leaf.shape[0] != wanted:
            yield (
                f"{name} has shape {leaf.shape}, so {leaf.shape[0]} microbatches, but the schedule is "
                f"for {wanted}: reshape the batch to [{wanted}, microbatch size, ...] or make the schedule with "
                f"num_microbatches={leaf.shape[0]}."
            )
        elif leaf.shape[1] % parts:
            yield (
                f"{name} has shape {leaf.shape}: its microbatch size {leaf.shape[1]} is not divisible by the "
                f"{parts} devices of the mesh's {where} axis; use a multiple of {parts}."
            )
        else:
            sizes.setdefault(leaf.shape[1], name)
    if len(sizes) > 1:
        found = " and ".join(f"{size} in {name}" for size, name in sizes.items())
        yield f"the batch has different microbatch sizes, {found}: its leaves must have one and the same."


def _stage_problems(schedule: Schedule, stages: Tree) -> Iterator[str]:
    if is_listed(stages, schedule.placement.num_model_stages):
        return
    placed = isinstance(stages, PlacedStages)
    placement = schedule.placement
    wanted = placement.num_ranks if placed else placement.num_model_stages
    meaning = (
        f"the rank, of which there are {wanted}"
        if placed
        else f"the stage, of which {schedule.name} has {wanted}"
    )
    for name, leaf in _named({"params['stages']": stages}):
        if leaf.ndim == 0 or leaf.shape[0] != wanted:
            yield f"{name} has shape {leaf.shape}; its leading dim must be {meaning}: [{wanted}, ...]."


def check_prefix_keys(name: str, tree: Tree, keys: tuple[str, ...] = PARAM_KEYS) -> None:
    """Check that a prefix of params, such as param_specs, is a dict with some of these ``keys``. Raises ValueError."""
    if not isinstance(tree, dict) or not set(tree) <= set(keys):
        given = sorted(tree) if isinstance(tree, dict) else type(tree).__name__
        raise ValueError(f"{name} must be a dict with keys among {list(keys)}, got {given}.")


def check_shardings(mesh: Mesh | AbstractMesh, params: Tree, shardings: Tree) -> None:
    """Check that every spec names only axes that it may, on dims that these divide; all failures in one ValueError.

    ``params`` has one placed stage, whose leading dim is the rank; ``shardings`` has a ``LeafSharding`` for each leaf.
    """
    problems: list[str] = []
    for part in ("stages", "shared"):
        lead = part == "stages"
        leaves = jax.tree.leaves(shardings[part], is_leaf=lambda node: isinstance(node, LeafSharding))
        for (name, leaf), sharding in zip(_named({f"params['{part}']": params[part]}), leaves, strict=True):
            problems += _spec_problems(
                name, leaf.shape[lead:], sharding, mesh, may_store=BATCH_AXES if lead else (*BATCH_AXES, PP)
            )
    if problems:
        raise ValueError("param_specs or storage_specs do not fit.\n" + "\n".join(f"- {p}" for p in problems))


def _spec_problems(
    name: str,
    shape: tuple[int, ...],
    sharding: LeafSharding,
    mesh: Mesh | AbstractMesh,
    may_store: tuple[str, ...],
) -> Iterator[str]:
    for kind, spec, allowed in (
        ("param_specs", sharding.used, (NODE, EP)),
        ("storage_specs", sharding.stored, may_store),
    ):
        where = name.replace("params", kind, 1)
        if not isinstance(spec, PartitionSpec):
            yield f"{where} is {spec!r}: give a PartitionSpec, such as P({EP!r}), or None."
            continue
        if kind == "storage_specs" and sharding.stored == sharding.used:
            continue
        if len(spec) > len(shape):
            yield f"{name} has dims {list(shape)} (without a stage dim), fewer than its spec {spec} has entries."
            continue
        for dim, axes in zip(shape, axes_by_dim(spec, len(shape)), strict=True):
            size = int(np.prod([mesh.shape.get(axis, 1) for axis in axes]))
            if wrong := [axis for axis in axes if axis not in allowed or axis not in mesh.shape]:
                yield f"{where} is {spec}: {_may_name(kind, allowed, mesh)}, not {', '.join(map(repr, wrong))}."
            elif dim % size:
                yield (
                    f"{name} has shape {list(shape)} (without a stage dim), and {dim}, which its spec {spec} shards, "
                    f"is not divisible by the {size} devices of {' x '.join(map(repr, axes))}."
                )
    yield from _extension_problems(name, shape, sharding)


def _may_name(kind: str, allowed: tuple[str, ...], mesh: Mesh | AbstractMesh) -> str:
    if kind == "param_specs":
        where = "'node' and 'ep'" if NODE in mesh.shape else "'ep'"
        return f"only {where} may be named; over 'pp' stages are placed by the schedule"
    there = [axis for axis in allowed if axis in mesh.shape]
    return f"of this mesh only {', '.join(map(repr, there))} may be named"


def _extension_problems(name: str, shape: tuple[int, ...], sharding: LeafSharding) -> Iterator[str]:
    if max(len(sharding.used), len(sharding.stored)) > len(shape):
        return
    for used, stored in zip(
        axes_by_dim(sharding.used, len(shape)), axes_by_dim(sharding.stored, len(shape)), strict=True
    ):
        if stored[: len(used)] != used:
            yield (
                f"{name} is used as {sharding.used} and stored as {sharding.stored}: each dim must be stored over the "
                "axes that it is used over, first, and then over others."
            )


def call_stage(kind: str, function: StageFunction, own: Tree, shared: Tree, x: Tree, at: At) -> Out:
    """The checked ``Out`` of a stage. Raises TypeError for any other value, and where a missing key is used."""
    try:
        value = function(own, shared, x, at)
    except TypeError as error:
        if at.key is None and "NoneType" in str(error) and "key" in str(error):
            raise TypeError(
                f"{_stage_of_kind(kind)} uses at.key, but the step was given no key: call it with one, such as "
                "value_and_grad(params, batch, jax.random.key(step))."
            ) from error
        raise
    return checked_output(kind, value)


def check_kinds(model: StagedModel, own: Tree, shared: Tree, x: Tree, at: At, *, trains: bool) -> Tree:
    """Check what the kinds of stages return and which collectives they contain. Must be called inside shard_map.

    Returns the types of the last stage's x. Raises TypeError where the x or the metrics of stages do not fit
    together, and ValueError for a ppermute, for a collective over "pp", and, if the step ``trains``, where no
    stage returns a loss.
    """
    losses: set[str] = set()
    metrics: dict[str, tuple[str, Tree]] = {}
    last = model.num_stages - 1
    ends = [(name, stage == 0, stage == last) for stage, name in enumerate(model.kind_of)]
    for name, is_first, is_last in dict.fromkeys(ends):  # each kind once inside the model
        given = None if is_first else x
        traced = jax.make_jaxpr(
            lambda *a, name=name: tuple(call_stage(name, model.kinds[name], *a)), return_shape=True
        )
        jaxpr, out = traced(own, shared, given, at)
        out = Out(*out)
        losses |= set(out.losses)
        if not is_last and types_of(out.x) != types_of(x):
            raise TypeError(
                f"{_stage_of_kind(name)} must return what the next stage takes: the first stage returned x "
                f"{types_in_words(x)}, this one {types_in_words(out.x)}; shapes and dtypes must be equal."
            )
        for metric, value in out.metrics.items():
            other, first = metrics.setdefault(metric, (name, value))
            if types_of(first) != types_of(value):
                raise TypeError(
                    f"metrics[{metric!r}] is {types_in_words(first)} in stages of kind {other!r} and "
                    f"{types_in_words(value)} in those of kind {name!r}: what is summed under one name must be alike."
                )
        _check_collectives(_stage_of_kind(name), collectives(jaxpr.jaxpr.eqns))
    if trains and not losses:
        raise ValueError(
            "no stage returns a loss, so there is nothing to differentiate: return Out(x, losses={'loss': ...}) from "
            "the last stage at least (a PipelineModel's head_loss needs 'targets' in the batch). For a forward alone "
            "there is Pipeline.apply."
        )
    return out.x


def _check_collectives(where: str, found: Mapping[str, frozenset[str]]) -> None:
    if "ppermute" in found:
        raise ValueError(
            f"{where} contains a ppermute. Ranks run it at different times, and a permute in a branch waits for all "
            "devices and hangs; use all_to_all, all_gather or psum over 'ep' instead."
        )
    if over := sorted(name for name, axes in found.items() if PP in axes):
        raise ValueError(
            f"{where} contains a {over[0]} over 'pp'. Ranks run it at different times, so they never meet and the step "
            "hangs; sum over 'ep' and 'dp' alone. Over microbatches and stages the engine sums: return the value in "
            "Out.metrics."
        )


def check_backward(name: str, found: Mapping[str, frozenset[str]]) -> None:
    """Check the collectives of a kind's backward by the same rules as those of its forward. Raises ValueError."""
    _check_collectives(f"the backward of {_stage_of_kind(name)}", found)


def _stage_of_kind(kind: str) -> str:
    return f"a stage of kind {kind!r}"


def _named(trees: dict[str, Tree]) -> Iterator[tuple[str, Any]]:
    for name, tree in trees.items():
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            yield name + jax.tree_util.keystr(path), leaf
