"""Bad input gets an error that says what was given, what is needed and what to do."""

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from dualpipe_jax.engine.model import PipelineModel, Tree
from dualpipe_jax.parallel import EP, PP
from dualpipe_jax.schedule import Schedule

PARTS = ("embed", "stages", "head")


def check_mesh(schedule: Schedule, mesh: Mesh) -> None:
    """The mesh has the axes pp and ep, and as many ranks as the schedule. Raises ValueError."""
    missing = [axis for axis in (PP, EP) if axis not in mesh.shape]
    if missing:
        raise ValueError(
            f"mesh has the axes {tuple(mesh.shape)}, but {' and '.join(map(repr, missing))} is missing: "
            "the pipeline needs a mesh with axes 'pp' and 'ep', such as dualpipe_jax.make_mesh(4, 2); "
            "an ep of size 1 will do."
        )
    extra = [axis for axis in mesh.shape if axis not in (PP, EP)]
    if extra:
        raise ValueError(
            f"mesh has the axes {tuple(mesh.shape)}; only 'pp' and 'ep' are supported, not {extra}."
        )
    if mesh.shape[PP] != schedule.num_ranks:
        raise ValueError(
            f"{schedule.name} is a schedule for {schedule.num_ranks} ranks, but the mesh has {mesh.shape[PP]} "
            f"on its 'pp' axis (mesh {dict(mesh.shape)}): make the schedule with num_ranks={mesh.shape[PP]}, or "
            f"the mesh with make_mesh({schedule.num_ranks}, {mesh.shape[EP]})."
        )


def check_arguments(schedule: Schedule, mesh: Mesh, params: Tree, inputs: Tree, targets: Tree) -> None:
    """Shapes of params and data against the schedule and the mesh; all failures in one ValueError."""
    if not isinstance(params, dict) or set(params) != set(PARTS):
        given = sorted(params) if isinstance(params, dict) else type(params).__name__
        raise ValueError(f"params must be a dict with the keys {list(PARTS)}, got {given}.")
    problems = [
        *_data_problems(schedule, mesh, inputs, targets),
        *_stage_problems(schedule, params["stages"]),
    ]
    if problems:
        raise ValueError(
            f"{schedule.name}: the step's arguments do not fit.\n" + "\n".join(f"- {p}" for p in problems)
        )


def _data_problems(schedule: Schedule, mesh: Mesh, inputs: Tree, targets: Tree):
    wanted, num_ep = schedule.num_microbatches, mesh.shape[EP]
    for name, leaf in _named({"inputs": inputs, "targets": targets}):
        if leaf.ndim < 2:
            yield f"{name} has shape {leaf.shape}; needed: [num_microbatches, microbatch size, ...]."
        elif leaf.shape[0] != wanted:
            yield (
                f"{name} has shape {leaf.shape}, so {leaf.shape[0]} microbatches, but the schedule is "
                f"for {wanted}: reshape the batch to [{wanted}, microbatch size, ...] or make the schedule with "
                f"num_microbatches={leaf.shape[0]}."
            )
        elif leaf.shape[1] % num_ep:
            yield (
                f"{name} has shape {leaf.shape}: its microbatch size {leaf.shape[1]} is not divisible by the "
                f"{num_ep} devices of the mesh's 'ep' axis; use a multiple of {num_ep}."
            )


def _stage_problems(schedule: Schedule, stages: Tree):
    from dualpipe_jax.engine.stages import PlacedStages

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


def check_spec_keys(param_specs: Tree) -> None:
    """param_specs is a dict over some of params' keys. Raises ValueError."""
    if not isinstance(param_specs, dict) or not set(param_specs) <= set(PARTS):
        given = sorted(param_specs) if isinstance(param_specs, dict) else type(param_specs).__name__
        raise ValueError(f"param_specs must be a dict with keys among {list(PARTS)}, got {given}.")


def check_specs(mesh: Mesh, params: Tree, specs: Tree) -> None:
    """Every spec names "ep" alone, on a dim that ep divides; all failures in one ValueError."""
    problems = []
    for part in PARTS:
        local = part == "stages"  # placed: the leading dim, the rank, has no entry in the spec
        trees = (params[part].local[0], specs[part].local[0]) if local else (params[part], specs[part])
        named = _named({f"params['{part}']": trees[0]})
        for (name, leaf), spec in zip(named, jax.tree.leaves(trees[1]), strict=True):
            problems += _spec_problems(name, leaf.shape[local:], spec, mesh)
    if problems:
        raise ValueError("param_specs do not fit.\n" + "\n".join(f"- {p}" for p in problems))


def _spec_problems(name, shape, spec, mesh):
    if len(spec) > len(shape):
        yield f"{name} has dims {list(shape)} (without a stage dim), fewer than its spec {spec} has entries."
    for dim, entry in zip(shape, spec, strict=False):
        axes = entry if isinstance(entry, tuple) else (entry,)
        if set(axes) - {EP, None}:
            where = name.replace("params", "param_specs", 1)
            yield f"{where} is {spec}: only 'ep' may be named; over 'pp' stages are placed by the schedule."
        elif EP in axes and dim % mesh.shape[EP]:
            yield (
                f"{name} has shape {list(shape)} (without a stage dim), and {dim}, which its spec {spec} shards, "
                f"is not divisible by the {mesh.shape[EP]} devices of 'ep'."
            )


def check_model(model: PipelineModel, has_aux: bool, params: Tree, inputs: Tree, targets: Tree) -> None:
    """Shapes through the model, and no ppermute in it. Called where its collectives may be traced.

    Raises TypeError for a stage that does not hand on what it was given, ValueError for a ppermute.
    """
    stage_params = params["stages"][0]
    x = jax.eval_shape(model.embed, params["embed"], inputs)
    out = jax.eval_shape(model.stage, stage_params, x)
    if has_aux and not (isinstance(out, tuple) and len(out) == 2):
        raise TypeError(f"has_aux=True needs a stage that returns (x, aux); it returned {_shapes(out)}.")
    y = out[0] if has_aux else out
    if _shapes(y) != _shapes(x):
        hint = "" if has_aux or not isinstance(out, tuple) else " If it returns (x, aux), pass has_aux=True."
        raise TypeError(
            f"stage must return what the next stage takes: it was given x {_shapes(x)} and returned "
            f"{_shapes(y)}; shapes and dtypes must be equal.{hint}"
        )
    loss = jax.eval_shape(model.head_loss, params["head"], x, targets)
    if getattr(loss, "shape", None) != ():
        raise TypeError(
            f"head_loss must return a scalar, the mean over its examples; it returned {_shapes(loss)}."
        )
    for name, function, arguments in (
        ("embed", model.embed, (params["embed"], inputs)),
        ("stage", model.stage, (stage_params, x)),
        ("head_loss", model.head_loss, (params["head"], x, targets)),
    ):
        if "ppermute" in _primitives(jax.make_jaxpr(function)(*arguments).jaxpr):
            raise ValueError(
                f"{name} contains a ppermute. Ranks run it at different times, and a permute in a branch waits "
                "for all devices and hangs; use all_to_all, all_gather or psum over 'ep' instead."
            )


def report_first_bad(loss: jax.Array, first_bad: jax.Array, schedule: Schedule) -> None:
    """Raise from the running program when the loss is not finite, with the place where that began.

    first_bad: int32 [ranks, ep, 3], each device's first (tick, local stage, microbatch).
    """

    def report(loss, first_bad):
        if np.isfinite(loss):
            return
        rank, ep = np.unravel_index(np.argmin(first_bad[..., 0]), first_bad.shape[:2])
        tick, local, microbatch = map(int, first_bad[rank, ep])
        stage = schedule.placement.stages_on[rank][local]
        raise FloatingPointError(
            f"{schedule.name}: the loss is {loss}. The first value that is not finite comes out of the forward "
            f"of microbatch {microbatch} at stage {schedule.placement.model_stage(stage)} (rank {rank}, "
            f"tick {tick})."
        )

    jax.debug.callback(report, loss, first_bad)


def _named(trees: dict[str, Tree]):
    for name, tree in trees.items():
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            yield name + jax.tree_util.keystr(path), leaf


def _shapes(tree: Tree) -> Any:
    """Shapes and dtypes as text; a bare array without its tree."""
    return str(jax.tree.map(lambda a: f"{np.dtype(a.dtype).name}{list(a.shape)}", tree)).replace("'", "")


def _primitives(jaxpr: Any) -> set[str]:
    """Names of all primitives in a jaxpr and in those inside it."""
    names = set()
    for eqn in jaxpr.eqns:
        names.add(eqn.primitive.name)
        for value in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda v: hasattr(v, "jaxpr")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                names |= _primitives(inner)
    return names
