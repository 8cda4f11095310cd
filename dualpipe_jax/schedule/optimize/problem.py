"""The scheduling problem of a step on any placement, which bounds, searches and the optimum solve."""

import dataclasses
import math

from dualpipe_jax.schedule.costs import CostModel, MemoryModel, stages_a_share
from dualpipe_jax.schedule.ir import Placement


@dataclasses.dataclass(frozen=True)
class Problem:
    """A step to be scheduled.

    Costs and sizes are of a rank's equal share of the model or, after ``of_stages``, of one stage.

    Attributes:
      num_microbatches: the number of microbatches, over all pipes together.
      costs: the time of each kind of work.
      memory: the sizes of the values that a microbatch and a stage keep.
      limit: the most memory that a rank may keep, in the unit of ``memory``.
    """

    num_microbatches: int
    costs: CostModel = dataclasses.field(default_factory=CostModel)
    memory: MemoryModel = dataclasses.field(default_factory=MemoryModel)
    limit: float = math.inf

    def of_stages(self, placement: Placement) -> "Problem":
        """The problem with costs and sizes of one stage of a placement."""
        memory = self.memory.divided(stages_a_share(placement))
        return dataclasses.replace(self, costs=self.costs.of_stages(placement), memory=memory)
