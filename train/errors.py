"""Errors that may end a run after its start, and exit codes. Imports no JAX: they are used before JAX is loaded."""


class DivergedError(RuntimeError):
    """The loss spiked, or the loss or gradient is not finite, and going back was not wanted or did not help."""


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be used, or could not be written. The message says which and what to do."""


class Stopped(Exception):
    """The run was asked to stop, and stopped after saving.

    Attributes:
      code: the exit code of the process.
    """

    def __init__(self, message: str, code: int):
        super().__init__(message)
        self.code = code


DIVERGED = 3
"""Exit code of one process of several after a DivergedError; starting again would not help."""

FAILED = 70
"""Exit code of one process of several after an unexpected error; starting again may help."""

PEER_LOST = 71
"""Exit code of one process of several that noticed that another process was gone, which is the one that failed."""


def is_peer_lost(error: BaseException) -> bool:
    """Whether an error means that another process is gone, judged by its text: collectives raise no narrower type."""
    return any(name in str(error) for name in ("Gloo", "NCCL", "coordination service"))
