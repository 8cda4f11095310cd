"""Near duplicates by MinHash: documents that share a band of minima probably share most of their runs of words.

The share of equal minima of two documents estimates the Jaccard similarity of their sets of word runs (Broder, On the
resemblance and containment of documents, 1997). If the minima are cut into b bands of r minima, documents of similarity
s agree in at least one band with probability 1 - (1 - s^r)^b, which rises steeply around s = (1/b)^(1/r).
"""

import zlib
from collections.abc import Sequence

import numpy as np

NUM_MINIMA = 128
RUN = 5
"""The number of words in a run."""


def band_shape(similarity: float) -> tuple[int, int]:
    """(the number of bands, the minima of a band) with which the probability rises steeply around ``similarity``."""

    def distance(rows: int) -> float:
        return abs((NUM_MINIMA // rows) ** (-1 / rows) - similarity)

    rows = min(range(1, NUM_MINIMA + 1), key=distance)
    return NUM_MINIMA // rows, rows


def band_hashes(text: bytes, similarity: float) -> np.ndarray:
    """A hash for each band of a document, uint64 [bands]: equal hashes at the same place mean equal bands."""
    count, rows = band_shape(similarity)
    found = run_hashes(text)
    # In parts, because each run has 128 hashes, which are not to be in memory for all runs at once.
    parts = np.split(found, range(4096, len(found), 4096))
    minima = np.min([_mix(part[:, None] ^ _SALTS).min(0) for part in parts], 0)
    minima = minima[: count * rows].reshape(count, rows)
    key = np.arange(1, count + 1, dtype=np.uint64)
    for row in range(rows):
        key = _mix(key ^ minima[:, row])
    return key


def run_hashes(text: bytes) -> np.ndarray:
    """A hash for every run of words, uint64 [n]; a text that is shorter than a run is one run."""
    words = np.array([zlib.crc32(word) for word in text.lower().split()] or [0], np.uint64)
    count = max(1, len(words) - RUN + 1)
    found = np.zeros(count, np.uint64)
    for offset in range(min(RUN, len(words))):
        found = _mix(found ^ words[offset : offset + count])
    return found


def is_repeat(keys: Sequence[np.ndarray] | np.ndarray) -> np.ndarray:
    """Whether each document shares a band with an earlier one, bool [num_documents].

    Args:
      keys: uint64 [num_documents, bands], as ``band_hashes`` gives them.
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
