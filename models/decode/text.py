"""Turn tokens into text one by one, as they are generated."""

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np


class TokenizerLike(Protocol):
    """An object that turns text into tokens and back; ``models.weights.Tokenizer`` is one."""

    def encode(self, text: str) -> np.ndarray:
        """Return a text's tokens, int [S]."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens; bytes that form no character become U+FFFD."""

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes that a token stands for, which may be only a part of a character."""


class ByteTokenizer:
    """The ``TokenizerLike`` whose tokens are the bytes of UTF-8."""

    def encode(self, text: str) -> np.ndarray:
        """Return a text's bytes, int32 [S]. Raises UnicodeEncodeError for half a surrogate pair, which has no bytes."""
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of bytes."""
        return bytes(tokens).decode(errors="replace")

    def bytes_of(self, token: int) -> bytes:
        return bytes([token])


class Detokenizer:
    """The text of a growing list of tokens, returned part by part as soon as it can no longer change.

    A character may take several tokens, and a tokenizer may treat the first token of a text in a special way,
    so new tokens are decoded together with those before them.
    """

    MAX_HELD_BACK = 8
    """The number of tokens after which bytes that form no character are no longer held back."""

    def __init__(self, decode: Callable[[Sequence[int]], str]):
        self._decode = decode
        self._tokens: list[int] = []
        self._context, self._num_emitted = 0, 0

    def push(self, token: int) -> str:
        """Add a token; return the text that can no longer change, perhaps none."""
        self._tokens.append(token)
        end, text = len(self._tokens), self._decode(self._tokens[self._context :])
        if text.endswith("\ufffd"):
            if end - self._num_emitted < self.MAX_HELD_BACK:
                return ""
            if incomplete := self._num_incomplete(text):
                end, text = end - incomplete, text[:-1]
        return self._emit(end, text)

    def finish(self) -> str:
        return self._emit(len(self._tokens), self._decode(self._tokens[self._context :]))

    def _num_incomplete(self, text: str) -> int:
        """The number of tokens at the end that may be the beginning of one character."""
        for number in range(3, 0, -1):  # a character has at most four bytes
            ahead = self._decode(self._tokens[self._context : -number])
            if self._decode(self._tokens[-number:]) == "\ufffd" and ahead + "\ufffd" == text:
                return number
        return 0

    def _emit(self, end: int, text: str) -> str:
        """Return the new part of ``text``, the text of the tokens up to ``end``, and mark them as returned."""
        before = self._decode(self._tokens[self._context : self._num_emitted])
        self._context, self._num_emitted = self._num_emitted, end
        return text[len(before) :]


class TokenOffsets:
    """The offset of each token in its text: the number of characters before it.

    A token that is a part of a character has the offset of that character.
    """

    CONTEXT = 8
    """The number of tokens before a new one that are decoded again, to see what it adds to the text."""

    def __init__(self, decode: Callable[[Sequence[int]], str]):
        self._decode = decode
        self._context: list[int] = []
        self._length = 0

    def push(self, token: int) -> int:
        before, self._context = self._decode(self._context), [*self._context, token]
        after = self._decode(self._context)
        # An unfinished character is U+FFFD. The next token replaces that by the character, or leaves it as it
        # is because it only adds one more of the character's bytes.
        is_new_character = not after.startswith(before) or (after == before and bool(self._decode([token])))
        found = self._length - (before.endswith("\ufffd") and is_new_character)
        self._length += len(after) - len(before)
        self._context = self._context[-self.CONTEXT :]
        return found
