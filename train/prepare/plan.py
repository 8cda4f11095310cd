"""Between the passes: which documents repeat others, which are held out, and of which documents each shard is made."""

import dataclasses
from collections.abc import Iterator, Sequence
from fractions import Fraction
from pathlib import Path

import numpy as np

from train.prepare import near
from train.prepare.files import Folder, array_bytes, local_copies, read_json, write, write_json
from train.prepare.partition import piece_file

PLAN = "plan.json"
DOCUMENTS_AT_ONCE = 2**22
"""The approximate number of documents that are sorted at once, at some hundred bytes each. Every piece is opened once
for each such group."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is kept and held out of the documents, which are numbered in the order of their hashes.

    Attributes:
      documents: the number of documents that each bucket keeps.
      heldout: the number of documents that are held out, which are the first ones.
      cut: if not 0, no whole document is held out, but this share at the end of each.
      duplicates: the number of documents that equal one in another piece.
      near: the number of documents that nearly equal an earlier one.
    """

    documents: tuple[int, ...]
    heldout: int
    cut: float
    duplicates: int
    near: int

    @property
    def num_buckets(self) -> int:
        return len(self.documents)

    def first_document(self, bucket: int) -> int:
        return sum(self.documents[:bucket])


def make_plan(
    documents: Sequence[int], num_buckets: int, held_out: float, find_near: bool, work: Folder
) -> Plan:
    """Count the documents that are kept and list them for each bucket, unless that is done.

    Args:
      documents: the number of documents of each piece.
      num_buckets: the number of ranges into which hashes are cut, a power of two.
      held_out: the share of the documents that is held out.
      find_near: whether near duplicates are dropped.
      work: the folder with the files of the pieces.
    """
    if (there := read_json(work, PLAN)) is not None:
        return Plan(**{**there, "documents": tuple(there["documents"])})
    if not sum(documents):
        return Plan((), 0, 0.0, 0, 0)
    counts, duplicates = [], 0
    num_pieces, together = len(documents), max(1, DOCUMENTS_AT_ONCE * num_buckets // max(1, sum(documents)))
    arrays = ["digests", "ends", *(["bands"] if find_near else [])]
    names = [piece_file(piece, f"{what}.npy") for piece in range(num_pieces) for what in arrays]
    with local_copies(work, names) as folder:
        dropped = _near_duplicates(num_pieces, folder) if find_near else np.empty((0, 2), np.uint64)
        for begin in range(0, num_buckets, together):
            buckets = range(begin, min(begin + together, num_buckets))
            digests, places = _documents(buckets, num_buckets, num_pieces, folder)
            first = _is_first(digests)
            kept = first & ~np.isin(_sortable(digests), _sortable(dropped))
            duplicates += len(digests) - int(first.sum())
            for bucket in buckets:
                its = slice(*_range(digests[:, 0], range(bucket, bucket + 1), num_buckets))
                counts.append(int(kept[its].sum()))
                write(work, bucket_file(bucket), array_bytes(places[its][kept[its]]))
    heldout = int(Fraction(str(held_out)) * sum(counts))
    plan = Plan(tuple(counts), heldout, 0.0 if heldout else held_out, duplicates, len(dropped))
    write_json(work, PLAN, dataclasses.asdict(plan))
    return plan


def bucket_file(bucket: int) -> str:
    """The name of the file with a bucket's documents in the order of their hashes, int64 [n, 3]: the piece, and the
    bytes of its text at which the document begins and ends."""
    return f"bucket-{bucket:06d}.npy"


def choose_num_buckets(num_bytes: int, size: float) -> int:
    """A power of two with which a bucket holds about ``size`` bytes of text."""
    return 1 << max(0, int(np.ceil(np.log2(max(num_bytes, 1) / size))))


def _documents(
    buckets: range, num_buckets: int, num_pieces: int, folder: Path
) -> tuple[np.ndarray, np.ndarray]:
    """The documents of neighbouring buckets from all pieces, in the order of their hashes, including repeats.

    Returns:
      digests, uint64 [n, 2]; and the places of the documents, int64 [n, 3], as in the files of ``bucket_file``.
    """
    found, places = [], []
    for piece in range(num_pieces):
        digests, ends = (_load(folder, piece, what) for what in ("digests", "ends"))
        first, last = _range(digests[:, 0], buckets, num_buckets)
        # Copied, because a view would keep the file open, and there are thousands of files.
        found.append(np.array(digests[first:last]))
        cuts = ends[first : last + 1].astype(np.int64)
        places.append(np.stack([np.full(last - first, piece), cuts[:-1], cuts[1:]], axis=-1))
    everything = np.concatenate(found)
    order = np.lexsort((everything[:, 1], everything[:, 0]))
    return everything[order], np.concatenate(places)[order]


def _range(high: np.ndarray, buckets: range, num_buckets: int) -> tuple[int, int]:
    """(begin, end) of neighbouring buckets in ``high``, the sorted first halves of the hashes."""
    width = 2**64 // num_buckets
    first = int(np.searchsorted(high, np.uint64(buckets.start * width)))
    if buckets.stop == num_buckets:
        return first, len(high)
    return first, int(np.searchsorted(high, np.uint64(buckets.stop * width)))


def _near_duplicates(num_pieces: int, folder: Path) -> np.ndarray:
    """The digests of all documents that nearly equal an earlier one, uint64 [n, 2], in order."""
    digests = np.concatenate(list(_load_all(num_pieces, folder, "digests")))
    order = np.lexsort((digests[:, 1], digests[:, 0]))
    order = order[_is_first(digests[order])]
    keys = np.concatenate(list(_load_all(num_pieces, folder, "bands")))
    return digests[order][near.is_repeat(keys[order])]


def _load_all(num_pieces: int, folder: Path, what: str) -> Iterator[np.ndarray]:
    return (np.array(_load(folder, piece, what)) for piece in range(num_pieces))


def _load(folder: Path, piece: int, what: str) -> np.ndarray:
    return np.load(folder / piece_file(piece, f"{what}.npy"), mmap_mode="r")


def _is_first(digests: np.ndarray) -> np.ndarray:
    new = np.ones(len(digests), bool)
    new[1:] = (digests[1:] != digests[:-1]).any(-1)
    return new


def _sortable(digests: np.ndarray) -> np.ndarray:
    """Both halves as one value that NumPy can sort."""
    return np.ascontiguousarray(digests).view([("high", np.uint64), ("low", np.uint64)]).reshape(-1)
