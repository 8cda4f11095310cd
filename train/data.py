"""Text as bytes: which files, which of them are held out, and the batch of a step.

A batch is a pure function of (corpus, seed, step): no iterator to save, nothing to replay on resuming.
"""

import hashlib
import os
import sysconfig
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

SEPARATOR = 0
"""The token between documents: a byte that no text holds."""

_LEFT_OUT = {"site-packages", "test", "tests", "idle_test", "lib2to3", "__pycache__"}


class DataError(ValueError):
    """Data that cannot be trained on; says which and why."""


class Corpus(NamedTuple):
    """Documents as bytes, each followed by the separator: uint8 [num_bytes].

    Attributes:
      train: what batches are drawn from.
      heldout: another tenth, never drawn from.
      num_documents: documents of both together; repeats count once.
    """

    train: np.ndarray
    heldout: np.ndarray
    num_documents: int

    @property
    def digest(self) -> str:
        """SHA-256 of all tokens: two runs with equal digests draw equal batches."""
        both = hashlib.sha256(self.train.tobytes())
        both.update(len(self.train).to_bytes(8, "little") + self.heldout.tobytes())
        return both.hexdigest()


class Batch(NamedTuple):
    """int32 [num_microbatches, microbatch size, sequence]; targets are the inputs one byte later."""

    inputs: np.ndarray
    targets: np.ndarray


def standard_library() -> list[Path]:
    """The sources of the running Python's standard library: text that every machine has."""
    found = []
    for folder, subfolders, names in os.walk(sysconfig.get_paths()["stdlib"]):
        subfolders[:] = [name for name in subfolders if name not in _LEFT_OUT]
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted(found)


def load_corpus(paths: Sequence[Path] = ()) -> Corpus:
    """Read files, or all text under folders; the standard library's sources if none are given.

    A tenth is held out: of ten or more documents a tenth of them, picked by the hash of their content,
    of fewer the last tenth of each. Repeated and empty documents are dropped.

    Raises:
      DataError: a path is missing, is not text, or nothing is left to read.
    """
    documents = {hashlib.sha256(text).digest(): text for text in _documents(paths) if text}
    if not documents:
        raise DataError(f"--data: nothing to read in {', '.join(map(str, paths)) or 'the standard library'}")
    train, heldout = split([documents[digest] for digest in sorted(documents)])
    return Corpus(_joined(train), _joined(heldout), len(documents))


def split(documents: Sequence[bytes]) -> tuple[list[bytes], list[bytes]]:
    """Documents to train on and documents held out, from documents in an order that says nothing of them."""
    tenth = len(documents) // 10
    if tenth:
        return list(documents[tenth:]), list(documents[:tenth])
    cuts = [len(text) - len(text) // 10 for text in documents]
    return (
        [text[:cut] for text, cut in zip(documents, cuts, strict=True)],
        [text[cut:] for text, cut in zip(documents, cuts, strict=True)],
    )


def draw_batch(
    tokens: np.ndarray,
    seed: int,
    step: int,
    shape: tuple[int, int, int],
    rows: tuple[slice, slice] = (slice(None), slice(None)),
) -> Batch:
    """The batch of a step: windows of ``tokens`` at random places that depend on (seed, step) alone.

    Args:
      tokens: uint8 [num_bytes], longer than a window.
      seed: of the run.
      step: of the run.
      shape: (num_microbatches, microbatch size, sequence).
      rows: which microbatches, and which of their sequences; the others are not read.
    """
    num_microbatches, microbatch_size, sequence = shape
    bits = np.random.Philox(key=np.array([seed, step], np.uint64))  # raw bits: the same in every NumPy
    raw = bits.random_raw(num_microbatches * microbatch_size)
    starts = (raw % np.uint64(len(tokens) - sequence)).astype(np.int64).reshape(shape[:2])[rows]
    return _windows(tokens, starts.reshape(-1), (*starts.shape, sequence))


def even_batches(
    tokens: np.ndarray, num_windows: int, shape: tuple[int, int, int]
) -> list[tuple[Batch, np.ndarray]]:
    """The same windows for every shape of batch, spread evenly over all of ``tokens``: for evaluation.

    Each batch comes with float32 [num_microbatches, microbatch size], 1 for a window and 0 for what only fills the
    last batch up.
    """
    num_microbatches, microbatch_size, sequence = shape
    starts = np.linspace(0, len(tokens) - sequence - 1, num_windows).astype(np.int64)
    size = num_microbatches * microbatch_size
    filled = np.arange(-(-num_windows // size) * size) < num_windows
    starts = np.where(filled, np.resize(starts, len(filled)), 0)
    weights = filled.astype(np.float32).reshape(-1, num_microbatches, microbatch_size)
    batches = [_windows(tokens, part, shape) for part in starts.reshape(-1, size)]
    return list(zip(batches, weights, strict=True))


def _windows(tokens: np.ndarray, starts: np.ndarray, shape: tuple[int, int, int]) -> Batch:
    windows = tokens[starts[:, None] + np.arange(shape[-1] + 1)].astype(np.int32)
    return Batch(windows[:, :-1].reshape(shape), windows[:, 1:].reshape(shape))


def _joined(documents: Iterable[bytes]) -> np.ndarray:
    separator = bytes([SEPARATOR])
    return np.frombuffer(b"".join(text + separator for text in documents), np.uint8)


def _documents(paths: Sequence[Path]) -> Iterable[bytes]:
    if not paths:
        yield from (path.read_bytes() for path in standard_library())
    for path in paths:
        if path.is_dir():
            inside = sorted(file for file in path.rglob("*") if file.is_file())
            yield from (text for file in inside if _is_text(text := _read(file)))
        elif not _is_text(text := _read(path)):
            raise DataError(f"--data: {path} is not text (it holds zero bytes)")
        else:
            yield text


def _is_text(content: bytes) -> bool:
    return SEPARATOR not in content


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"--data: cannot read {path}: {error.strerror or error}") from None
