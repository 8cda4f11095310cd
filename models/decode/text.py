"""Tokens to text as they come."""

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np


class Text(Protocol):
    """What turns text into tokens and back; ``models.weights.Tokenizer`` is one."""

    def encode(self, text: str) -> np.ndarray:
        """Return a text's tokens, int [S]."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens; bytes that are no character show as U+FFFD."""

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes that a token stands for, which may be a part of a character's."""


class Bytes:
    """Tokens are the bytes of UTF-8."""

    def encode(self, text: str) -> np.ndarray:
        """Return a text's bytes, int32 [S]. Raises UnicodeEncodeError for half a surrogate pair, which is no text."""
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of bytes."""
        return bytes(tokens).decode(errors="replace")

    def bytes_of(self, token: int) -> bytes:
        return bytes([token])


class Stream:
    """The text of a growing list of tokens, given out where it can no longer change.

    A character may take several tokens, and a tokenizer may treat the first one of a text its own way, so new tokens
    are decoded behind those given out before.
    """

    PATIENCE = 8
    """Tokens after which what is no character is taken to be none."""

    def __init__(self, decode: Callable[[Sequence[int]], str]):
        self._decode = decode
        self._tokens: list[int] = []
        self._context, self._given = 0, 0

    def push(self, token: int) -> str:
        """Return what one more token makes certain, perhaps nothing."""
        self._tokens.append(token)
        end, now = len(self._tokens), self._decode(self._tokens[self._context :])
        if now.endswith("\ufffd"):
            if end - self._given < self.PATIENCE:
                return ""
            if begun := self._num_begun(now):
                end, now = end - begun, now[:-1]
        return self._give(end, now)

    def finish(self) -> str:
        return self._give(len(self._tokens), self._decode(self._tokens[self._context :]))

    def _num_begun(self, now: str) -> int:
        """How many tokens at the end may be the beginning of one character."""
        for number in range(3, 0, -1):  # of its four bytes
            ahead = self._decode(self._tokens[self._context : -number])
            if self._decode(self._tokens[-number:]) == "\ufffd" and ahead + "\ufffd" == now:
                return number
        return 0

    def _give(self, end: int, now: str) -> str:
        """What is new in the text ``now`` of the tokens up to ``end``."""
        before = self._decode(self._tokens[self._context : self._given])
        self._context, self._given = self._given, end
        return now[len(before) :]


class Offsets:
    """Where tokens stand in the text that they are: how many of its characters lie before each.

    A token that is a part of a character stands where that does.
    """

    NEAR = 8
    """Tokens that are decoded to see what one more adds."""

    def __init__(self, decode: Callable[[Sequence[int]], str]):
        self._decode = decode
        self._near: list[int] = []
        self._length = 0

    def push(self, token: int) -> int:
        before, self._near = self._decode(self._near), [*self._near, token]
        now = self._decode(self._near)
        # Of an unfinished character there is U+FFFD, which then gives way to it, or stands for one more of its bytes.
        another = not now.startswith(before) or (now == before and bool(self._decode([token])))
        found = self._length - (before.endswith("\ufffd") and another)
        self._length += len(now) - len(before)
        self._near = self._near[-self.NEAR :]
        return found
