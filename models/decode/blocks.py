"""Who has which blocks of the cache, and which of them hold a beginning that another request has in common.

A block is known by a key of all tokens up to its end, so equal keys mean equal latents. Whoever begins alike shares
such blocks, which nobody writes any more; given back by all, they stay known until their room is needed.
"""

import hashlib
import itertools
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np


def keys_of(tokens: Sequence[int] | np.ndarray, block_size: int, ahead: int = 0) -> list[bytes]:
    """Return the key of each whole block of a text, every one of them a digest of all tokens before its end.

    So many tokens ``ahead`` of a block have their part in what it holds: 1 for latents of a module of multi-token
    prediction. Blocks without them are not whole.
    """
    numbers, keys, key = np.asarray(tokens, np.int32), [], b""
    for end in range(block_size, len(numbers) + 1 - ahead, block_size):
        key = hashlib.sha256(key + numbers[end - block_size : end + ahead].tobytes()).digest()
        keys.append(key)
    return keys


class Blocks:
    """Which blocks are free, and what those hold that may be of use to others.

    Devices have equal parts of them, in order, and a request's all lie on one: nobody knows what another part holds.
    """

    def __init__(self, num_blocks: int, num_parts: int = 1):
        self.part_size = num_blocks // num_parts
        parts = range(num_parts)
        # Of each part, the first is the next to be taken.
        self._free = [
            OrderedDict.fromkeys(range(p * self.part_size, (p + 1) * self.part_size)) for p in parts
        ]
        self._num_owners = [0] * num_blocks
        self._keys: dict[int, bytes] = {}
        self._holders: list[dict[bytes, int]] = [{} for _ in parts]

    def __len__(self) -> int:
        """Blocks that nobody has."""
        return sum(map(len, self._free))

    def num_known(self, keys: Sequence[bytes], part: int) -> int:
        """How many of the keys' contents, from the front, a part holds."""
        return len(self._filled(keys, part))

    def num_free(self, part: int) -> int:
        """Blocks of a part that nobody has."""
        return len(self._free[part])

    def take(self, number: int, keys: Sequence[bytes] = (), part: int = 0) -> tuple[list[int], int] | None:
        """Take so many, at the front those that hold the keys' contents, as far as there are.

        Returns:
          The blocks, and how many at the front are filled; None, and nothing taken, if there are too few.
        """
        filled, free = self._filled(keys, part), self._free[part]
        num_new = number - len(filled)
        if num_new > len(free) - sum(block in free for block in filled):
            return None
        for block in filled:
            free.pop(block, None)
        new = [free.popitem(last=False)[0] for _ in range(num_new)]
        for block in new:
            self._forget(block)
        for block in filled + new:
            self._num_owners[block] += 1
        return filled + new, len(filled)

    def remember(self, blocks: Sequence[int], keys: Sequence[bytes]) -> None:
        """Let blocks that are filled be found by their keys."""
        for block, key in zip(blocks, keys, strict=False):
            holders = self._holders[block // self.part_size]
            if block not in self._keys and key not in holders:
                self._keys[block], holders[key] = key, block

    def give_back(self, blocks: Sequence[int]) -> None:
        """Let others have them: first those that hold nothing known, then ends before beginnings."""
        for block in reversed(blocks):
            self._num_owners[block] -= 1
            if not self._num_owners[block]:
                free = self._free[block // self.part_size]
                free[block] = None
                free.move_to_end(block, last=block in self._keys)

    def _filled(self, keys: Sequence[bytes], part: int) -> list[int]:
        holders = self._holders[part]
        return [holders[key] for key in itertools.takewhile(holders.__contains__, keys)]

    def _forget(self, block: int) -> None:
        key = self._keys.pop(block, None)
        if key is not None:
            del self._holders[block // self.part_size][key]
