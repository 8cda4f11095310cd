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


class Bytes:
    """Tokens are the bytes of UTF-8."""

    def encode(self, text: str) -> np.ndarray:
        """Return a text's bytes, int32 [S]."""
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of bytes."""
        return bytes(tokens).decode(errors="replace")


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
        waiting = len(self._tokens) - self._given
        return self._give(unfinished=waiting >= self.PATIENCE)

    def finish(self) -> str:
        return self._give(unfinished=True)

    def _give(self, unfinished: bool) -> str:
        before = self._decode(self._tokens[self._context : self._given])
        now = self._decode(self._tokens[self._context :])
        if now.endswith("\ufffd") and not unfinished:
            return ""
        self._context, self._given = self._given, len(self._tokens)
        return now[len(before) :]
