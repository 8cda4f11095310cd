"""Streams of tokens: documents one after the other, each followed by the separator, read anywhere at once."""

import bisect
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from train.data.errors import DataError


class Stream(Protocol):
    """What batches are cut from."""

    def __len__(self) -> int: ...

    def windows(self, starts: np.ndarray, width: int) -> np.ndarray:
        """int32 [n, width], the tokens from each of ``starts``, int64 [n], on."""
        ...


class ArrayStream:
    """Arrays end to end, in memory or mapped from files.

    Args:
      arrays: unsigned integers [n] each.
      vocab: every token is below this.
      names: what to call the arrays in an error.
    """

    def __init__(self, arrays: Sequence[np.ndarray], vocab: int, names: Sequence[str] = ()):
        self.arrays, self.vocab, self.names = tuple(arrays), vocab, tuple(names)
        self._ends = np.cumsum([len(array) for array in arrays], dtype=np.int64).tolist()

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def windows(self, starts: np.ndarray, width: int) -> np.ndarray:
        """See ``Stream``. Raises DataError for a token that the vocabulary does not have: the file is damaged."""
        found = np.empty((len(starts), width), np.int32)
        for row, start in enumerate(starts.tolist()):
            filled, number = 0, bisect.bisect_right(self._ends, start)
            place = start - (self._ends[number - 1] if number else 0)
            while filled < width:
                part = self.arrays[number][place : place + width - filled]
                found[row, filled : filled + len(part)] = part
                if int(part.max(initial=0)) >= self.vocab:
                    name = self.names[number] if self.names else "the data"
                    raise DataError(
                        f"--data: {name} is damaged: token {int(part.max())} near place {place}, but the "
                        f"vocabulary has {self.vocab}; scripts/prepare --check finds all damage"
                    )
                filled, number, place = filled + len(part), number + 1, 0
        return found


class DocumentStream:
    """Documents that are read and made into tokens when they are needed.

    Args:
      read: ``read(number)``, the tokens of a document and the separator, int [n].
      numbers: int64 [num_documents], in which order documents follow each other.
      lengths: int64 [num_documents], their tokens, the separator with them.
    """

    def __init__(self, read: Callable[[int], np.ndarray], numbers: np.ndarray, lengths: np.ndarray):
        self._read, self._numbers, self._lengths = read, numbers, lengths
        self._ends = np.cumsum(lengths)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def windows(self, starts: np.ndarray, width: int) -> np.ndarray:
        """See ``Stream``. Raises DataError for a document that has changed since it was measured."""
        found = np.empty((len(starts), width), np.int32)
        for row, start in enumerate(starts.tolist()):
            filled, document = 0, int(np.searchsorted(self._ends, start, side="right"))
            place = start - int(self._ends[document] - self._lengths[document])
            while filled < width:
                tokens = self._read(int(self._numbers[document]))
                if len(tokens) != self._lengths[document]:
                    raise DataError(f"--data: document {self._numbers[document]} changed while it was in use")
                part = tokens[place : place + width - filled]
                found[row, filled : filled + len(part)] = part
                filled, document, place = filled + len(part), document + 1, 0
        return found
