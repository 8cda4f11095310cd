"""What is chosen of a training step on a pod: which program, and how it is cut and ordered; loads no JAX."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import tyro

from dualpipe_jax.pods.plain import filled
from dualpipe_jax.schedule import Schedule, limit_stash
from dualpipe_jax.schedule.names import find

Count = Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="")]
Shard = Literal["nothing", "optimizer", "parameters"]
ROOM: Mapping[str, float | None] = {"dropless": None, "capacity": 2.0}
"""Of each way in which tokens reach experts, the room that it has if none is asked for."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """A training step: of one of DeepSeek's models, or of a program of your own."""

    model: Annotated[str, tyro.conf.arg(name="program", aliases=["--model"], metavar="NAME")] = "v3"
    """Which program: v3, v2, v2-lite, 67b-a2b, small, tiny or byte of this repository, or a function of your own,
    FILE.py:name or package.module:name, that returns a dualpipe_jax.pods.Program."""
    layers_per_stage: Count = None
    """Layers with experts in each stage, instead of the model's own number, shared out as equally as can be."""
    stage_layers: Annotated[tuple[int, ...], tyro.conf.arg(metavar="INT ...")] = ()
    """Layers of each stage in model order, dense ones included; the program's own choice if left out."""
    change: Annotated[tuple[str, ...], tyro.conf.arg(metavar="FIELD=NUMBER ...")] = ()
    """Other numbers of the model, dim=2048 expert_hidden=512; of your own program keyword arguments."""
    schedule: str = "dualpipe"
    """Order of forwards and backwards; see `dualpipe choose`."""
    max_stash: int | None = None
    """How many microbatches of a rank may wait for their weights' gradients, for which memory is needed; further
    backwards are whole. As many as the schedule asks for if left out."""
    pp: int = 4
    """Pipeline ranks."""
    ep: int = 4
    """Expert-parallel devices of each rank."""
    ep_nodes: int = 1
    """Nodes that these lie on, for dispatch in two hops: a token crosses to a node at most once."""
    dp: int = 1
    """Replicas of the whole, each with a part of every microbatch."""
    microbatches: Count = None
    """Microbatches of a step, over all pipes; 4 for each rank if left out."""
    microbatch_size: Count = None
    """Sequences of a microbatch, shared out over dp and ep; one for each device if left out."""
    sequence: int = 4096
    """Tokens of a sequence."""
    remat: Literal["none", "dots", "wide", "all"] = "none"
    """What layers compute again in the backward: none keeps what it needs, dots keeps matrix products only, wide
    keeps what is dear and narrow, all keeps a layer's input only."""
    dispatch: Literal["dropless", "capacity"] = "dropless"
    """How tokens reach experts: dropless gives every expert as much room as it needs, capacity gives all equal room."""
    capacity_factor: Annotated[float | None, tyro.conf.arg(metavar="FLOAT", help_behavior_hint="")] = None
    """Room in multiples of an even load, beyond which tokens are dropped: of each expert for capacity (2 if left out),
    of each pair of devices for dropless (if left out, as much as can ever be needed)."""
    dispatch_payload: Literal["plain", "float8"] = "plain"
    """What travels to experts: tokens and, back through them, gradients as they are, or in eight bits."""
    attention: Literal["auto", "plain", "splash", "cudnn"] = "auto"
    """What computes attention: auto is what suits the target."""
    matmul: Literal["auto", "plain", "ragged", "megablox", "float8"] = "auto"
    """What computes the experts."""
    shard: Shard = "nothing"
    """What is shared out over devices that would each hold the same (ZeRO): nothing, the optimizer's state, or
    parameters, too, which are gathered once a step."""
    moments: Literal["float32", "bfloat16"] = "float32"
    """What AdamW's two averages are kept in between steps."""
    gradient_sums: Literal["float32", "bfloat16"] = "float32"
    """What gradients are summed in over the microbatches of a step."""
    serialised: bool = False
    """Run the pair's forward and backward after each other: what the overlap is to be compared with."""
    compiler_option: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME=VALUE ...")] = ()
    """Options for the compiler besides the recommended ones."""

    @property
    def room(self) -> float | None:
        """``capacity_factor`` with its default, which the trainer has, too; None: as much as can ever be needed."""
        return ROOM[self.dispatch] if self.capacity_factor is None else self.capacity_factor

    @property
    def num_microbatches(self) -> int:
        """The number of microbatches of a step, over all pipes."""
        return self.microbatches or 4 * self.pp

    @property
    def batch(self) -> int:
        """Sequences of a microbatch."""
        return self.microbatch_size or self.parts

    @property
    def parts(self) -> int:
        """Devices that share a microbatch."""
        return self.dp * self.ep

    @property
    def num_devices(self) -> int:
        """The number of devices of a step."""
        return self.dp * self.pp * self.ep

    @property
    def layout(self) -> str:
        """Devices in words: pp 16 x ep 64, and dp before it where there are replicas."""
        return ("" if self.dp == 1 else f"dp {self.dp} x ") + f"pp {self.pp} x ep {self.experts_on}"

    @property
    def changes(self) -> dict[str, int | float]:
        """``change`` by name.

        Raises:
          ValueError: one is not FIELD=NUMBER.
        """
        return dict(map(_assignment, self.change))

    @property
    def experts_on(self) -> str:
        """Devices of the expert axis in words: 64, or 8 x 8 on nodes."""
        nodes = self.ep_nodes
        return str(self.ep) if nodes == 1 else f"{self.ep} ({nodes} nodes x {self.ep // nodes})"

    def make_schedule(self) -> Schedule:
        """The schedule that it names.

        Raises:
          ValueError: there is none of that name, or not with these counts.
        """
        schedule = find(self.schedule)(self.pp, self.num_microbatches)
        if self.max_stash is None:
            return schedule
        if self.max_stash < 0:
            raise ValueError(f"--max-stash {self.max_stash}: must be 0 or more")
        return limit_stash(schedule, self.max_stash)


def read_plan(file: Path) -> Plan:
    """The plan that a file of `dualpipe plan` holds.

    Raises:
      ValueError: it cannot be read, or holds none; says where.
    """
    where = f"--plan {file}"
    try:
        found = json.loads(file.read_text())
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise ValueError(f"{where}: cannot read it: {getattr(error, 'strerror', None) or error}") from None
    if not isinstance(found, dict) or not isinstance(found.get("plan"), dict):
        raise ValueError(f"{where}: holds no plan; `dualpipe plan -o {file.name}` writes one")
    unknown = found["plan"].keys() - {field.name for field in dataclasses.fields(Plan)}
    if unknown:
        raise ValueError(f"{where}: a plan has no {', '.join(sorted(unknown))}; it is of another version")
    return filled(Plan, found["plan"])


def _assignment(text: str) -> tuple[str, int | float]:
    name, value = pair_of(text)
    try:
        return name, float(value) if "." in value else int(value)
    except ValueError:
        raise ValueError(f"--change {text}: wants FIELD=NUMBER, for instance dim=2048") from None


def pair_of(text: str) -> tuple[str, str]:
    """NAME=VALUE in its parts. Raises ValueError where it is not that."""
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        raise ValueError(f"{text!r}: wants NAME=VALUE")
    return name, value
