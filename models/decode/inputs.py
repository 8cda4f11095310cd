"""The inputs of a step that the host makes: the prompts' tokens that rows take in, their slots, and their sampling."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array

from dualpipe_jax.functional import Tree
from models.decode.halves import Piece
from models.decode.requests import SamplingParams
from models.decode.running import NUM_STOPS, FinishedPrompts, no_stops
from models.decode.sampling import Sampling
from models.decode.scheduler import Request, Scheduler


class Chunks(NamedTuple):
    """Pieces of prompts, one for each row.

    Attributes:
      requests: the request of each row; None for an empty row.
      tokens: int32 [B, S], zeros beyond a row's length.
      starts: int32 [B], the position of a row's first token.
      lengths: int32 [B], how many tokens a row has.
      next_tokens: int32 [B], the prompt's token after the piece; -1 where the prompt ends with the piece.
      ends: for each row whether its prompt ends with it.
    """

    requests: list[Request | None]
    tokens: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray
    next_tokens: np.ndarray
    ends: list[bool]

    @classmethod
    def of(cls, pieces: Sequence[tuple[Request, Piece] | None], size: int) -> "Chunks":
        """Make rows of pieces, each ``size`` tokens wide; None makes an empty row."""
        tokens = np.zeros((len(pieces), size), np.int32)
        starts, lengths = np.zeros((2, len(pieces)), np.int32)
        next_tokens = np.full(len(pieces), -1, np.int32)
        ends = [False] * len(pieces)
        for row, piece in enumerate(pieces):
            if piece is not None:
                request, (_, start, length) = piece
                end = start + length
                tokens[row, :length] = request.prompt[start:end]
                starts[row], lengths[row], ends[row] = start, length, end == len(request.prompt)
                if not ends[row]:
                    next_tokens[row] = request.prompt[end]
        return cls([piece and piece[0] for piece in pieces], tokens, starts, lengths, next_tokens, ends)

    @property
    def are_scored(self) -> bool:
        """Whether any request needs scores from these rows."""
        return any(is_scored(r, ends=ends) for r, ends in zip(self.requests, self.ends, strict=True))

    def finished_prompts(self, scheduler: Scheduler, size: int) -> FinishedPrompts:
        """The slots of the requests whose prompts end here; a device has ``size`` slots."""
        slots, max_positions = (
            np.full(len(self.requests), -1, np.int32),
            np.zeros(len(self.requests), np.int32),
        )
        stops = no_stops(len(self.requests))
        for row, request in enumerate(self.requests):
            if request is not None and self.ends[row]:
                slots[row] = scheduler.slots.index(request) % size
                max_positions[row] = request.max_positions
                known = request.params.stop[:NUM_STOPS]
                stops[row, : len(known)] = known
        return FinishedPrompts(slots, max_positions, stops)


def is_scored(request: Request | None, *, ends: bool = True) -> bool:
    """Whether a request needs scores from a step; ``ends`` says that its prompt ends in that step, or ended before."""
    if request is None or request.params.likeliest is None:
        return False
    return ends or request.params.score_prompt


def sampling(requests: Sequence[Request | None], draws: bool) -> Sampling | None:
    """The rows' sampling; None if all take the likeliest token, unless ``draws`` asks for the program that samples."""
    params = [SamplingParams() if request is None else request.params for request in requests]
    if not draws and not any(p.temperature for p in params):
        return None
    return Sampling(
        np.asarray([p.temperature for p in params], np.float32),
        np.asarray([p.top_p for p in params], np.float32),
        np.asarray([p.seed for p in params], np.uint32),
    )


class DeviceInputs:
    """The inputs of a step on the devices; they often stay the same for many steps, and are sent only when changed."""

    def __init__(self, sharding: Any):
        self._sharding = sharding
        self._on_host: Tree = None
        self._on_device: Tree = None

    def __call__(self, inputs: Tree) -> Tree:
        new, old = jax.tree.leaves(inputs), jax.tree.leaves(self._on_host)
        if len(new) != len(old) or not all(map(np.array_equal, new, old)):
            self._on_host, self._on_device = inputs, jax.tree.map(self._send, inputs)
        return self._on_device

    def _send(self, leaf: np.ndarray) -> Array:
        return jax.make_array_from_callback(leaf.shape, self._sharding, leaf.__getitem__)
