"""How a run may end that was well begun. No JAX here: the command line names these before it is loaded."""


class DivergedError(RuntimeError):
    """The loss is no longer a number."""


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be used, or could not be written; says which and what to do."""


class Stopped(Exception):
    """The run was asked to stop, and did after saving.

    Attributes:
      code: what the process exits with.
    """

    def __init__(self, told: str, code: int):
        super().__init__(told)
        self.code = code


DIVERGED = 3
"""Exit code of one process of several whose loss is no number: starting again would not help."""

FAILED = 70
"""Exit code of one process of several after an error that nobody expected; starting again may help."""

BEREFT = 71
"""Exit code of one process of several that noticed that another was gone: it is the other that failed."""


def is_of_others(error: BaseException) -> bool:
    """Whether an error says that another process is gone; those who carry collectives raise nothing narrower."""
    return any(name in str(error) for name in ("Gloo", "NCCL", "coordination service"))
