"""A file that one process holds, for as long as it lives."""

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class Held(Exception):
    """Another process holds the file; says which, on which machine."""


@contextmanager
def locked(file: Path) -> Iterator[None]:
    """Hold a file. The system lets go of it when the process ends, however it ends.

    What the file says is who held it last. That it is there says nothing.

    Raises:
      Held: another process does.
      OSError: the file cannot be written.
    """
    with file.open("a+") as opened:  # "w" would wipe out who holds it
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            opened.seek(0)
            raise Held(opened.read() or "another process") from None
        opened.truncate(0)
        opened.write(f"process {os.getpid()} on {socket.gethostname()}")
        opened.flush()
        yield
