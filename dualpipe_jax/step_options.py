"""The options of a training step: how it is cut over devices, ordered, and fitted into their memory. Loads no JAX.

`dualpipe plan`, `dryrun` and `overlap`, `scripts/train` and Python users share this one class, so that each
option and its help are written once.
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
DEFAULT_CAPACITY_FACTOR: Mapping[str, float | None] = {"dropless": None, "capacity": 2.0}
"""The default of ``capacity_factor`` for each ``dispatch``, in multiples of an even load; None: nothing is dropped."""
BOUNDED = 1.25
"""The ``capacity_factor``, in multiples of an even load, to take where room for all tokens does not fit into
memory. In DeepSeek-V3's layers, with 64 devices for a microbatch, 0.00013 % of the assignments exceed it if
all experts are equally likely."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepOptions:
    """The options of a training step that do not depend on its model."""

    schedule: Annotated[str, arg(metavar="{" + ",".join(SCHEDULES) + "}")] = "dualpipe"
    """The schedule: the order of forwards and backwards on the pipeline's ranks. See `dualpipe choose`."""
    stages_per_rank: Count = None
    """Number of stages of each rank, for interleaved schedules, which have 2 if it is left out. With more
    stages, bubbles are shorter, and stages' inputs and outputs are sent more often."""
    max_stash: NotNegative | None = None
    """Number of split backwards of a rank whose weight gradients may wait at one time; each takes memory.
    Backwards beyond that number are not split. If left out, as many as the schedule asks for."""
    pp: AtLeastOne = 4
    """Number of pipeline ranks."""
    ep: AtLeastOne = 4
    """Number of expert-parallel devices of each rank. A step needs dp x pp x ep devices."""
    ep_nodes: AtLeastOne = 1
    """Number of nodes over which the --ep devices are spread. With more than one, tokens are dispatched in
    two hops, and each token is sent to a node at most once."""
    dp: AtLeastOne = 1
    """Number of replicas of the whole pipeline. Each has a part of every microbatch."""
    microbatches: Count = None
    """Number of microbatches of a step, over all pipes. If left out, 4 for each rank."""
    microbatch_size: Count = None
    """Number of sequences of a microbatch, shared out over dp and ep. If left out, one for each device."""
    sequence: Count = None
    """Number of tokens of a sequence. If left out, as many as the model's recipe has."""
    stage_layers: Annotated[tuple[int, ...], arg(metavar="INT ...")] = ()
    """Number of layers of each stage in model order, dense layers included. If left out, the program chooses:
    the models here balance the time of their stages."""
    precision: Literal["float32", "bfloat16"] | None = None
    """The dtype of activations. If left out, a run takes float32 on CPU and bfloat16 on accelerators, and a
    plan takes the model's own. Parameters are float32, and by default the sums of their gradients too."""
    remat: Remat = "none"
    """What layers compute again in the backward. none: nothing, all that it needs is kept. keys: norms, keys
    and values. local: queries, too, so all that is wide and cheap to compute, but not what other devices
    sent. wide: also what other devices sent, which is sent again. all: everything from the layer's input
    on."""
    dispatch: Literal["dropless", "capacity"] = "dropless"
    """How tokens reach experts. dropless: each expert has as much room as it needs. capacity: all experts
    have equal room, and tokens beyond it are dropped."""
    capacity_factor: AboveZero | None = None
    """Room in multiples of an even load, beyond which tokens are dropped. With --dispatch capacity it is the
    room of each expert, 2 if left out. With dropless it is the room of each pair of devices; if left out,
    nothing is dropped."""
    dispatch_payload: Literal["plain", "float8"] = "plain"
    """The form in which tokens are sent to experts, and their gradients back. plain: in their own dtype.
    float8: in eight bits."""
    attention: Literal["auto", "plain", "splash", "cudnn"] = "auto"
    """The kernel of attention. auto takes the one that suits the devices."""
    matmul: Literal["auto", "plain", "ragged", "megablox", "hopper", "blackwell", "triton", "float8"] = "auto"
    """The kernel of the experts' matrix products. auto takes the one that suits the devices; float8 takes the
    same, and rounds both factors of each product to eight bits, as DeepSeek-V3 was trained."""
    shard: Shard = "nothing"
    """What is divided among devices that would otherwise each hold all of it. optimizer: the optimizer's
    state (ZeRO-1). parameters: the parameters, too (ZeRO-3). Parameters are gathered once a step, before its
    first microbatch, and are whole until its end."""
    moments: Literal["float32", "bfloat16"] = "float32"
    """The dtype in which AdamW's two averages are kept between steps. They are computed in float32, and
    parameters are float32."""
    gradient_sums: Literal["float32", "bfloat16"] = "float32"
    """The dtype in which gradients are summed over the microbatches of a step."""
    overlap: bool = True
    """--no-overlap runs a pair's forward and backward after each other, to compare with the overlap."""
    compiler_option: Annotated[tuple[str, ...], arg(metavar="NAME=VALUE ...")] = ()
    """Options for the compiler besides the recommended ones. Booleans are True and False for CPU and GPU,
    true and false for TPU."""

    def __post_init__(self) -> None:
        """Replace an alias of a schedule by its name, "1F1B" by "one_f_one_b": runs and plans are compared by it."""
        if is_known(self.schedule):
            object.__setattr__(self, "schedule", find(self.schedule).__name__)

    @property
    def room(self) -> float | None:
        """``capacity_factor`` or its default, in multiples of an even load; None: room for all that can ever come."""
        return (
            DEFAULT_CAPACITY_FACTOR[self.dispatch] if self.capacity_factor is None else self.capacity_factor
        )

    @property
    def num_microbatches(self) -> int:
        """The number of microbatches of a step, over all pipes."""
        return 4 * self.pp if self.microbatches is None else self.microbatches

    @property
    def batch(self) -> int:
        return self.devices_per_microbatch if self.microbatch_size is None else self.microbatch_size

    @property
    def devices_per_microbatch(self) -> int:
        """The number of devices that share a microbatch."""
        return self.dp * self.ep

    @property
    def num_devices(self) -> int:
        return self.dp * self.pp * self.ep

    @property
    def layout(self) -> str:
        """The mesh in words: "pp 16 x ep 64", or "dp 2 x pp 16 x ep 64" with replicas."""
        return ("" if self.dp == 1 else f"dp {self.dp} x ") + f"pp {self.pp} x ep {self.ep_in_words}"

    @property
    def schedule_in_words(self) -> str:
        """The schedule's name, and ``stages_per_rank`` if it was given: "interleaved_1f1b, 4 stages a rank"."""
        return self.schedule + (
            "" if self.stages_per_rank is None else f", {self.stages_per_rank} stages a rank"
        )

    @property
    def ep_in_words(self) -> str:
        """The devices of the expert axis in words: "64", or "64 (8 nodes x 8)" on several nodes."""
        nodes = self.ep_nodes
        return str(self.ep) if nodes == 1 else f"{self.ep} ({nodes} nodes x {self.ep // nodes})"

    @property
    def compiler_options(self) -> dict[str, str]:
        """The values of ``compiler_option`` by name.

        Raises:
          ValueError: an option is not NAME=VALUE.
        """
        return dict(map(_pair_of, self.compiler_option))

    def check(self) -> None:
        """Check ranges, and that devices can share a microbatch; ``make_schedule`` checks the rest.

        Raises:
          ValueError: an option is wrong; says which one, and what would be right.
        """
        self.check_each()
        if self.ep % self.ep_nodes:
            raise ValueError(
                f"--ep {self.ep} --ep-nodes {self.ep_nodes}: as many devices on each node; give a number of nodes that "
                "divides --ep"
            )
        if self.batch % self.devices_per_microbatch:
            whose = f"--ep {self.ep}" if self.dp == 1 else f"--dp {self.dp} x --ep {self.ep}"
            near = self.devices_per_microbatch * max(1, self.batch // self.devices_per_microbatch)
            raise ValueError(
                f"--microbatch-size {self.batch}: {whose} devices must share it equally, try {near}"
            )

    def check_each(self) -> None:
        """Check each option by itself, without regard to the others.

        Raises:
          ValueError: an option is outside its range; says which one, and what it must be.
        """
        for (name,), value, why in out_of_range(self):
            raise ValueError(f"--{name.replace('_', '-')} {value}: {why}")
        _ = self.compiler_options

    def make_schedule(self, num_microbatches: int | None = None) -> Schedule:
        """The schedule that the options name, for ``num_microbatches`` or, if None, for all microbatches of a step.

        Raises:
          ValueError: there is no schedule of that name, it does not exist for these numbers of ranks and
            microbatches, or it cannot be cut into ``stages_per_rank``.
        """
        count = self.num_microbatches if num_microbatches is None else num_microbatches
        finer = {} if self.stages_per_rank is None else {"num_stages_per_rank": self.stages_per_rank}
        schedule = make(self.schedule, self.pp, count, finer)
        return schedule if self.max_stash is None else limit_stash(schedule, self.max_stash)


def _pair_of(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        raise ValueError(f"--compiler-option {text}: wants NAME=VALUE")
    return name, value


def numbers_by_name(texts: Iterable[str]) -> dict[str, int | float]:
    """The values of --set by name. Raises ValueError for a text that is not NAME=NUMBER."""
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
