"""How a training step is cut over devices, ordered, and fitted into their memory; loads no JAX.

One value for `dualpipe plan`, `dryrun` and `overlap`, for `scripts/train` and for Python: each option stands here once,
with its help.
"""

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Literal

from tyro.conf import arg

from dualpipe_jax.ranges import AboveZero, AtLeastOne, NotNegative, out_of_range
from dualpipe_jax.schedule import Schedule, limit_stash
from dualpipe_jax.schedule.names import SCHEDULES, find, is_known


def _unless_left_out(default: str) -> str:
    """The default for a command's help; of None each option's text says what it stands for."""
    return "" if default == "None" else f"(default: {default})"


_INT = arg(metavar="INT", help_behavior_hint=_unless_left_out)
Count = Annotated[AtLeastOne | None, _INT]
Shard = Literal["nothing", "optimizer", "parameters"]
ROOM: Mapping[str, float | None] = {"dropless": None, "capacity": 2.0}
"""The room that each way in which tokens reach experts has if none is asked for."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepOptions:
    """The options of a training step, whatever its model."""

    schedule: Annotated[str, arg(metavar="{" + ",".join(SCHEDULES) + "}")] = "dualpipe"
    """Order of forwards and backwards on the pipeline's ranks; see `dualpipe choose`."""
    max_stash: Annotated[NotNegative | None, _INT] = None
    """How many microbatches of a rank may wait for their weights' gradients, for which memory is needed; further
    backwards are whole. As many as the schedule asks for if left out."""
    pp: AtLeastOne = 4
    """Pipeline ranks."""
    ep: AtLeastOne = 4
    """Expert-parallel devices of each rank; a step needs dp x pp x ep devices."""
    ep_nodes: AtLeastOne = 1
    """Nodes that these lie on, for dispatch in two hops: a token crosses to a node at most once."""
    dp: AtLeastOne = 1
    """Replicas of the whole, each with a part of every microbatch."""
    microbatches: Count = None
    """Microbatches of a step, over all pipes; 4 for each rank if left out."""
    microbatch_size: Count = None
    """Sequences of a microbatch, shared out over dp and ep; one for each device if left out."""
    sequence: Count = None
    """Tokens of a sequence. Those of the model's recipe if left out, and 4096 in a dry run."""
    stage_layers: Annotated[tuple[int, ...], arg(metavar="INT ...")] = ()
    """Layers of each stage in model order, dense ones included; if left out, the program's own choice: the models here
    balance the time of their stages."""
    precision: Literal["float32", "bfloat16"] | None = None
    """What activations are computed in; the model's own if left out. Parameters and their sums are float32."""
    remat: Literal["none", "dots", "wide", "all"] = "none"
    """What layers compute again in the backward: none keeps what it needs, dots keeps matrix products only, wide
    keeps what is dear and narrow, all keeps a layer's input only."""
    dispatch: Literal["dropless", "capacity"] = "dropless"
    """How tokens reach experts: dropless gives every expert as much room as it needs, capacity gives all equal room."""
    capacity_factor: Annotated[
        AboveZero | None, arg(metavar="FLOAT", help_behavior_hint=_unless_left_out)
    ] = None
    """Room in multiples of an even load, beyond which tokens are dropped: of each expert for capacity (2 if left out),
    of each pair of devices for dropless (if left out, as much as can ever be needed)."""
    dispatch_payload: Literal["plain", "float8"] = "plain"
    """What travels to experts: tokens and, back through them, gradients as they are, or in eight bits."""
    attention: Literal["auto", "plain", "splash", "cudnn"] = "auto"
    """What computes attention: auto is what suits the devices."""
    matmul: Literal["auto", "plain", "ragged", "megablox", "float8"] = "auto"
    """What computes the experts; float8 in eight bits, as DeepSeek-V3 was trained."""
    shard: Shard = "nothing"
    """What is shared out over devices that would each hold the same (ZeRO): nothing, the optimizer's state, or
    parameters, too, which are gathered once a step."""
    moments: Literal["float32", "bfloat16"] = "float32"
    """What AdamW's two averages are kept in between steps; they are computed in float32. Parameters are float32."""
    gradient_sums: Literal["float32", "bfloat16"] = "float32"
    """What gradients are summed in over the microbatches of a step."""
    serialised: bool = False
    """Run the pair's forward and backward after each other: what the overlap is to be compared with."""
    compiler_option: Annotated[tuple[str, ...], arg(metavar="NAME=VALUE ...")] = ()
    """Options for the compiler besides the recommended ones. For CPU and GPU it reads True and False, for TPU true and
    false."""

    def __post_init__(self) -> None:
        """A schedule goes by one name, "one_f_one_b" for "1F1B": runs and plans are compared by it."""
        if is_known(self.schedule):
            object.__setattr__(self, "schedule", find(self.schedule).__name__)

    @property
    def room(self) -> float | None:
        """``capacity_factor`` with its default; None: as much as can ever be needed."""
        return ROOM[self.dispatch] if self.capacity_factor is None else self.capacity_factor

    @property
    def num_microbatches(self) -> int:
        """The number of microbatches of a step, over all pipes."""
        return 4 * self.pp if self.microbatches is None else self.microbatches

    @property
    def batch(self) -> int:
        return self.parts if self.microbatch_size is None else self.microbatch_size

    @property
    def parts(self) -> int:
        """Devices that share a microbatch."""
        return self.dp * self.ep

    @property
    def num_devices(self) -> int:
        return self.dp * self.pp * self.ep

    @property
    def layout(self) -> str:
        """Devices in words: pp 16 x ep 64, and dp before it where there are replicas."""
        return ("" if self.dp == 1 else f"dp {self.dp} x ") + f"pp {self.pp} x ep {self.experts_on}"

    @property
    def experts_on(self) -> str:
        """Devices of the expert axis in words: 64, or 8 x 8 on nodes."""
        nodes = self.ep_nodes
        return str(self.ep) if nodes == 1 else f"{self.ep} ({nodes} nodes x {self.ep // nodes})"

    @property
    def compiler_options(self) -> dict[str, str]:
        """``compiler_option`` by name.

        Raises:
          ValueError: one is not NAME=VALUE.
        """
        return dict(map(pair_of, self.compiler_option))

    def check(self) -> None:
        """Whether counts are in their range and devices can share a microbatch; ``make_schedule`` checks the rest.

        Raises:
          ValueError: one is not; says which option, and what would do.
        """
        for (name,), value, why in out_of_range(self):
            raise ValueError(f"--{name.replace('_', '-')} {value}: {why}")
        if self.ep % self.ep_nodes:
            raise ValueError(
                f"--ep {self.ep} --ep-nodes {self.ep_nodes}: as many devices on each node; give a number of nodes that "
                "divides --ep"
            )
        if self.batch % self.parts:
            whose = f"--ep {self.ep}" if self.dp == 1 else f"--dp {self.dp} x --ep {self.ep}"
            near = self.parts * max(1, self.batch // self.parts)
            raise ValueError(
                f"--microbatch-size {self.batch}: {whose} devices must share it equally, try {near}"
            )
        _ = self.compiler_options

    def make_schedule(self, num_microbatches: int | None = None) -> Schedule:
        """The schedule that the options name, for all microbatches or for so many.

        Raises:
          ValueError: there is none of that name, or not with these counts.
        """
        count = self.num_microbatches if num_microbatches is None else num_microbatches
        schedule = find(self.schedule)(self.pp, count)
        return schedule if self.max_stash is None else limit_stash(schedule, self.max_stash)


def pair_of(text: str) -> tuple[str, str]:
    """NAME=VALUE in its parts. Raises ValueError where it is not that."""
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        raise ValueError(f"{text!r}: wants NAME=VALUE")
    return name, value
