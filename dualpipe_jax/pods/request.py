"""The request to a dry run. Loads no JAX."""

import dataclasses

from dualpipe_jax.pods.plan import Plan


@dataclasses.dataclass(frozen=True)
class Request:
    """A request to a dry run.

    Attributes:
      plan: the plan of the step.
      target: the name of the target.
      compile: the part of the step to compile:
        "pair": an overlapped pair, for the overlap.
        "units": each unit of the engine once, for costs.
        "usual": the units of most stages, for an estimate in less time.
        "step": the whole step, with the program's own update.
        "nothing": no part; memory is counted all the same.
        "draw": no part, and nothing is counted; only the options are checked.
        "prefill" or "decode": layers of a serving step, of the trainer's models.
      files: files to write about the compiled program, each by its ending: .svg and .png a picture of the
        pair's timeline, .trace the same for Perfetto, any other the program's text.
      compiled: a file with the text of a program that is already compiled for the target. Only this file is
        read; ``plan`` is ignored.
      rates: a file of measured rates, by which programs are priced; None: the compiler's figures.
      hints: whether to look for options that make a step fit, if it does not, and to price other schedules.
      requests: the number of requests per device, for serving; None: as in DeepSeek's profiles.
      log: the file that receives this process's standard error, where the TPU compiler writes its statistics.
    """

    plan: Plan
    target: str
    compile: str
    files: tuple[str, ...] = ()
    compiled: str | None = None
    rates: str | None = None
    hints: bool = False
    requests: int | None = None
    log: str | None = None
