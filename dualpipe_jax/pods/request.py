"""What a dry run is asked; loads no JAX."""

import dataclasses

from dualpipe_jax.pods.plan import Plan


@dataclasses.dataclass(frozen=True)
class Request:
    """What is to be found out.

    Attributes:
      plan: the step.
      target: the devices; None for any, of which nothing can be compiled.
      compile: "pair" (for overlap), "units" (each unit of the engine once, for costs), "usual" (those of most stages,
        for an estimate in a part of the time), "step" (the whole step, with the program's own update), or "nothing":
        memory is counted all the same; "draw": not even that, only whether the options fit is looked at.
        "prefill" or "decode" for layers of serving, the trainer's models'.
      files: what to write of the compiled program, each by its ending: .svg and .png a picture of the pair's
        timeline, .trace the same for Perfetto, any other the program's text.
      compiled: file with the text of a program that is already compiled for the target: only this is read, the
        plan above is not looked at.
      rates: file of measured rates, by which programs are priced; None for the compiler's figures.
      hints: whether to look for options that make a step fit that does not.
      requests: of a device, for serving; None for DeepSeek's.
      log: the file that this process's standard error goes to, where the TPU compiler's statistics are found.
    """

    plan: Plan
    target: str | None
    compile: str
    files: tuple[str, ...] = ()
    compiled: str | None = None
    rates: str | None = None
    hints: bool = False
    requests: int | None = None
    log: str | None = None
