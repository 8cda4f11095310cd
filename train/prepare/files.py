"""Files that are whole or not there, whenever the process is killed."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np


def write(file: Path, content: bytes) -> None:
    """Write under another name, to the disk, and rename."""
    part = partial(file)
    with part.open("wb") as opened:
        opened.write(content)
        settle(opened)
    part.replace(file)


def write_json(file: Path, content: Any) -> None:
    write(file, (json.dumps(content, indent=1) + "\n").encode())


def write_array(file: Path, array: np.ndarray) -> None:
    """Like ``write``; .npy, little-endian."""
    part = partial(file)
    with part.open("wb") as opened:
        np.save(opened, array.astype(array.dtype.newbyteorder("<")))
        settle(opened)
    part.replace(file)


def partial(file: Path) -> Path:
    """The name of a file while it is written."""
    return file.with_name(f".{file.name}.part")


def settle(opened: Any) -> None:
    """Wait until what was written is on the disk: a name must not outlive its content."""
    opened.flush()
    os.fsync(opened.fileno())
