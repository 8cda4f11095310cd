"""First pass: the documents of each piece of the input are filtered and written in the order of their hashes.

Hashes do not depend on what a text is about, so their order is a shuffle. Equal documents have equal hashes, so a range
of hashes from all pieces holds all repeats of its documents, which are dropped without a table of all documents.
"""

import collections
import hashlib
from typing import Any

import numpy as np

from train.data.errors import DataError
from train.data.inputs import Piece, documents
from train.prepare import filters, near
from train.prepare.files import Folder, array_bytes, read_json, write, write_json, writing
from train.prepare.options import Options

BAD_LINES = "lines that cannot be read"


def partition(number: int, piece: Piece, options: Options, work: Folder) -> dict[str, Any]:
    """Read a piece, unless that is done. Returns its receipt: the numbers of documents and bytes that were kept, and of
    documents that were dropped for each reason.

    Raises:
      DataError: see ``documents``.
    """
    receipt = piece_file(number, "json")
    if (there := read_json(work, receipt)) is not None:
        return there
    kept: dict[bytes, bytes] = {}
    dropped: collections.Counter[str] = collections.Counter()

    def on_bad_line(error: DataError) -> None:
        dropped[BAD_LINES] += 1
        if dropped[BAD_LINES] > options.skip_bad:
            hint = f"; --skip-bad {max(10, 10 * options.skip_bad)} leaves out so many such lines"
            raise DataError(str(error) + hint)

    for text in documents(piece, options.text_key, on_bad_line):
        why = filters.drop_reason(text, options)
        digest = hashlib.sha256(text).digest()[:16]
        if why is None and digest in kept:
            why = "exact duplicates"
        if why is None:
            kept[digest] = text
        else:
            dropped[why] += 1
    order = sorted(kept)
    _write(number, [kept[digest] for digest in order], np.frombuffer(b"".join(order), ">u8"), options, work)
    found = {"documents": len(kept), "bytes": sum(map(len, kept.values())), "dropped": dict(dropped)}
    write_json(work, receipt, found)
    return found


def piece_file(number: int, what: str) -> str:
    """The name of a file of a piece: ``what`` is ``text``, ``digests.npy``, ``ends.npy``, ``bands.npy``, or ``json``
    for its receipt."""
    return f"read-{number:06d}.{what}"


def _write(number: int, texts: list[bytes], digests: np.ndarray, options: Options, work: Folder) -> None:
    with writing(work, piece_file(number, "text")) as file:
        file.writelines(texts)
    arrays = {
        "digests": digests.astype(np.uint64).reshape(-1, 2),
        "ends": np.cumsum([0, *map(len, texts)], dtype=np.uint64),
    }
    if options.near_duplicates is not None:
        keys = [near.band_hashes(text, options.near_duplicates) for text in texts]
        arrays["bands"] = np.array(keys, np.uint64).reshape(-1, near.band_shape(options.near_duplicates)[0])
    for what, array in arrays.items():
        write(work, piece_file(number, f"{what}.npy"), array_bytes(array))
