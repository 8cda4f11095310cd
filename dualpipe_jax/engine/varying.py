"""How values vary over mesh axes, where `check_vma` wants to know: the only place that reads such types."""

import dataclasses
from typing import Any

import jax
from jax import lax


def varying_axes(x: Any) -> frozenset[str]:
    """The mesh axes over which a value is typed as varying; empty outside shard_map or without check_vma."""
    return frozenset(jax.typeof(x).manual_axis_type.varying)


@dataclasses.dataclass(frozen=True)
class Vary:
    """Types every array leaf as varying over all of these axes, which is what a rank's own value is.

    Parameters must be cast before the stage sees them: else the vjp of a parameter that does not vary over
    pp holds a psum over pp, inside a branch that other ranks do not take.

    Attributes:
      axes: the mesh's manual axes; none without check_vma, and then nothing is cast.
    """

    axes: tuple[str, ...] = ()

    def __call__(self, tree: Any) -> Any:
        """The tree, cast."""
        if not self.axes:
            return tree

        def cast(x):
            missing = tuple(axis for axis in self.axes if axis not in varying_axes(x))
            return lax.pcast(x, missing, to="varying") if missing else x

        return jax.tree.map(cast, tree)
