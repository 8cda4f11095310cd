"""Streams of tokens: documents one after the other, each followed by the separator, read anywhere at once."""

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


class _Pieces:
    """A stream of pieces end to end, each read by ``_read`` alone."""

    def __init__(self, lengths: Sequence[int] | np.ndarray):
        self._ends = np.cumsum(lengths, dtype=np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def windows(self, starts: np.ndarray, width: int) -> np.ndarray:
        """See ``Stream``. Raises DataError for a piece that is not what it was."""
        found = np.empty((len(starts), width), np.int32)
        for row, start in enumerate(starts.tolist()):
            filled, number = 0, int(np.searchsorted(self._ends, start, side="right"))
            place = start - (int(self._ends[number - 1]) if number else 0)
            while filled < width:
                part = self._read(number, slice(place, place + width - filled))
                found[row, filled : filled + len(part)] = part
                filled, number, place = filled + len(part), number + 1, 0
        return found

    def _read(self, number: int, part: slice) -> np.ndarray:
        raise NotImplementedError


class ArrayStream(_Pieces):
    """Arrays end to end, in memory or mapped from files.

    Args:
      arrays: unsigned integers [n] each.
      vocab: every token is below this.
      names: what to call the arrays in an error.
    """

    def __init__(self, arrays: Sequence[np.ndarray], vocab: int, names: Sequence[str] = ()):
        super().__init__([len(array) for array in arrays])
        self.arrays, self.vocab, self.names = tuple(arrays), vocab, tuple(names)

    def _read(self, number: int, part: slice) -> np.ndarray:
        tokens = self.arrays[number][part]
        if int(tokens.max(initial=0)) >= self.vocab:
            name = self.names[number] if self.names else "the data"
            raise DataError(
                f"--data: {name} is damaged: token {int(tokens.max())} near place {part.start}, but the "
                f"vocabulary has {self.vocab}; scripts/prepare --check finds all damage"
            )
        return tokens


class DocumentStream(_Pieces):
    """Documents that are read and made into tokens when they are needed.

    Args:
      read: ``read(number)``, the tokens of a document and the separator, int [n].
      numbers: int64 [num_documents], in which order documents follow each other.
      lengths: int64 [num_documents], their tokens, the separator with them.
    """

    def __init__(self, read: Callable[[int], np.ndarray], numbers: np.ndarray, lengths: np.ndarray):
        super().__init__(lengths)
        self._tokens, self._numbers, self._lengths = read, numbers, lengths

    def _read(self, number: int, part: slice) -> np.ndarray:
        tokens = self._tokens(int(self._numbers[number]))
        if len(tokens) != self._lengths[number]:
            raise DataError(f"--data: document {self._numbers[number]} changed while it was in use")
        return tokens[part]
