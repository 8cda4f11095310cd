"""What a dry run is asked."""

import dataclasses
from typing import Any

from dualpipe_jax.command.options import Shape, make
from dualpipe_jax.command.program import Program
from dualpipe_jax.schedule import limit_stash

UNITS = ("FB", "F", "B", "I", "W")


@dataclasses.dataclass(frozen=True)
class Request:
    """What is to be found out.

    Attributes:
      program: the step.
      target: the devices; None for any, of which nothing can be compiled.
      compile: "pair" (for overlap), "units" (each unit of the engine once, for costs), "step" (the trainer's whole
        step), "bare" or "bare_ordered" (see ``train.bare``, in the compiler's order or in ours), "prefill" or "decode"
        (see ``train.serving``), or "nothing": memory is counted all the same.
      files: what to write of the compiled program, each by its ending: .svg and .png a picture of the pair's
        timeline, .trace the same for Perfetto, any other the program's text.
      compiled: file with the text of a program that is already compiled for the target: only this is read, the
        program above is not looked at.
      rates: file of measured rates, by which programs are priced; None for the compiler's figures.
      requests: of a device, for serving; None for DeepSeek's.
      log: the file that this process's standard error goes to, where the TPU compiler's statistics are found.
    """

    program: Program
    target: str | None
    compile: str
    files: tuple[str, ...] = ()
    compiled: str | None = None
    rates: str | None = None
    requests: int | None = None
    log: str | None = None


def make_schedule(program: Program) -> Any:
    """The schedule that a program names."""
    num_microbatches = program.microbatches or 4 * program.pp
    schedule = make(program.schedule, program.pp, num_microbatches, Shape())
    if program.max_stash is None:
        return schedule
    if program.max_stash < 0:
        raise ValueError(f"--max-stash {program.max_stash}: must be 0 or more")
    return limit_stash(schedule, program.max_stash)
