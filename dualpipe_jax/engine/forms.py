"""Trees in the form of the user's params: gradients, and the leaves that an optimizer updates."""

import dataclasses
from typing import Any

import jax

from dualpipe_jax.contract import Tree
from dualpipe_jax.engine.stages import PlacedStages, broadcast, from_placed, is_listed
from dualpipe_jax.engine.trees import float0_like, types_of
from dualpipe_jax.schedule import Schedule
from dualpipe_jax.split.leaves import is_floating


def trained(tree: Tree, frozen: Tree, num_stages: int) -> Tree:
    """Params, or gradients of them, with None for every leaf that is frozen or not floating."""
    frozen = {} if frozen is None else frozen

    def of(part: str, value: Tree) -> Tree:
        stops = broadcast(frozen.get(part), value, False, "frozen")
        return jax.tree.map(lambda leaf, stop: leaf if not stop and is_floating(leaf) else None, value, stops)

    stages, shared = tree["stages"], of("shared", tree["shared"])
    if isinstance(stages, PlacedStages):
        local = tuple(of("stages", stage) for stage in stages.local)
        return {"stages": dataclasses.replace(stages, local=local), "shared": shared}
    # Not by ``is_listed``: without the frozen leaves, gradients of a list may look like one tree of all stages, too.
    listed = isinstance(stages, list) and len(stages) == num_stages
    if listed and all(types_of(stage) == types_of(stages[0]) for stage in stages):
        return {"stages": [of("stages", stage) for stage in stages], "shared": shared}
    return {"stages": of("stages", stages), "shared": shared}


def with_trained(params: Tree, trained: Tree) -> Tree:
    """Params with the leaves of ``trained`` in place of their own where those are not None."""
    parts = {part: params[part] for part in trained}
    new = jax.tree.map(
        lambda new, old: old if new is None else new, trained, parts, is_leaf=lambda node: node is None
    )
    return params | new


def gradients_like(params: Tree, placed: Tree, lists: Tree, schedule: Schedule) -> Tree:
    """Gradients in the form of ``params``, from ``lists`` as in ``spmd.Results``; ``placed``: params, placed."""
    local = zip(placed["stages"].local, lists["stages"].local, strict=True)
    given = params["stages"]
    if isinstance(given, PlacedStages):
        trees = (as_tree(tree, found) for tree, found in local)
        stages: Tree = dataclasses.replace(given, local=tuple(trees))
    else:
        lead = from_placed(lists["stages"], schedule.placement, is_leaf=lambda g: g is None)
        if is_listed(given, schedule.placement.num_model_stages):
            stages = [
                as_tree(tree, [None if g is None else g[number] for g in lead])
                for number, tree in enumerate(given)
            ]
        else:
            stages = as_tree(given, lead)
    return {"stages": stages, "shared": as_tree(params["shared"], lists["shared"])}


def as_tree(tree: Tree, gradients: list[Any]) -> Tree:
    """The list of gradients in the form of ``tree``: None for frozen leaves, float0 for those not floating."""
    leaves, form = jax.tree.flatten(tree)
    given: Any = form
    rows = zip(leaves, gradients, strict=True)
    return given.unflatten(g if is_floating(leaf) else float0_like(leaf) for leaf, g in rows)
