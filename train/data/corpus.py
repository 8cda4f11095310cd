"""The data that a run reads: sources in their proportions, and the batch of a step.

A batch is a pure function of (corpus, seed, step): no iterator to save, nothing to replay on resuming, and each
process makes the part that it needs.
"""

import dataclasses
import functools
import hashlib
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from train.data import batches
from train.data.batches import Batch
from train.data.errors import DataError
from train.data.mixture import Mixture, mixture, whole_weights
from train.data.streams import ArrayStream, Stream
from train.data.vocabulary import BYTES, Vocabulary


@dataclasses.dataclass(frozen=True)
class Source:
    """Documents of one kind.

    Attributes:
      name: the name of the source in messages.
      train: the stream that batches are cut from.
      heldout: a stream of other documents, for evaluation.
      num_documents: the number of documents in both streams; repeated documents count once.
      fingerprint: a hash that is equal for equal streams.
      weight: its share of all sequences, relative to other sources.
      skipped: the reasons, one for each file of a named folder that could not be read.
    """

    name: str
    train: Stream
    heldout: Stream
    num_documents: int
    fingerprint: str
    weight: float = 1.0
    skipped: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Corpus:
    """All data that a run reads.

    Attributes:
      sources: the sources, at least one.
      vocabulary: the vocabulary of their tokens.
    """

    sources: tuple[Source, ...]
    vocabulary: Vocabulary = BYTES

    @property
    def vocab(self) -> int:
        """The vocabulary size; all tokens are below it."""
        return self.vocabulary.size

    @property
    def num_documents(self) -> int:
        return sum(source.num_documents for source in self.sources)

    @property
    def num_tokens(self) -> int:
        return sum(len(source.train) for source in self.sources)

    @property
    def num_heldout(self) -> int:
        return sum(len(source.heldout) for source in self.sources)

    @property
    def skipped(self) -> list[str]:
        """The reasons, one for each file that could not be read."""
        return [reason for source in self.sources for reason in source.skipped]

    @functools.cached_property
    def mixture(self) -> Mixture:
        return mixture([source.weight for source in self.sources])

    @functools.cached_property
    def fingerprint(self) -> str:
        """A hash of data, vocabulary, proportions and rules. Where it is equal, equal seeds and shapes give equal
        batches."""
        prints = [source.fingerprint for source in self.sources]
        shares = whole_weights([source.weight for source in self.sources])
        content = json.dumps([batches.ORDER_VERSION, self.vocabulary.fingerprint, prints, shares])
        return hashlib.sha256(content.encode()).hexdigest()

    def train_batch(
        self,
        seed: int,
        step: int,
        shape: tuple[int, int, int],
        part: tuple[slice, ...] = (),
        *,
        begin: int | None = None,
    ) -> Batch:
        """The batch of a step, or a part of it.

        Args:
          seed: the seed of the run.
          step: the number of the step, from 0.
          shape: (num_microbatches, microbatch size, sequence) of the whole batch.
          part: the part that is needed, as an index like those of ``jax.make_array_from_callback``; no other sequences
            are read.
          begin: the number of sequences in all earlier steps; None if each of them had as many as this one.

        Raises:
          DataError: the data is damaged.
        """
        num_microbatches, microbatch_size, sequence = shape
        rows, columns = part[:2], part[2:]
        size = num_microbatches * microbatch_size
        wanted = np.arange(size).reshape(num_microbatches, microbatch_size)[rows]
        sources, numbers = self.mixture.locate((step * size if begin is None else begin) + wanted.reshape(-1))
        windows = np.empty((wanted.size, sequence + 1), np.int32)
        for number, source in enumerate(self.sources):
            here = sources == number
            starts = batches.window_starts(numbers[here], len(source.train), sequence, seed, number)
            windows[here] = source.train.windows(starts, sequence + 1)
        return self._packed(windows.reshape(*wanted.shape, sequence + 1), columns)

    def heldout_batches(
        self, num_sequences: int, shape: tuple[int, int, int]
    ) -> list[tuple[Batch, np.ndarray]]:
        """Batches of the same held-out sequences for every shape, spread evenly over the held-out text of all sources.

        Each batch comes with weights, float32 [num_microbatches, microbatch size]: 1 for a sequence, 0 for one that
        only fills up the last batch.
        """
        num_microbatches, microbatch_size, sequence = shape
        sources, _ = self.mixture.locate(np.arange(num_sequences))
        windows = np.empty((num_sequences, sequence + 1), np.int32)
        for number, source in enumerate(self.sources):
            here = sources == number
            starts = batches.even_starts(int(here.sum()), len(source.heldout), sequence)
            windows[here] = source.heldout.windows(starts, sequence + 1)
        size = num_microbatches * microbatch_size
        total = -(-num_sequences // size) * size
        windows = np.resize(windows, (total, sequence + 1))
        counts = (np.arange(total) < num_sequences).astype(np.float32)
        return [
            (self._packed(some.reshape(*shape[:2], sequence + 1)), weights.reshape(shape[:2]))
            for some, weights in zip(
                windows.reshape(-1, size, sequence + 1), counts.reshape(-1, size), strict=True
            )
        ]

    def check(self, sequence: int) -> None:
        """Raise DataError for the first source that is too short for a sequence and its targets."""
        unit = self.vocabulary.unit
        for source in self.sources:
            for what, stream in (("to train on", source.train), ("held out", source.heldout)):
                if len(stream) <= sequence:
                    named = "" if len(self.sources) == 1 else f"{source.name}: "
                    raise DataError(
                        f"--data: {named}{len(stream)} {unit}s {what}, but --sequence {sequence} takes more; "
                        "give more text or a shorter sequence"
                    )

    def _packed(self, windows: np.ndarray, columns: tuple[slice, ...] = ()) -> Batch:
        batch: Any = batches.pack(windows, self.vocabulary.separator)
        return Batch(**{name: values[(..., *columns)] for name, values in batch.items()})  # type: ignore[typeddict-item]


def text_source(
    name: str, train: Sequence[bytes], heldout: Sequence[bytes], num_documents: int, vocabulary: Vocabulary
) -> Source:
    streams, content = [], hashlib.sha256()
    for documents in (train, heldout):
        encoded = vocabulary.encode(documents)
        tokens = np.concatenate(encoded) if encoded else np.empty(0, vocabulary.dtype)
        content.update(len(tokens).to_bytes(8, "little"))
        content.update(tokens.tobytes())
        streams.append(ArrayStream([tokens], vocabulary.size))
    return Source(name, streams[0], streams[1], num_documents, content.hexdigest())
