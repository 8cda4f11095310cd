"""Near duplicates by MinHash: documents that share a band of minima share most of their runs of words.

The share of two documents' minima that are equal estimates the Jaccard similarity of their sets of word runs (Broder,
On the resemblance and containment of documents, 1997). Cut into b bands of r minima, documents of similarity s agree
on a whole band with probability 1 - (1 - s^r)^b, which climbs steeply around (1/b)^(1/r).
"""

import zlib
from collections.abc import Sequence

import numpy as np

NUM_MINIMA = 128
RUN = 5
"""Words of a run."""


def shape(similarity: float) -> tuple[int, int]:
    """Bands and minima of a band, so that the climb is where ``similarity`` is."""

    def distance(rows: int) -> float:
        return abs((NUM_MINIMA // rows) ** (-1 / rows) - similarity)

    rows = min(range(1, NUM_MINIMA + 1), key=distance)
    return NUM_MINIMA // rows, rows


def bands(text: bytes, similarity: float) -> np.ndarray:
    """uint64 [bands]: equal numbers in the same place mean equal bands."""
    count, rows = shape(similarity)
    found = runs(text)
    parts = np.split(found, range(4096, len(found), 4096))  # not all 128 of each at once
    minima = np.min([_mix(part[:, None] ^ _SALTS).min(0) for part in parts], 0)
    minima = minima[: count * rows].reshape(count, rows)
    key = np.arange(1, count + 1, dtype=np.uint64)
    for row in range(rows):
        key = _mix(key ^ minima[:, row])
    return key


def runs(text: bytes) -> np.ndarray:
    """uint64 [n], a hash for every run of words; a shorter text is one run."""
    words = np.array([zlib.crc32(word) for word in text.lower().split()] or [0], np.uint64)
    count = max(1, len(words) - RUN + 1)
    found = np.zeros(count, np.uint64)
    for offset in range(min(RUN, len(words))):
        found = _mix(found ^ words[offset : offset + count])
    return found


def repeats(keys: Sequence[np.ndarray] | np.ndarray) -> np.ndarray:
    """bool [num_documents], which documents share a band with an earlier one.

    Args:
      keys: uint64 [num_documents, bands], as ``bands`` gives them.
    """
    keys = np.asarray(keys)
    found = np.zeros(len(keys), bool)
    for band in keys.T:
        _, first = np.unique(band, return_index=True)
        later = np.ones(len(keys), bool)
        later[first] = False
        found |= later
    return found


def _mix(values: np.ndarray) -> np.ndarray:
    values = (values ^ values >> np.uint64(33)) * np.uint64(0xFF51AFD7ED558CCD)
    values = (values ^ values >> np.uint64(33)) * np.uint64(0xC4CEB9FE1A85EC53)
    return values ^ values >> np.uint64(33)


_SALTS = _mix(np.arange(1, NUM_MINIMA + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15))
