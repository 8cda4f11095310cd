"""Batches: which windows of a stream, in which order, and what a model is told of them."""

import hashlib
from typing import TypedDict

import numpy as np

from train.data.permutation import permute

ORDER = 1
"""Number of the rules below: under others the same data is another sequence of batches."""


class Batch(TypedDict):
    """int32 [num_microbatches, microbatch size, sequence] each.

    inputs: tokens.
    targets: the inputs one token later.
    segment_ids: which document of its sequence a token belongs to, from 1.
    positions: of tokens within their document, from 0; of a document that the sequence cuts off at its beginning,
      within the sequence.
    """

    inputs: np.ndarray
    targets: np.ndarray
    segment_ids: np.ndarray
    positions: np.ndarray


def pack(windows: np.ndarray, separator: int) -> Batch:
    """Windows, int32 [..., sequence + 1], as a batch of [..., sequence].

    The separator is the last target of a document and the first input of the next: as an input it belongs to the
    document that follows it, so that every target is predicted from its own document alone.
    """
    inputs, targets = windows[..., :-1], windows[..., 1:]
    begins = inputs == separator
    numbers = np.cumsum(begins, -1, dtype=np.int32)
    places = np.arange(inputs.shape[-1], dtype=np.int32)
    since = np.maximum.accumulate(np.where(begins, places, 0), -1)
    return Batch(
        inputs=inputs,
        targets=targets,
        segment_ids=1 + numbers - begins[..., :1],
        positions=(places - since).astype(np.int32),
    )


def place(numbers: np.ndarray, length: int, sequence: int, *key: object) -> np.ndarray:
    """Where sequences ``numbers``, int64 [n], of a stream of ``length`` tokens begin, int64 [n].

    Every epoch cuts the stream into windows, from a first token of its own on, and visits each once.
    """
    num_windows = max(1, (length - 1) // sequence - 1)
    slack = length - 1 - num_windows * sequence
    epochs, places = np.divmod(numbers, num_windows)
    starts = np.empty_like(places)
    for epoch in np.unique(epochs).tolist():
        here = epochs == epoch
        bits = _bits(*key, epoch)
        starts[here] = permute(places[here], num_windows, bits) * sequence + (bits >> 64) % (slack + 1)
    return starts


def spread(count: int, length: int, sequence: int) -> np.ndarray:
    """Where ``count`` windows begin that lie evenly over all of a stream, int64 [count]."""
    return np.linspace(0, length - sequence - 1, count).astype(np.int64)


def _bits(*key: object) -> int:
    """128 bits that say nothing of the key they are made from."""
    return int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:16], "little")
