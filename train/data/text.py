"""Documents in files of text, and which of them are held out."""

import hashlib
import os
import sysconfig
from collections.abc import Iterable, Sequence
from pathlib import Path

from train.data.errors import DataError

_LEFT_OUT = {"site-packages", "test", "tests", "idle_test", "lib2to3", "__pycache__"}


def standard_library() -> list[Path]:
    """The sources of the running Python's standard library: text that every machine has."""
    found = []
    for folder, subfolders, names in os.walk(sysconfig.get_paths()["stdlib"]):
        subfolders[:] = [name for name in subfolders if name not in _LEFT_OUT]
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted(found)


def read_documents(paths: Sequence[Path]) -> list[bytes]:
    """Each file, or all text under a folder, once, in an order that says nothing of them; empty ones are dropped.

    The standard library if no paths are given.

    Raises:
      DataError: a path is missing, is not text, or nothing is left to read.
    """
    documents = {hashlib.sha256(text).digest(): text for text in _texts(paths) if text}
    if not documents:
        raise DataError(f"--data: nothing to read in {', '.join(map(str, paths)) or 'the standard library'}")
    return [documents[digest] for digest in sorted(documents)]


def split(documents: Sequence[bytes]) -> tuple[list[bytes], list[bytes]]:
    """Documents to train on, and a tenth that is held out: of fewer than ten documents the last tenth of each."""
    tenth = len(documents) // 10
    if tenth:
        return list(documents[tenth:]), list(documents[:tenth])
    both = [cut(text, 0.1) for text in documents]
    return [train for train, _ in both], [heldout for _, heldout in both]


def cut(text: bytes, share: float) -> tuple[bytes, bytes]:
    """A document without its last ``share``, and that; never within a character of UTF-8."""
    place = len(text) - int(len(text) * share)
    while place < len(text) and text[place] & 0xC0 == 0x80:
        place += 1
    return text[:place], text[place:]


def is_text(content: bytes) -> bool:
    """Whether it has no zero bytes."""
    return 0 not in content


def _texts(paths: Sequence[Path]) -> Iterable[bytes]:
    if not paths:
        yield from (path.read_bytes() for path in standard_library())
    for path in paths:
        if path.is_dir():
            inside = sorted(file for file in path.rglob("*") if file.is_file())
            yield from (text for file in inside if is_text(text := _read(file)))
        elif not is_text(text := _read(path)):
            raise DataError(
                f"--data: {path} is not text (it holds zero bytes); for Parquet and the like run scripts/prepare first"
            )
        else:
            yield text


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"--data: cannot read {path}: {error.strerror or error}") from None
