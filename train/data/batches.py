"""Batches: which windows of a stream they hold, in which order, and which arrays a model gets."""

import hashlib
from typing import TypedDict

import numpy as np

from train.data.permutation import permute

ORDER_VERSION = 1
"""Version of the rules below: under other rules the same data gives other batches."""


class Batch(TypedDict):
    """The arrays of a batch, each int32 [num_microbatches, microbatch size, sequence].

    inputs: the input tokens.
    targets: the inputs one token later.
    segment_ids: the number of a token's document within the sequence, from 1.
    positions: the position of a token within its document, from 0; within the sequence if the sequence cuts off the
      beginning of the document.
    """

    inputs: np.ndarray
    targets: np.ndarray
    segment_ids: np.ndarray
    positions: np.ndarray


def pack(windows: np.ndarray, separator: int) -> Batch:
    """Make a batch of arrays [..., sequence] from windows, int32 [..., sequence + 1].

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


def window_starts(numbers: np.ndarray, length: int, sequence: int, *key: object) -> np.ndarray:
    """The first tokens of sequences ``numbers``, int64 [n], in a stream of ``length`` tokens, as int64 [n].

    Every epoch cuts the stream into windows, from a first token of its own on, and visits each once in an order of its
    own. Both follow from ``key`` and the epoch.
    """
    num_windows = max(1, (length - 1) // sequence - 1)
    slack = length - 1 - num_windows * sequence
    epochs, places = np.divmod(numbers, num_windows)
    starts = np.empty_like(places)
    for epoch in np.unique(epochs).tolist():
        here = epochs == epoch
        bits = _hash_bits(*key, epoch)
        starts[here] = permute(places[here], num_windows, bits) * sequence + (bits >> 64) % (slack + 1)
    return starts


def even_starts(count: int, length: int, sequence: int) -> np.ndarray:
    """The first tokens of ``count`` windows that are spread evenly over a stream, int64 [count]."""
    return np.linspace(0, length - sequence - 1, count).astype(np.int64)


def _hash_bits(*key: object) -> int:
    """A pseudorandom integer of 128 bits, from a hash of the key."""
    return int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:16], "little")
