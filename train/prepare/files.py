"""Folders on this machine or behind a URL. Their files are complete or not there, whichever process is killed."""

import contextlib
import io
import json
import os
import re
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from train.data.errors import DataError
from train.data.remote import open_filesystem

Folder = Any
"""A file system of fsspec with a folder as its root, on this machine or elsewhere; cheap to send to a process."""

_PART = f".{uuid.uuid4().hex[:12]}.part"
"""The ending of files that this process is writing. It is unique, because a node that was taken for dead may still
write the same file."""


def open_folder(place: str) -> Folder:
    """The folder at a path or URL, which need not exist. Raises DataError for a URL whose protocol is unknown."""
    filesystem, path = open_filesystem(place)
    # Imported after open_filesystem, which reports a missing fsspec.
    from fsspec.implementations.dirfs import DirFileSystem

    return DirFileSystem(path, filesystem)


def create(folder: Folder) -> None:
    """Make the folder unless it exists. Raises DataError if it cannot be made."""
    try:
        folder.makedirs("", exist_ok=True)
    except OSError as error:
        raise DataError(f"cannot make {url_of(folder)}: {error.strerror or error}") from None


def local_path(folder: Folder) -> Path | None:
    """The path of the folder on this machine; None if it is elsewhere."""
    from fsspec.implementations.local import LocalFileSystem

    return Path(folder.path) if isinstance(folder.fs, LocalFileSystem) else None


def url_of(folder: Folder, name: str = "") -> str:
    """The name of a folder, or of a file in it, for other programs: a path on this machine, a URL elsewhere."""
    path = f"{folder.path}/{name}".rstrip("/")
    return path if local_path(folder) else folder.fs.unstrip_protocol(path)


@contextlib.contextmanager
def local_copies(folder: Folder, names: Sequence[str]) -> Iterator[Path]:
    """A folder on this machine that has these files: the folder itself, or copies while the context is open."""
    if path := local_path(folder):
        yield path
        return
    with tempfile.TemporaryDirectory() as copies:
        folder.get(list(names), [f"{copies}/{name}" for name in names])
        yield Path(copies)


@contextlib.contextmanager
def writing(folder: Folder, name: str) -> Iterator[IO[bytes]]:
    """Open a file for writing. It has another name until its content is on the disk."""
    with folder.open(partial_name(name), "wb") as opened:
        yield opened
        flush_to_disk(opened)
    folder.mv(partial_name(name), name)


def write(folder: Folder, name: str, content: bytes) -> None:
    with writing(folder, name) as opened:
        opened.write(content)


def write_json(folder: Folder, name: str, content: Any) -> None:
    write(folder, name, (json.dumps(content, indent=1) + "\n").encode())


def read_json(folder: Folder, name: str) -> Any:
    """The value in a JSON file; None if there is no such file."""
    try:
        return json.loads(folder.cat_file(name))
    except FileNotFoundError:
        return None


def array_bytes(array: np.ndarray) -> bytes:
    """The content of a .npy file with the array, little-endian."""
    content = io.BytesIO()
    np.save(content, array.astype(array.dtype.newbyteorder("<")))
    return content.getvalue()


def partial_name(name: str) -> str:
    """The name of a file while this process writes it."""
    return f".{name}{_PART}"


def is_partial(name: str) -> bool:
    """Whether a process of this program wrote the file and may have been killed. Other programs use .part, too."""
    return re.fullmatch(r"\..+\.[0-9a-f]{12}\.part", name) is not None


def drop_partial(folder: Folder) -> None:
    """Remove the incomplete files that killed processes left."""
    for name in folder.ls("", detail=False):
        if is_partial(Path(name).name):
            folder.rm_file(name)


def flush_to_disk(opened: Any) -> None:
    """Wait until what was written is on this machine's disk, so that no file has its name without its content."""
    opened.flush()
    # Files elsewhere have no fileno: closing them writes their content.
    with contextlib.suppress(AttributeError, io.UnsupportedOperation):
        os.fsync(opened.fileno())
