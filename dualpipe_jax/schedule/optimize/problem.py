"""A step to be scheduled, on whatever placement: what bounds, searches and the optimum are asked about."""

import dataclasses
import math

from dualpipe_jax.schedule.costs import CostModel, MemoryModel, stages_a_share
from dualpipe_jax.schedule.ir import Placement


@dataclasses.dataclass(frozen=True)
class Problem:
    """How many microbatches, all pipes together, and what each costs and keeps; ``limit`` is the most a rank may keep.

    Costs and sizes are of a rank's equal share of the model or, after ``of_stages``, of one stage.
    """

    num_microbatches: int
    costs: CostModel = dataclasses.field(default_factory=CostModel)
    memory: MemoryModel = dataclasses.field(default_factory=MemoryModel)
    limit: float = math.inf

    def of_stages(self, placement: Placement) -> "Problem":
        """The same with costs and sizes of one stage of a placement."""
        share = stages_a_share(placement)
        return dataclasses.replace(self, costs=self.costs.divided(share), memory=self.memory.divided(share))
