"""How a training step is cut over devices, ordered, and fitted into their memory; loads no JAX.

One value for `dualpipe plan`, `dryrun` and `overlap`, for `scripts/train` and for Python: each option stands here once,
with its help.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Annotated, Literal

from tyro.conf import arg

from dualpipe_jax.ranges import AboveZero, AtLeastOne, NotNegative, out_of_range
from dualpipe_jax.schedule import Schedule, limit_stash
from dualpipe_jax.schedule.names import SCHEDULES, find, is_known, make

Count = AtLeastOne | None
Shard = Literal["nothing", "optimizer", "parameters"]
Remat = Literal["none", "keys", "local", "wide", "all"]
ROOM: Mapping[str, float | None] = {"dropless": None, "capacity": 2.0}
"""The room that each way in which tokens reach experts has if none is asked for."""
BOUNDED = 1.25
"""Room at the experts, in even loads, where room for all tokens does not fit. DeepSeek-V3's layers on 64 devices a
microbatch exceed it for 0.00013 % of the assignments, if all experts are as likely."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepOptions:
    """The options of a training step, whatever its model."""

    schedule: Annotated[str, arg(metavar="{" + ",".join(SCHEDULES) + "}")] = "dualpipe"
    """The schedule: the order of forwards and backwards on the pipeline's ranks. See `dualpipe choose`."""
    stages_per_rank: Count = None
    """Number of stages of each rank, for interleaved schedules, which have 2 if it is left out. With more, bubbles are
    shorter, and stages' inputs and outputs are sent more often."""
    max_stash: NotNegative | None = None
    """How many microbatches of a rank may wait for their weights' gradients, each of which takes memory.
    Backwards beyond that are not split. If left out, as many as the schedule asks for."""
    pp: AtLeastOne = 4
    """Number of pipeline ranks."""
    ep: AtLeastOne = 4
    """Number of expert-parallel devices of each rank. A step needs dp x pp x ep devices."""
    ep_nodes: AtLeastOne = 1
    """Number of nodes of the --ep devices. With more than one, tokens are dispatched in two hops, and each
    crosses to a node at most once."""
    dp: AtLeastOne = 1
    """Number of replicas of the whole. Each has a part of every microbatch."""
    microbatches: Count = None
    """Number of microbatches of a step, over all pipes. If left out, 4 for each rank."""
    microbatch_size: Count = None
    """Number of sequences of a microbatch, shared out over dp and ep. If left out, one for each device."""
    sequence: Count = None
    """Tokens of a sequence. If left out, as many as the model's recipe has."""
    stage_layers: Annotated[tuple[int, ...], arg(metavar="INT ...")] = ()
    """Number of layers of each stage in model order, dense layers included. If left out, the program chooses:
    the models here balance the time of their stages."""
    precision: Literal["float32", "bfloat16"] | None = None
    """What activations are computed in. If left out, a run takes float32 on CPU and bfloat16 on accelerators,
    and a plan what the model itself has. Parameters and their sums are float32."""
    remat: Remat = "none"
    """What layers compute again in the backward. none: nothing, all that it needs is kept. keys: norms, keys and
    values. local: queries, too, so all that is wide and cheap to compute, but not what other devices sent. wide:
    that, too, so it is sent again. all: everything from the layer's input on."""
    dispatch: Literal["dropless", "capacity"] = "dropless"
    """How tokens reach experts. dropless: each expert has as much room as it needs. capacity: all have equal
    room, and tokens beyond it are dropped."""
    capacity_factor: AboveZero | None = None
    """Room in multiples of an even load, beyond which tokens are dropped. With --dispatch capacity it is the
    room of each expert, 2 if left out. With dropless it is the room of each pair of devices; if left out,
    nothing is dropped."""
    dispatch_payload: Literal["plain", "float8"] = "plain"
    """How tokens travel to experts, and their gradients back: plain as they are, or in eight bits."""
    attention: Literal["auto", "plain", "splash", "cudnn"] = "auto"
    """The kernel of attention. auto takes what suits the devices."""
    matmul: Literal["auto", "plain", "ragged", "megablox", "hopper", "blackwell", "triton", "float8"] = "auto"
    """The kernel of the experts. auto takes what suits the devices; float8 rounds what that multiplies to
    eight bits, as DeepSeek-V3 was trained."""
    shard: Shard = "nothing"
    """What is shared out over devices that would each hold the same. optimizer: the optimizer's state
    (ZeRO-1). parameters: the parameters, too (ZeRO-3). These are gathered once a step, before its first
    microbatch, and are whole until its end."""
    moments: Literal["float32", "bfloat16"] = "float32"
    """What AdamW's two averages are kept in between steps. They are computed in float32, and parameters are
    float32."""
    gradient_sums: Literal["float32", "bfloat16"] = "float32"
    """What gradients are summed up in over the microbatches of a step."""
    overlap: bool = True
    """--no-overlap runs a pair's forward and backward after each other, to compare with the overlap."""
    compiler_option: Annotated[tuple[str, ...], arg(metavar="NAME=VALUE ...")] = ()
    """Options for the compiler besides the recommended ones. It reads True and False for CPU and GPU, true
    and false for TPU."""

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
    def schedule_in_words(self) -> str:
        """Its name, and how finely it is cut where that is not its own: interleaved_1f1b, 4 stages a rank."""
        return self.schedule + (
            "" if self.stages_per_rank is None else f", {self.stages_per_rank} stages a rank"
        )

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
        return dict(pair_of(text, "--compiler-option") for text in self.compiler_option)

    def check(self) -> None:
        """Whether counts are in their range and devices can share a microbatch; ``make_schedule`` checks the rest.

        Raises:
          ValueError: one is not; says which option, and what would do.
        """
        self.check_each()
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

    def check_each(self) -> None:
        """Whether each option by itself can be, whatever the others are.

        Raises:
          ValueError: one cannot; says which, and what it must be.
        """
        for (name,), value, why in out_of_range(self):
            raise ValueError(f"--{name.replace('_', '-')} {value}: {why}")
        _ = self.compiler_options

    def make_schedule(self, num_microbatches: int | None = None) -> Schedule:
        """The schedule that the options name, for all microbatches or for so many.

        Raises:
          ValueError: there is none of that name, or not with these counts, or it is not cut as they say.
        """
        count = self.num_microbatches if num_microbatches is None else num_microbatches
        finer = {} if self.stages_per_rank is None else {"num_stages_per_rank": self.stages_per_rank}
        schedule = make(self.schedule, self.pp, count, finer)
        return schedule if self.max_stash is None else limit_stash(schedule, self.max_stash)


def pair_of(text: str, option: str) -> tuple[str, str]:
    """NAME=VALUE in its parts, as it was given to an option. Raises ValueError where it is not that."""
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        raise ValueError(f"{option} {text}: wants NAME=VALUE")
    return name, value


def numbers_by_name(texts: Iterable[str]) -> dict[str, int | float]:
    """What --set was given. Raises ValueError where one is not NAME=NUMBER."""
    return dict(map(_number_of, texts))


def _number_of(text: str) -> tuple[str, int | float]:
    name, _, value = text.partition("=")
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not (name and math.isfinite(number)):
        raise ValueError(f"--set {text}: wants NAME=NUMBER, such as dim=2048")
    return name.strip().replace("-", "_"), number if set(value) & set(".eE") else int(value)
