"""The queue of requests, their slots, and the blocks of the cache that each owns; nothing here runs a model.

When a request is admitted it takes all blocks that it may ever need, so that no request can run out of room
after it has begun (Yu et al. 2022, "Orca"). On a mesh it stays on the device that admitted it.
"""

import dataclasses
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from models.decode.blocks import Blocks, keys_of
from models.decode.requests import Limits, SamplingParams
from models.decode.scores import Score


@dataclasses.dataclass(eq=False)
class Request:
    """A request that is served or waits: its prompt and parameters, its blocks, and how far it is."""

    id: int
    prompt: np.ndarray
    params: SamplingParams
    on_token: Callable[[int], None] | None = None
    on_score: Callable[[Score], None] | None = None
    blocks: list[int] = dataclasses.field(default_factory=list)
    num_cached: int = 0  # positions in the cache
    tokens: list[int] = dataclasses.field(default_factory=list)
    num_unread: int = 0  # steps started that give it tokens, whose results the host has not read
    num_drafted: int = 0
    num_accepted: int = 0
    num_reused: int = 0
    scores: list[Score] = dataclasses.field(default_factory=list)  # first the prompt's, then those of tokens
    stop_score: Score | None = None
    ended: bool = False

    @property
    def decodes(self) -> bool:
        """Whether the next step is to give it a token, as far as the host knows."""
        return self.num_cached >= len(self.prompt) and self.num_expected < self.params.max_tokens

    @property
    def num_expected(self) -> int:
        """The number of tokens it has once the results of all started steps are read; with drafts, at least that."""
        return len(self.tokens) + self.num_unread

    @property
    def max_positions(self) -> int:
        """The largest number of positions that it takes; one less than its tokens, because the last is never fed."""
        return len(self.prompt) + self.params.max_tokens - 1


FillBlocks = Callable[[Sequence[int], int, Sequence[bytes]], int]
"""A function that fills blocks: given a request's blocks, the number of them at the front that are filled, and
their keys, it returns how many at the front are then filled."""


class Scheduler:
    """The slots of all devices, their blocks, and the queue of requests that wait for a slot.

    Args:
      limits: the limits of all devices together.
      num_devices: the number of devices, which have equally many slots.
      num_halves: the number of equal parts of a device's slots, 1 or 2.
      ahead: see ``keys_of``.
    """

    def __init__(self, limits: Limits, num_devices: int, *, num_halves: int, ahead: int):
        self.blocks = Blocks(limits.total_blocks, num_devices)
        self.waiting: deque[Request] = deque()
        self.slots: list[Request | None] = [None] * limits.max_requests
        self._limits, self._size, self._ahead = limits, limits.max_requests // num_devices, ahead
        self._num_devices, self._num_halves = num_devices, num_halves

    def admit(self, fill_blocks: FillBlocks) -> None:
        """Give waiting requests slots, first come, first served: a small one does not overtake one that lacks room."""
        while self.waiting and None in self.slots:
            request = self.waiting[0]
            # The prompt's last token is always fed, because its logits are needed.
            # Latents alone do not give the scores of the prompt's tokens, so a scored prompt reuses none.
            keys = [] if request.params.score_prompt else self.keys(request, len(request.prompt) - 1)
            need = -(-request.max_positions // self._limits.block_size)
            for device in self._preferred_devices(keys):
                if reserved := self.blocks.take(need, keys, device):
                    break
            else:
                return
            request.blocks, filled = reserved[0], fill_blocks(*reserved, keys)
            request.num_cached = request.num_reused = filled * self._limits.block_size
            self.waiting.popleft()
            self.slots[self._free_slot(device)] = request

    def _preferred_devices(self, keys: Sequence[bytes]) -> list[int]:
        """Devices with a free slot, sorted by how much of a prompt's beginning they hold, then by their free blocks."""
        free = [device for device in range(self._num_devices) if None in self.slots_of(device)]
        return sorted(free, key=lambda d: (-self.blocks.num_known(keys, d), -self.blocks.num_free(d)))

    def slots_of(self, device: int) -> list[Request | None]:
        size = self._size
        return self.slots[device * size : (device + 1) * size]

    def _free_slot(self, device: int) -> int:
        """A free slot of a device, in the half that has fewer requests."""
        slots, size = self.slots_of(device), self._size // self._num_halves
        busy = [sum(map(bool, slots[k * size : (k + 1) * size])) for k in range(self._num_halves)]
        start = size * busy.index(min(busy))
        return device * self._size + slots.index(None, start)

    def keys(self, request: Request, num_fed: int) -> list[bytes]:
        """The keys of the whole blocks among the first ``num_fed`` positions of a request."""
        text = np.append(request.prompt, np.asarray(request.tokens, np.int32))
        keys = keys_of(text, self._limits.block_size, ahead=self._ahead)
        return keys[: num_fed // self._limits.block_size]

    def release(self, request: Request) -> None:
        """Free a request's slot and blocks, or remove it from the queue."""
        if request in self.waiting:
            self.waiting.remove(request)
            return
        self.slots[self.slots.index(request)] = None
        self.blocks.give_back(request.blocks)

    def tables(self, requests: Sequence[Request | None], num_positions: int) -> np.ndarray:
        """The blocks of each request's first ``num_positions`` positions, int32 [B, M].

        M is the smallest of ``Limits.table_sizes`` that holds them: attention reads all positions that a
        table has room for, so a step takes longer only as texts get longer.
        """
        need = -(-num_positions // self._limits.block_size)
        size = next(size for size in self._limits.table_sizes if size >= need)
        tables = np.zeros((len(requests), size), np.int32)
        for row, request in enumerate(requests):
            if request is not None:
                blocks = request.blocks[:size]
                tables[row, : len(blocks)] = blocks
        return tables % self.blocks.part_size  # each device numbers its own blocks from 0
