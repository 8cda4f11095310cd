"""A step as a value: a model, a schedule and a mesh, and for every leaf of the parameters how it is sharded."""

import dataclasses
import functools
import math
from typing import Any

from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from dualpipe_jax.contract import StagedModel, Tree
from dualpipe_jax.engine.guard import Divergence
from dualpipe_jax.engine.stages import PlacedStages, owned_stages
from dualpipe_jax.engine.storage import LeafSharding, map_shardings
from dualpipe_jax.engine.trees import Vary
from dualpipe_jax.parallel import PP
from dualpipe_jax.parallel.mesh import AXES, BATCH_AXES
from dualpipe_jax.schedule import CostModel, Schedule
from dualpipe_jax.varying import vary


@dataclasses.dataclass(frozen=True)
class Step:
    """A model, a schedule and a mesh, ready to become a program; ``Pipeline`` documents the fields.

    With ``units`` the program holds these units alone, to be compiled and inspected in a fraction of the
    time; its results are of no use.

    Further fields:
      shardings: a ``LeafSharding`` for every leaf of params: {"stages": those of one local stage, "shared": ...}.
      frozen: for every leaf of params, in the same form, whether it has no gradient.
    """

    model: StagedModel
    schedule: Schedule
    mesh: Mesh | AbstractMesh
    shardings: Tree
    frozen: Tree
    costs: CostModel
    accumulate_dtype: Any
    fuse_pairs: bool
    idle_sends: bool
    wide_gradients: bool
    divergence: Divergence
    input_grads: bool
    check_vma: bool
    debug_nans: bool
    units: tuple[str, ...] = ()
    every_kind: bool = False

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh's axes with which the engine works; any other axes are left to the compiler."""
        return tuple(axis for axis in AXES if axis in self.mesh.shape)

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """The axes over which a microbatch is cut, the first one varying slowest."""
        return tuple(axis for axis in BATCH_AXES if axis in self.mesh.shape)

    @property
    def num_parts(self) -> int:
        """The number of parts into which a microbatch is cut."""
        return math.prod(self.mesh.shape[axis] for axis in self.batch_axes)

    @property
    def vary(self) -> Vary:
        return functools.partial(vary, axes=self.axes if self.check_vma else ())

    def param_specs(self, num_owned: int) -> Tree:
        """A PartitionSpec for every leaf of placed params."""

        def over_ranks(leaf: LeafSharding) -> PartitionSpec:
            return PartitionSpec(PP, *leaf.stored)

        own = map_shardings(over_ranks, self.shardings["stages"])
        shared = map_shardings(lambda leaf: leaf.stored, self.shardings["shared"])
        return {"stages": self.placed((own,) * num_owned), "shared": shared}

    def placed(self, local: tuple[Tree, ...]) -> PlacedStages:
        """Values of each local stage as ``PlacedStages`` of this schedule."""
        return PlacedStages(local, owned_stages(self.schedule.placement))
