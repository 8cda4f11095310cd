"""Files that are whole or not there, whenever the process is killed."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np


@contextmanager
def writing(file: Path) -> Iterator[IO[bytes]]:
    """A file to be written, under another name until it is on the disk."""
    with partial(file).open("wb") as opened:
        yield opened
        settle(opened)
    partial(file).replace(file)


def write(file: Path, content: bytes) -> None:
    with writing(file) as opened:
        opened.write(content)


def write_json(file: Path, content: Any) -> None:
    write(file, (json.dumps(content, indent=1) + "\n").encode())


def write_array(file: Path, array: np.ndarray) -> None:
    """Like ``write``; .npy, little-endian."""
    with writing(file) as opened:
        np.save(opened, array.astype(array.dtype.newbyteorder("<")))


def partial(file: Path) -> Path:
    """The name of a file while it is written."""
    return file.with_name(f".{file.name}.part")


def settle(opened: Any) -> None:
    """Wait until what was written is on the disk: a name must not outlive its content."""
    opened.flush()
    os.fsync(opened.fileno())
