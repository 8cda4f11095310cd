"""Options of the commands that compile for a target: which program."""

import dataclasses
from pathlib import Path
from typing import Annotated, Literal

import tyro

from dualpipe_jax.command.options import Count

Files = Annotated[tuple[Path, ...], tyro.conf.arg(metavar="FILE ...", aliases=["-o"], help_behavior_hint="")]
"""What to write of a compiled program."""

RatesFile = Annotated[Path | None, tyro.conf.arg(name="rates", metavar="FILE", help_behavior_hint="")]
"""Measured rates."""


@dataclasses.dataclass(frozen=True)
class Program:
    """A training step of a DeepSeek-V3-like model. ``train.dryrun`` builds it."""

    model: str = "v3"
    """Model size: v3, v2, v2-lite, 67b-a2b, small, tiny or byte."""
    layers_per_stage: Count = None
    """Layers with experts in each stage, instead of the model's own number, shared out as equally as can be."""
    change: Annotated[tuple[str, ...], tyro.conf.arg(metavar="FIELD=NUMBER ...")] = ()
    """Other numbers of the model: dim=2048 expert_hidden=512."""
    schedule: str = "dualpipe"
    """Order of forwards and backwards; see `dualpipe choose`."""
    max_stash: int | None = None
    """How many microbatches of a rank may wait for their weights' gradients, for which memory is needed; further
    backwards are whole. As many as the schedule asks for if left out."""
    pp: int = 4
    """Pipeline ranks."""
    ep: int = 4
    """Expert-parallel devices of each rank."""
    microbatches: Count = None
    """Microbatches of a step, over all pipes; 4 for each rank if left out."""
    microbatch_size: Count = None
    """Sequences of a microbatch, shared out over ep; one for each device if left out."""
    sequence: int = 4096
    """Tokens of a sequence."""
    remat: Literal["none", "dots", "all"] = "none"
    """What layers compute again in the backward: none keeps what it needs, dots keeps matrix products only, all
    keeps a layer's input only."""
    dispatch: Literal["capacity", "dropless"] = "capacity"
    """How tokens reach experts."""
    capacity_factor: float = 1.0
    """Room in multiples of an even load, where dispatch is capacity."""
    dispatch_payload: Literal["plain", "float8"] = "plain"
    """What travels to experts: tokens and, back through them, gradients as they are, or in eight bits."""
    attention: Literal["auto", "plain", "splash", "cudnn"] = "auto"
    """What computes attention: auto is what suits the target."""
    matmul: Literal["auto", "plain", "ragged", "megablox", "float8"] = "auto"
    """What computes the experts."""
    shard_optimizer: bool = False
    """Share the optimizer's state of replicated parameters out over their devices (ZeRO, first stage)."""
    moments: Literal["float32", "bfloat16"] = "float32"
    """What AdamW's two averages are kept in between steps."""
    gradient_sums: Literal["float32", "bfloat16"] = "float32"
    """What gradients are summed in over the microbatches of a step."""
    serialised: bool = False
    """Run the pair's forward and backward after each other: what the overlap is to be compared with."""
    compiler_option: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME=VALUE ...")] = ()
    """Options for the compiler besides the recommended ones."""
