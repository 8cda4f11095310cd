"""Between the passes: which documents repeat others, and which are held out."""

import dataclasses
import json
from fractions import Fraction
from pathlib import Path

import numpy as np

from train.prepare import near
from train.prepare.files import write_array, write_json
from train.prepare.partition import Parts


@dataclasses.dataclass(frozen=True)
class Plan:
    """What becomes of the documents, which are numbered in the order of their hashes.

    Attributes:
      documents: how many each bucket keeps.
      heldout: so many of the first are held out.
      cut: if not 0, no document is held out but this share of each, its end.
      duplicates: documents that equal one in another piece.
      near: documents that nearly equal an earlier one.
    """

    documents: tuple[int, ...]
    heldout: int
    cut: float
    duplicates: int
    near: int

    @property
    def num_buckets(self) -> int:
        return len(self.documents)

    def first(self, bucket: int) -> int:
        return sum(self.documents[:bucket])


def make_plan(parts: Parts, num_buckets: int, held_out: float, find_near: bool, folder: Path) -> Plan:
    """Count what is kept, unless that is done."""
    file = folder / "plan.json"
    if file.exists():
        content = json.loads(file.read_text())
        return Plan(**{**content, "documents": tuple(content["documents"])})
    num_near = _find_near(parts, folder) if find_near else 0
    counts, duplicates = [], 0
    for bucket in range(num_buckets):
        digests, *_ = parts.digests(bucket, num_buckets)
        kept = keep(digests, folder)
        counts.append(int(kept.sum()))
        duplicates += len(digests) - int(_is_first(digests).sum())
    heldout = int(Fraction(str(held_out)) * sum(counts))
    plan = Plan(tuple(counts), heldout, 0.0 if heldout else held_out, duplicates, num_near)
    write_json(file, dataclasses.asdict(plan))
    return plan


def choose_num_buckets(num_bytes: int, size: float) -> int:
    """A power of two with which a bucket holds about ``size`` bytes of text."""
    return 1 << max(0, int(np.ceil(np.log2(max(num_bytes, 1) / size))))


def keep(digests: np.ndarray, folder: Path) -> np.ndarray:
    """Of sorted digests, uint64 [n, 2], those that are kept: not a repeat, exact or near; bool [n]."""
    first, file = _is_first(digests), folder / "near.npy"
    if file.exists():
        first &= ~np.isin(_joined(digests), _joined(np.load(file)))
    return first


def _find_near(parts: Parts, folder: Path) -> int:
    """Leave the digests of all near duplicates in a file."""
    pieces = range(parts.num_pieces)
    digests = np.concatenate([parts.load(piece, "digests") for piece in pieces])
    order = np.lexsort((digests[:, 1], digests[:, 0]))
    order = order[_is_first(digests[order])]
    keys = np.concatenate(
        [parts.load(piece, "bands") for piece in pieces if len(parts.load(piece, "digests"))]
    )
    found = digests[order][near.repeats(keys[order])]
    write_array(folder / "near.npy", found)
    return len(found)


def _is_first(digests: np.ndarray) -> np.ndarray:
    new = np.ones(len(digests), bool)
    new[1:] = (digests[1:] != digests[:-1]).any(-1)
    return new


def _joined(digests: np.ndarray) -> np.ndarray:
    """Both halves as one value that NumPy can sort."""
    return np.ascontiguousarray(digests).view([("high", np.uint64), ("low", np.uint64)]).reshape(-1)
