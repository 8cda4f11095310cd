"""Files of records and data sets as sources: ArrayRecord by Grain, and Hugging Face ``datasets`` saved to disk.

Both allow random access to records. They are read completely when they are opened, to learn the lengths of their
documents; after that a batch reads only its own documents. Their text is turned into tokens each time it is read, so
data for long runs is better prepared.
"""

import hashlib
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from dualpipe_jax.installing import install_command
from train.data.corpus import Source
from train.data.errors import DataError
from train.data.streams import DocumentStream
from train.data.vocabulary import Vocabulary, is_text

ARRAY_RECORD = (".array_record", ".arrayrecord")
DATASET_INFO = "dataset_info.json"
"""The file that marks the folder of a data set saved by ``datasets``; it is next to the records."""
BATCH = 1024
"""The number of documents that are turned into tokens at once, to learn their lengths."""


class Records(Protocol):
    def __len__(self) -> int: ...

    def __getitem__(self, number: int) -> bytes:
        """Record ``number``, as UTF-8 text."""
        ...


def is_records(path: Path) -> bool:
    """Whether a path is an ArrayRecord file or a set that ``datasets`` saved. Raises DataError for several sets."""
    if (path / "dataset_dict.json").is_file():
        inside = ", ".join(sorted(str(info.parent) for info in path.glob(f"*/{DATASET_INFO}")))
        raise DataError(f"--data {path}: holds several data sets; name those to be read: {inside}")
    return path.suffix in ARRAY_RECORD or (path / DATASET_INFO).is_file()


def open_records(path: Path, vocabulary: Vocabulary) -> Source:
    """Open records as a source, with a tenth of the documents held out; order and split as in ``train.data.text``.

    The documents are not kept in memory, only the length of each and its place in the order of digests.

    Raises:
      DataError: the library is missing, the records are not text, or there are fewer than ten documents.
    """
    documents = read_records(path)
    found: dict[bytes, tuple[int, int]] = {}
    for first in range(0, len(documents), BATCH):
        numbers = range(first, min(first + BATCH, len(documents)))
        texts = [documents[number] for number in numbers]
        for number, text, tokens in zip(numbers, texts, vocabulary.encode(texts), strict=True):
            if vocabulary.file is None and not is_text(text):
                raise DataError(f"--data {path}: record {number} is not text (it holds zero bytes)")
            if text:
                found.setdefault(hashlib.sha256(text).digest(), (number, len(tokens)))
    if len(found) < 10:
        raise DataError(f"--data {path}: {len(found)} documents; ten at least are needed to hold a tenth out")
    numbers, lengths = np.array([found[digest] for digest in sorted(found)], np.int64).T
    content = hashlib.sha256(b"".join(sorted(found)) + vocabulary.fingerprint.encode())

    def read(number: int) -> np.ndarray:
        (tokens,) = vocabulary.encode([documents[number]])
        return tokens

    tenth = len(found) // 10
    train, heldout = (
        DocumentStream(read, numbers[part], lengths[part]) for part in (slice(tenth, None), slice(tenth))
    )
    weight = float(lengths[tenth:].sum())
    return Source(str(path), train, heldout, len(found), content.hexdigest(), weight)


def read_records(path: Path, key: str = "text") -> Records:
    """The documents of a file or folder. Raises DataError if the library is missing or there is no such column."""
    return _array_record(path) if path.suffix in ARRAY_RECORD else _Dataset(path, key)


def _array_record(path: Path) -> Records:
    try:
        import grain
    except ModuleNotFoundError:
        raise DataError(f"--data {path}: needs Grain: {install_command('grain', 'array_record')}") from None
    if not path.is_file():
        raise DataError(f"--data: cannot read {path}: No such file or directory")
    try:
        return grain.sources.ArrayRecordDataSource([str(path)])
    except RuntimeError as error:
        raise DataError(
            f"--data: cannot read {path}: it is damaged or no ArrayRecord file: {error}"
        ) from None


class _Dataset:
    def __init__(self, path: Path, key: str):
        try:
            import datasets
        except ModuleNotFoundError:
            raise DataError(
                f"--data {path}: needs Hugging Face's datasets: {install_command('datasets')}"
            ) from None
        try:
            self._rows: Any = datasets.load_from_disk(str(path))
        # Its readers raise errors of many types.
        except Exception as error:
            why = f"{type(error).__name__}: {' '.join(str(error).split())}"
            raise DataError(f"--data: cannot read {path}: it is damaged or no data set: {why}") from None
        if key not in self._rows.column_names:
            raise DataError(
                f"--data {path}: no column {key!r}; there are {', '.join(self._rows.column_names)}"
            )
        self._path, self._key = path, key

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: int) -> bytes:
        text = self._rows[number][self._key]
        if not isinstance(text, str | None):
            raise DataError(
                f"--data {self._path}: record {number}: {self._key!r} is not text but {text!r:.40}"
            )
        return (text or "").encode()
