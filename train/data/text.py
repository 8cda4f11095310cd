"""Documents in files of text, and which of them are held out."""

import functools
import hashlib
import os
import sysconfig
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from train.data.errors import DataError
from train.data.inputs import COMPRESSED, Piece, documents, kind_of
from train.data.manifest import has_shards
from train.data.records import DATASET_INFO
from train.data.vocabulary import is_text

MAX_SHOWN = 10
"""The largest number of skipped files that are named."""
TEXT_KEY = "text"
"""The field or column that holds a document. Data with another one must be prepared: scripts/prepare --text-key."""
_LEFT_OUT = {"site-packages", "test", "tests", "idle_test", "lib2to3", "__pycache__"}


def standard_library() -> list[Path]:
    """The sources of the running Python's standard library: text that every machine has."""
    found = []
    for folder, subfolders, names in os.walk(sysconfig.get_paths()["stdlib"]):
        subfolders[:] = [name for name in subfolders if name not in _LEFT_OUT]
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted(found)


def read_documents(paths: Sequence[Path]) -> tuple[list[bytes], list[str]]:
    """The documents of files, and of all files under folders but hidden ones; of the standard library without paths.

    Files are text, JSON lines and Parquet with a field or column "text", also compressed.

    Returns:
      The documents, each once and none empty, in the order of their hashes, which is a shuffle; and the reasons, one
      for each file of a folder that could not be read.

    Raises:
      DataError: a path is missing or is not text, or nothing is left to read.
    """
    skipped: list[str] = []
    documents = {hashlib.sha256(text).digest(): text for text in _texts(paths, skipped) if text}
    if not documents:
        where = ", ".join(map(str, paths)) or "the standard library"
        raise DataError("\n".join([f"--data: nothing to read in {where}", *_shown(skipped)]))
    return [documents[digest] for digest in sorted(documents)], skipped


def describe_skipped(skipped: Sequence[str]) -> str:
    """Lines with the number of skipped files and the first ten reasons; "" if none was skipped."""
    if not skipped:
        return ""
    return "\n".join(
        [f"skipped    {len(skipped)} of the files of --data, each for a reason", *_shown(skipped)]
    )


def _shown(skipped: Sequence[str]) -> list[str]:
    more = [f"  and {len(skipped) - MAX_SHOWN} more"] if len(skipped) > MAX_SHOWN else []
    # A file's name need not be UTF-8, and a terminal refuses what is not.
    shown = [reason.encode(errors="backslashreplace").decode() for reason in skipped[:MAX_SHOWN]]
    return [f"  {reason}" for reason in shown] + more


def hold_out_tenth(documents: Sequence[bytes]) -> tuple[list[bytes], list[bytes]]:
    """(documents to train on, held-out tenth of the documents); of fewer than ten documents the last tenth of each."""
    tenth = len(documents) // 10
    if tenth:
        return list(documents[tenth:]), list(documents[:tenth])
    both = [split_end(text, 0.1) for text in documents]
    return [train for train, _ in both], [heldout for _, heldout in both]


def split_end(text: bytes, share: float) -> tuple[bytes, bytes]:
    """Split a document before its last ``share``, but never within a character of UTF-8."""
    place = len(text) - int(len(text) * share)
    while place < len(text) and text[place] & 0xC0 == 0x80:
        place += 1
    return text[:place], text[place:]


def _texts(paths: Sequence[Path], skipped: list[str]) -> Iterable[bytes]:
    is_prepared = functools.cache(has_shards)  # once for all files of a folder
    if not paths:
        yield from (path.read_bytes() for path in standard_library())
    for path in paths:
        if not path.is_dir():
            yield from _read_file(path, is_prepared)
            continue
        inside = (file for file in path.rglob("*") if file.is_file())
        for file in sorted(file for file in inside if not is_hidden(file.relative_to(path))):
            try:
                yield from _read_file(file, is_prepared)
            except DataError as error:
                skipped.append(str(error).removeprefix("--data: "))


def is_hidden(path: Path) -> bool:
    """Whether a part of ``path`` begins with a dot, like .git and .env, which are not meant to be read."""
    return any(part.startswith(".") for part in path.parts)


def _read_file(path: Path, is_prepared: Callable[[Path], bool]) -> list[bytes]:
    if path.with_name(DATASET_INFO).is_file():
        raise DataError(f"--data: {path} is a part of a data set: name the set, {path.parent}, to read it")
    if is_prepared(path.parent):
        raise DataError(
            f"--data: {path} is a part of prepared text: name its folder, {path.parent}, to train on it"
        )
    kind = kind_of(str(path))
    if kind == "text" and path.suffix not in COMPRESSED:
        try:
            found = [path.read_bytes()]
        except OSError as error:
            raise DataError(f"--data: cannot read {path}: {error.strerror or error}") from None
    else:
        found = list(documents(Piece(kind, (str(path),)), TEXT_KEY))
    if not all(map(is_text, found)):
        raise DataError(
            f"--data: {path} is no text: it holds zero bytes, as UTF-16 and most other formats do"
        )
    return found
