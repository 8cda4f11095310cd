"""Streams of tokens with random access: documents one after the other, each followed by the separator."""

from collections.abc import Callable, Sequence

import numpy as np

from train.data.errors import DataError


class Stream:
    """A stream of tokens, from which batches are cut: pieces joined end to end; ``_read`` reads a part of one piece."""

    def __init__(self, lengths: Sequence[int] | np.ndarray):
        self._ends = np.cumsum(lengths, dtype=np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def windows(self, starts: np.ndarray, width: int) -> np.ndarray:
        """The ``width`` tokens from each of ``starts``, int64 [n], on; int32 [n, width].

        Raises DataError for a piece that is damaged or has changed.
        """
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


class ArrayStream(Stream):
    """A stream of arrays joined end to end, in memory or mapped from files.

    Args:
      arrays: the arrays, unsigned integers [n] each.
      vocab: the vocabulary size; every token is below it.
      names: the names of the arrays in error messages.
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


class DocumentStream(Stream):
    """A stream of documents that are read and turned into tokens when they are needed.

    Args:
      read: ``read(number)``, the tokens of a document and the separator, int [n].
      numbers: int64 [num_documents], the numbers of the documents in the order of the stream.
      lengths: int64 [num_documents], the number of tokens of each in the same order, including the separator.
    """

    def __init__(self, read: Callable[[int], np.ndarray], numbers: np.ndarray, lengths: np.ndarray):
        super().__init__(lengths)
        self._tokens, self._numbers, self._lengths = read, numbers, lengths

    def _read(self, number: int, part: slice) -> np.ndarray:
        tokens = self._tokens(int(self._numbers[number]))
        if len(tokens) != self._lengths[number]:
            raise DataError(f"--data: document {self._numbers[number]} changed while it was in use")
        return tokens[part]
