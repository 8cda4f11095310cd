"""Continuous batching: requests join and leave between steps, and nothing is compiled again.

What a device computes is in ``models.decode.steps``; here is who sits where. A request takes blocks for all it may ever
need when it is let in, so that none that has begun can run out of room (Yu et al. 2022, "Orca").
"""

import dataclasses
import functools
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from dualpipe_jax.functional import Tree
from models.decode.blocks import Blocks, keys_of
from models.decode.cache import Rows, init_cache
from models.decode.kept import KeptBlocks, PrefixFolder, identity
from models.decode.model import Decoder
from models.decode.requests import Completion, Limits, SamplingParams, check_request
from models.decode.sampling import Sampling
from models.decode.steps import decode, prefill

_PREFILL, _DECODE = (
    jax.jit(program, static_argnums=(0, 1), donate_argnums=3) for program in (prefill, decode)
)


@dataclasses.dataclass(eq=False)
class _Request:
    id: int
    prompt: np.ndarray
    params: SamplingParams
    on_token: Callable[[int], None] | None
    blocks: list[int] = dataclasses.field(default_factory=list)
    num_cached: int = 0  # positions in the cache
    tokens: list[int] = dataclasses.field(default_factory=list)
    draft: int = -1
    num_drafted: int = 0
    num_accepted: int = 0
    num_reused: int = 0
    ended: bool = False

    @property
    def room(self) -> int:
        """Positions that it may take: the last token is not fed to anybody."""
        return len(self.prompt) + self.params.max_tokens - 1


class Engine:
    """Serves requests step by step.

    Args:
      model: see ``models.decode.decoder``.
      params: of one stage, as ``models.weights.load`` reads them.
      limits: sizes.
      drafts: whether the first module of multi-token prediction guesses a token ahead. The text is the same.
      prefixes: a folder where beginnings are kept for other engines.

    Raises:
      ValueError: drafts are asked of a model without such a module, or the folder may not hold 16 blocks.

    """

    def __init__(
        self,
        model: Decoder,
        params: Tree,
        limits: Limits = Limits(),  # noqa: B008
        *,
        drafts: bool = False,
        prefixes: PrefixFolder | None = None,
    ):
        if drafts and not model.config.num_mtp_layers:
            raise ValueError(
                "Engine: drafts need a module of multi-token prediction, and the model has none; "
                "leave drafts out, or load weights with num_mtp_layers of 1."
            )
        self.config, self.limits, self._drafts = model.config, limits, drafts
        self._weights = model.prepare(params)
        self._cache = init_cache(self.config, limits.total_blocks, limits.block_size)
        self._blocks = Blocks(limits.total_blocks)
        self._prefill = functools.partial(_PREFILL, model, drafts)
        self._decode = functools.partial(_DECODE, model, drafts)
        self._waiting: deque[_Request] = deque()
        self._slots: list[_Request | None] = [None] * limits.max_requests
        self._ended: list[Completion] = []
        self._next_id = 0
        self._kept: KeptBlocks | None = None
        if prefixes is not None:
            about = identity(self.config, params, drafts)
            self._kept = KeptBlocks(prefixes, about, self._cache[:, 0].shape, self._cache.dtype)

    @property
    def busy(self) -> bool:
        """Whether there is anything to do."""
        return bool(self._waiting or self._ended or any(self._slots))

    def add(
        self,
        prompt: Sequence[int] | np.ndarray,
        params: SamplingParams = SamplingParams(),  # noqa: B008
        on_token: Callable[[int], None] | None = None,
    ) -> int:
        """Let a request in, or let it wait until there is room.

        Args:
          prompt: its tokens.
          params: how it goes on.
          on_token: called with each token as soon as it is there, but not with one that stops it. If it raises, that
            ends the request.

        Returns:
          The request's number.

        Raises:
          RequestError: it can never be served; says why.

        """
        tokens = np.asarray(prompt)
        check_request(tokens, params, self.limits, self.config.vocab)
        request = _Request(self._next_id, tokens.astype(np.int32), params, on_token)
        self._next_id += 1
        self._waiting.append(request)
        return request.id

    def cancel(self, number: int) -> None:
        """End a request, whose completion the next step returns; one that has ended is left alone."""
        for request in (*self._waiting, *self._slots):
            if request is not None and request.id == number:
                self._end(request, "cancelled")

    def step(self) -> list[Completion]:
        """Let in who fits, take in chunks of prompts, then give each request that decodes its next token.

        Returns:
          The requests that ended.

        """
        self._admit()
        for _ in range(max(1, self.limits.max_prefill // self.limits.chunk_size)):
            begun = [r for r in self._slots if r and r.num_cached < len(r.prompt)]
            if not begun:
                break
            self._take_in(min(begun, key=lambda request: request.id))
        if any(r and r.tokens for r in self._slots):
            self._go_on()
        ended, self._ended = self._ended, []
        return ended

    def run(self) -> list[Completion]:
        """Step until nothing is left to do; completions by number."""
        ended = []
        while self.busy:
            ended += self.step()
        return sorted(ended, key=lambda completion: completion.id)

    def _admit(self) -> None:
        """First come, first served: a small one does not overtake one that waits for room."""
        while self._waiting and None in self._slots:
            request = self._waiting[0]
            # The last token is fed in any case: its logits are wanted.
            keys = self._keys(request, len(request.prompt) - 1)
            taken = self._blocks.take(-(-request.room // self.limits.block_size), keys)
            if taken is None:
                return
            request.blocks, filled = taken[0], self._recall(*taken, keys)
            request.num_cached = request.num_reused = filled * self.limits.block_size
            self._waiting.popleft()
            self._slots[self._slots.index(None)] = request

    def _recall(self, blocks: Sequence[int], filled: int, keys: Sequence[bytes]) -> int:
        """Fill what can be from the folder; how many blocks at the front are filled then."""
        for block, key in zip(blocks[filled : len(keys)], keys[filled:], strict=True):
            found = self._kept.read(key) if self._kept else None
            if found is None:
                break
            self._cache = _put_block(self._cache.sharding)(self._cache, block, found)
            filled += 1
        self._blocks.remember(blocks[:filled], keys)
        return filled

    def _remember(self, blocks: Sequence[int], keys: Sequence[bytes]) -> None:
        self._blocks.remember(blocks, keys)
        for block, key in zip(blocks, keys, strict=False):
            if self._kept and self._kept.wants(key):
                self._kept.write(key, _get_block(self._cache, block))

    def _keys(self, request: _Request, num_fed: int) -> list[bytes]:
        """Of the whole blocks among the first positions of a request."""
        text = [*request.prompt, *request.tokens]
        keys = keys_of(text, self.limits.block_size, ahead=int(self._drafts))
        return keys[: num_fed // self.limits.block_size]

    def _take_in(self, request: _Request) -> None:
        size = self.limits.chunk_size
        start = request.num_cached
        chunk = request.prompt[start : start + size]
        end = start + len(chunk)
        tokens = np.zeros((1, size), np.int32)
        tokens[0, : len(chunk)] = chunk
        rows = Rows(tokens, _int32([start]), _int32([len(chunk)]), self._tables([request]))
        follow = _int32([request.prompt[end] if end < len(request.prompt) else -1])
        out, self._cache = self._prefill(self._weights, self._cache, rows, follow, _sampling([request]))
        request.num_cached = end
        if end == len(request.prompt):
            found = jax.device_get(out)
            self._receive(request, found.tokens[:1], found.finite[0], found.drafts[0])

    def _go_on(self) -> None:
        width = 2 if self._drafts else 1
        requests = [r if r and r.tokens else None for r in self._slots]
        tokens = np.zeros((len(requests), width), np.int32)
        starts, lengths = np.zeros((2, len(requests)), np.int32)
        for row, request in enumerate(requests):
            if request is not None:
                guessed = request.draft >= 0 and request.num_cached + 1 < request.room
                tokens[row, 0], starts[row], lengths[row] = (
                    request.tokens[-1],
                    request.num_cached,
                    1 + guessed,
                )
                if guessed:
                    tokens[row, 1] = request.draft
                    request.num_drafted += 1
        rows = Rows(tokens, starts, lengths, self._tables(requests))
        out, self._cache = self._decode(self._weights, self._cache, rows, _sampling(requests))
        found = jax.device_get(out)
        for row, request in enumerate(requests):
            if request is not None:
                accepted = found.accepted[row]
                request.num_cached += accepted
                request.num_accepted += accepted - 1
                self._receive(request, found.tokens[row, :accepted], found.finite[row], found.drafts[row])

    def _receive(self, request: _Request, tokens: np.ndarray, finite: bool, draft: int) -> None:
        if not finite:
            self._end(
                request,
                "error",
                f"the model's answer at position {request.num_cached} is not a number: its weights hold NaN or "
                "infinity, or its activations grew beyond their type; check the weights, or compute in float32",
            )
            return
        if not request.tokens:
            self._remember(request.blocks, self._keys(request, request.num_cached))
        request.draft = int(draft)
        for token in map(int, tokens):
            if token in request.params.stop:
                self._end(request, "stop")
                return
            request.tokens.append(token)
            try:
                if request.on_token:
                    request.on_token(token)
            except Exception as error:  # theirs, and nobody else's trouble
                self._end(request, "error", f"on_token raised {error!r}")
            if len(request.tokens) == request.params.max_tokens:
                self._end(request, "length")
            if request.ended:
                return

    def _end(self, request: _Request, reason: Any, error: str | None = None) -> None:
        if request.ended:
            return
        request.ended = True
        if request in self._waiting:
            self._waiting.remove(request)
        else:
            self._slots[self._slots.index(request)] = None
            if reason != "error":
                self._remember(request.blocks, self._keys(request, request.num_cached))
            self._blocks.give_back(request.blocks)
        numbers = int(request.num_drafted), int(request.num_accepted), request.num_reused
        self._ended.append(Completion(request.id, tuple(request.tokens), reason, error, *numbers))

    def _tables(self, requests: Sequence[_Request | None]) -> np.ndarray:
        tables = np.zeros((len(requests), self.limits.table_size), np.int32)
        for row, request in enumerate(requests):
            if request is not None:
                tables[row, : len(request.blocks)] = request.blocks
        return tables


@functools.cache
def _put_block(sharding: Any) -> Callable[[jax.Array, int, np.ndarray], jax.Array]:
    """Of a cache that lies so, and stays where it is."""
    put = functools.partial(jax.lax.dynamic_update_index_in_dim, axis=1)
    return jax.jit(lambda cache, block, new: put(cache, new, block), donate_argnums=0, out_shardings=sharding)


@jax.jit
def _get_block(cache: jax.Array, block: int) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(cache, block, axis=1, keepdims=False)


def _sampling(requests: Sequence[_Request | None]) -> Sampling:
    params = [SamplingParams() if request is None else request.params for request in requests]
    return Sampling(
        np.asarray([p.temperature for p in params], np.float32),
        np.asarray([p.top_p for p in params], np.float32),
        np.asarray([p.seed for p in params], np.uint32),
    )


def _int32(numbers: Sequence[int]) -> np.ndarray:
    return np.asarray(numbers, np.int32)
