"""How values vary over mesh axes, where `check_vma` wants to know: the only place that reads such types."""

from typing import Any

import jax
from jax import lax

from dualpipe_jax.parallel import EP, PP


def varying_axes(x: Any) -> frozenset[str]:
    """The mesh axes over which a value is typed as varying; empty outside shard_map or without check_vma."""
    return frozenset(jax.typeof(x).manual_axis_type.varying)


def vary(tree: Any, check_vma: bool) -> Any:
    """Type every array leaf as varying over both mesh axes, which is what a rank's own value is.

    Parameters must be cast before the stage sees them: else the vjp of a parameter that does not vary over
    pp holds a psum over pp, inside a branch that other ranks do not take.
    """
    if not check_vma:
        return tree

    def cast(x):
        missing = tuple(axis for axis in (PP, EP) if axis not in varying_axes(x))
        return lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(cast, tree)
