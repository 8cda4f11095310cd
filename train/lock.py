"""A lock file that one process holds until it ends."""

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class LockHeld(Exception):
    """Another process holds the file. The message says which process on which machine."""


@contextmanager
def hold_lock(file: Path) -> Iterator[None]:
    """Hold a lock file while the context is open. The system releases it when the process ends, however it ends.

    The file's text names the process that held it last. The file stays, so its existence does not mean that it is held.

    Raises:
      LockHeld: another process holds the file.
      OSError: the file cannot be written.
    """
    # Mode "w" would erase the name of the process that holds it.
    with file.open("a+") as opened:
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            opened.seek(0)
            raise LockHeld(opened.read() or "another process") from None
        opened.truncate(0)
        opened.write(f"process {os.getpid()} on {socket.gethostname()}")
        opened.flush()
        yield
