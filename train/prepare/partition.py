"""First pass: each piece of the input becomes a file of its documents, filtered, in the order of their hashes.

Hashes say nothing of the text, so their order is a shuffle; equal documents have equal hashes, so whoever takes a
range of hashes from all pieces has the same documents together and can drop repeats with no table of all documents.
"""

import collections
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from train.data.errors import DataError
from train.data.inputs import Piece, documents
from train.prepare import filters, near
from train.prepare.files import write_array, write_json, writing
from train.prepare.options import Options

BAD = "lines that cannot be read"


def partition(number: int, piece: Piece, options: Options, folder: Path) -> dict[str, Any]:
    """Read a piece, unless that is done; its receipt says how many documents were dropped for which reason.

    Raises:
      DataError: see ``documents``.
    """
    receipt = folder / f"{number:06d}.json"
    if receipt.exists():
        return json.loads(receipt.read_text())
    kept: dict[bytes, bytes] = {}
    dropped: collections.Counter[str] = collections.Counter()

    def bad(error: DataError) -> None:
        dropped[BAD] += 1
        if dropped[BAD] > options.skip_bad:
            hint = f"; --skip-bad {max(10, 10 * options.skip_bad)} leaves out so many such lines"
            raise DataError(str(error) + hint)

    for text in documents(piece, options.text_key, bad):
        why = filters.reason(text, options)
        digest = hashlib.sha256(text).digest()[:16]
        if why is None and digest in kept:
            why = "exact duplicates"
        if why is None:
            kept[digest] = text
        else:
            dropped[why] += 1
    order = sorted(kept)
    _write(number, [kept[digest] for digest in order], np.frombuffer(b"".join(order), ">u8"), options, folder)
    found = {"documents": len(kept), "bytes": sum(map(len, kept.values())), "dropped": dict(dropped)}
    write_json(receipt, found)
    return found


def _write(number: int, texts: list[bytes], digests: np.ndarray, options: Options, folder: Path) -> None:
    with writing(folder / f"{number:06d}.text") as file:
        file.writelines(texts)
    write_array(folder / f"{number:06d}.digests.npy", digests.astype(np.uint64).reshape(-1, 2))
    ends = np.cumsum([0, *map(len, texts)], dtype=np.uint64)
    write_array(folder / f"{number:06d}.ends.npy", ends)
    if options.near_duplicates is not None:
        keys = [near.bands(text, options.near_duplicates) for text in texts]
        write_array(folder / f"{number:06d}.bands.npy", np.array(keys, np.uint64).reshape(len(texts), -1))


class Parts:
    """What the first pass left of the input's pieces in a folder."""

    def __init__(self, folder: Path, num_pieces: int):
        self.folder, self.num_pieces = folder, num_pieces

    def digests(self, bucket: int, num_buckets: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The documents of a range of hashes from all pieces, in order, repeats and all.

        Returns:
          digests, uint64 [n, 2]; and int64 [n] each: their pieces, and their numbers in these.
        """
        found, pieces, numbers = [], [], []
        for piece in range(self.num_pieces):
            digests = self.load(piece, "digests")
            first, last = _range(digests[:, 0], bucket, num_buckets)
            found.append(np.asarray(digests[first:last]))
            pieces.append(np.full(last - first, piece))
            numbers.append(np.arange(first, last))
        everything = np.concatenate(found)
        order = np.lexsort((everything[:, 1], everything[:, 0]))
        return everything[order], np.concatenate(pieces)[order], np.concatenate(numbers)[order]

    def texts(self, pieces: np.ndarray, numbers: np.ndarray) -> Iterator[bytes]:
        """The documents with these numbers, in this order."""
        files = {}
        try:
            for piece, number in zip(pieces.tolist(), numbers.tolist(), strict=True):
                if piece not in files:
                    files[piece] = (self.folder / f"{piece:06d}.text").open("rb"), self.load(piece, "ends")
                file, ends = files[piece]
                start, stop = ends[number : number + 2].tolist()
                file.seek(start)
                yield file.read(stop - start)
        finally:
            for file, _ in files.values():
                file.close()

    def load(self, piece: int, what: str) -> np.ndarray:
        """An array of a piece: digests, ends or bands; mapped."""
        return np.load(self.folder / f"{piece:06d}.{what}.npy", mmap_mode="r")


def _range(high: np.ndarray, bucket: int, num_buckets: int) -> tuple[int, int]:
    """Where a bucket's hashes begin and end among sorted ones; buckets are a power of two."""
    width = 2**64 // num_buckets
    first = int(np.searchsorted(high, np.uint64(bucket * width)))
    if bucket + 1 == num_buckets:
        return first, len(high)
    return first, int(np.searchsorted(high, np.uint64((bucket + 1) * width)))
