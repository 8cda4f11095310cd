"""Where a model's stages are held: from model order to the ranks, and the second copy of a bidirectional pipe."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dualpipe_jax.arguments import typechecked
from dualpipe_jax.contract import Tree
from dualpipe_jax.engine.trees import types_in_words, types_of
from dualpipe_jax.parallel import PP
from dualpipe_jax.parallel.p2p import send
from dualpipe_jax.schedule.ir import Placement, Schedule


@functools.partial(jax.tree_util.register_dataclass, data_fields=["local"], meta_fields=["model_stages"])
@dataclasses.dataclass(frozen=True)
class PlacedStages:
    """Stage parameters as the ranks own them.

    Attributes:
      local: one tree for each stage that a rank owns; the leading dim of every leaf is the rank, sharded
        over pp.
      model_stages: for each tree of ``local`` the number in model order of each rank's stage, static. On a V
        of R ranks ``local[0]`` holds stages 0..R-1 and ``local[1]`` stages 2R-1..R. It is part of the tree's
        structure, so that JAX refuses to add a parameter to the gradient of another stage.
    """

    local: tuple[Any, ...]
    model_stages: tuple[tuple[int, ...], ...]


@dataclasses.dataclass(frozen=True)
class StageOwnership:
    """The stages that each rank owns, and those that it borrows from another rank.

    Attributes:
      owned: int [num_owned, ranks], the number in model order of each stage that a rank owns.
      borrowed: for each further local stage, which of its owner's owned stages it copies (a row of
        ``owned``), and the (owner, borrower) pairs of ranks.
    """

    owned: np.ndarray
    borrowed: tuple[tuple[int, tuple[tuple[int, int], ...]], ...]


def stage_ownership(placement: Placement) -> StageOwnership:
    """The owned stages, those of pipe 0, and the borrowed stages, those of further pipes, which are copied each step.

    Raises ValueError if ranks hold unequal numbers of stages, since one program runs on all of them, or if a
    rank's stages of pipe 0 and of the further pipes do not correspond.
    """
    held = placement.stages_on
    if len({len(stages) for stages in held}) > 1:
        raise ValueError(
            f"placement {placement.pipes}: ranks hold {[len(s) for s in held]} stages; need equal numbers"
        )
    slices = np.array([[placement.model_stage(stage) for stage in stages] for stages in held]).T
    pipes = np.array([[placement.pipe_of(stage) for stage in stages] for stages in held]).T
    num_owned = len(slices) // placement.num_pipes
    owned = slices[:num_owned]
    if pipes[:num_owned].any():
        raise ValueError(f"placement {placement.pipes}: every rank must hold {num_owned} stages of pipe 0")
    home = {int(owned[j, rank]): (j, rank) for j in range(num_owned) for rank in range(placement.num_ranks)}
    borrowed = []
    for row in slices[num_owned:]:
        sources = {home[int(model_stage)][0] for model_stage in row}
        if len(sources) > 1:
            raise ValueError(
                f"placement {placement.pipes}: mirrored stages must come from one owned stage a rank"
            )
        pairs = tuple((home[int(model_stage)][1], rank) for rank, model_stage in enumerate(row))
        borrowed.append((sources.pop(), pairs))
    return StageOwnership(owned, tuple(borrowed))


def owned_stages(placement: Placement) -> tuple[tuple[int, ...], ...]:
    """``PlacedStages.model_stages`` of stages in this placement."""
    return tuple(tuple(map(int, row)) for row in stage_ownership(placement).owned)


def to_placed(stages: Tree, placement: Placement) -> PlacedStages:
    """Stages from model order to the ranks; a gather only where the order differs. Placed stages stay as they are.

    ``stages`` has leaves [num_stages, ...], or is a list of one tree for each stage.

    Raises ValueError for stages placed for another schedule, for a wrong number of stages, and for a list of
    trees that are not alike.
    """
    if isinstance(stages, PlacedStages):
        _check_placed_for(stages, placement)
        return stages
    if is_listed(stages, placement.num_model_stages):
        stages = jax.tree.map(lambda *leaves: jnp.stack(leaves), *stages)
    # A gather would drop extra stages, and fill missing ones with NaN.
    check_num_stages(stages, placement.num_model_stages, "the schedule")

    def pick(model_stages):
        in_order = np.array_equal(model_stages, np.arange(placement.num_model_stages))
        return stages if in_order else jax.tree.map(lambda leaf: jnp.take(leaf, model_stages, axis=0), stages)

    return PlacedStages(tuple(pick(row) for row in stage_ownership(placement).owned), owned_stages(placement))


def check_num_stages(stages: Tree, number: int, whose: str) -> None:
    """Check that the leaves of stacked stages are [number, ...]. Raises ValueError."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(stages):
        if np.shape(leaf)[:1] != (number,):
            raise ValueError(
                f"params['stages']{jax.tree_util.keystr(path)} has shape {np.shape(leaf)}; its leading dim must be the "
                f"stage, of which {whose} has {number}: [{number}, ...]."
            )


def _check_placed_for(stages: PlacedStages, placement: Placement) -> None:
    if stages.model_stages != owned_stages(placement):
        raise ValueError(
            "params['stages'] are placed for another schedule: the ranks hold the stages "
            f"{list(map(list, stages.model_stages))}, here they must hold "
            f"{list(map(list, owned_stages(placement)))}. Bring them to model order with the old Pipeline's "
            "unplace (or unplace_stages), and place them with this one's place."
        )


def is_listed(stages: Tree, num_stages: int) -> bool:
    """Whether parameters are a list of one tree for each stage, rather than a tree of leaves [num_stages, ...].

    Raises ValueError for a list that may be either, and for one that is neither.
    """
    if not isinstance(stages, list):
        return False
    types = [types_of(tree) for tree in stages]
    leaves = jax.tree.leaves(stages)
    if not leaves:
        return len(stages) == num_stages
    stacked = all(leaf.ndim and leaf.shape[0] == num_stages for leaf in leaves)
    other = next((number for number, form in enumerate(types) if form != types[0]), None)
    if stacked and (len(stages) != num_stages or other is not None):
        return False
    if stacked:
        raise ValueError(
            f"params['stages'] is a list of {num_stages} alike trees of leaves [{num_stages}, ...]: that may be a tree "
            "for each stage, or one tree of all. Stack it yourself, jax.tree.map(lambda *leaves: jnp.stack(leaves), "
            "*stages), or give one tree of all stages as a tuple."
        )
    if len(stages) != num_stages:
        raise ValueError(
            f"params['stages'] is a list of {len(stages)} trees, but there are {num_stages} stages: give one tree for "
            f"each stage, or leaves [{num_stages}, ...]."
        )
    if other is not None:
        raise ValueError(
            f"params['stages'] is a list of one tree for each stage: stage {other} has "
            f"{types_in_words(stages[other])}, but stage 0 has {types_in_words(stages[0])}. "
            "Trees of stages must be alike, since every rank runs one program; what only some stages "
            "have belongs in params['shared']."
        )
    return True


def from_placed(
    placed: PlacedStages, placement: Placement, is_leaf: Callable[[Any], bool] | None = None
) -> Tree:
    """Stages from the ranks to model order: leaves [num_stages, ...]. ``is_leaf`` as in ``jax.tree.map``.

    Raises ValueError for stages that are not placed, or are placed for another schedule.
    """
    if not isinstance(placed, PlacedStages):
        raise ValueError(
            f"params['stages'] of type {type(placed).__name__} are not placed: only what place (or place_stages) "
            "returned, and its gradients, can be brought back to model order."
        )
    _check_placed_for(placed, placement)
    owned = stage_ownership(placement).owned
    back = np.argsort(owned.reshape(-1))
    if len(owned) == 1 and np.array_equal(back, np.arange(back.size)):
        return placed.local[0]

    def join(*leaves):
        return None if leaves[0] is None else jnp.concatenate(leaves)[back]

    return jax.tree.map(join, *placed.local, is_leaf=is_leaf)


def borrow(own: tuple[Tree, ...], placement: Placement) -> tuple[Tree, ...]:
    """The copies of stages with which further pipes work during a step: one exchange over pp for each stage."""
    return tuple(send(own[source], pairs) for source, pairs in stage_ownership(placement).borrowed)


def give_back(gradients: list[Tree], placement: Placement) -> list[Tree]:
    """Send borrowed stages' gradients to their owners, and add them to the owners'; one tree for each owned stage."""
    where = stage_ownership(placement)
    own = list(gradients[: len(where.owned)])
    for (source, pairs), borrowed in zip(where.borrowed, gradients[len(where.owned) :], strict=True):
        returned = send(borrowed, [(borrower, owner) for owner, borrower in pairs])
        own[source] = jax.tree.map(jnp.add, own[source], returned)
    return own


@typechecked
def place_stages(stages: Tree, schedule: Schedule, mesh: Mesh, param_specs: Tree = None) -> PlacedStages:
    """Put stage parameters on the ranks that work with them, once, before a training loop.

    Arguments:
      stages: leaves [num_stages, ...] in model order.
      schedule: the schedule, whose placement says which rank holds which stage.
      mesh: with axes "pp" and "ep".
      param_specs: PartitionSpec of each leaf of ``stages`` without its stage dim, as it is to be stored; a
        prefix of the tree is enough, None means replicated.

    Returns params["stages"] in the form that a pipelined step takes with no resharding. Gradients come back
    in the same form, and any optimizer that maps over leaves works on it. The optimizer holds state for one
    copy of the stages, even if the schedule has two pipes.

    Raises ValueError if ``param_specs`` is no prefix of ``stages``, or if the number of stages is not the schedule's.

    On two devices, each of which has two of a V's four stages:

    >>> import jax.numpy as jnp
    >>> from dualpipe_jax import make_mesh, place_stages
    >>> from dualpipe_jax.schedule import zb_v
    >>> placed = place_stages(jnp.array([0.0, 1.0, 2.0, 3.0]), zb_v(2, 4), make_mesh(2))
    >>> [leaf.tolist() for leaf in placed.local]
    [[0.0, 1.0], [3.0, 2.0]]
    """
    specs = broadcast(param_specs, stages, PartitionSpec(), "param_specs")
    placed = to_placed(stages, schedule.placement)

    def put(leaf, spec):
        return jax.device_put(leaf, NamedSharding(mesh, PartitionSpec(PP, *spec)))

    return dataclasses.replace(placed, local=tuple(jax.tree.map(put, tree, specs) for tree in placed.local))


@typechecked
def unplace_stages(placed: PlacedStages, schedule: Schedule) -> Tree:
    """The inverse of ``place_stages``: leaves [num_stages, ...] in model order.

    >>> import jax.numpy as jnp
    >>> from dualpipe_jax import make_mesh, place_stages, unplace_stages
    >>> from dualpipe_jax.schedule import zb_v
    >>> placed = place_stages(jnp.array([0.0, 1.0, 2.0, 3.0]), zb_v(2, 4), make_mesh(2))
    >>> unplace_stages(placed, zb_v(2, 4)).tolist()
    [0.0, 1.0, 2.0, 3.0]
    """
    return jax.jit(from_placed, static_argnums=1)(placed, schedule.placement)


def broadcast(prefix: Tree, tree: Tree, default: Any, name: str) -> Tree:
    """A value for every leaf of ``tree``, from a prefix of the tree; None in the prefix stands for ``default``.

    Raises ValueError, which names the option ``name``, if ``prefix`` is no prefix of ``tree``.
    """

    def fill(value, part):
        return jax.tree.map(lambda _: default if value is None else value, part)

    try:
        return jax.tree.map(
            fill, prefix, tree, is_leaf=lambda node: node is None or isinstance(node, PartitionSpec)
        )
    except ValueError as error:
        raise ValueError(
            f"{name} must be params with an entry or None in place of leaves or of whole branches, "
            f"a prefix of the tree; it is not: {error}"
        ) from error
