"""Which blocks of the cache have owners, and which hold the latents of a beginning that other requests may share.

A block is known by a key of all tokens up to its end, so equal keys mean equal latents. Requests with the
same beginning share such blocks, which are not written any more. When all owners have given a block back, it
stays known until its room is needed.
"""

import hashlib
import itertools
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np


def keys_of(tokens: Sequence[int] | np.ndarray, block_size: int, ahead: int = 0) -> list[bytes]:
    """Return the key of each whole block of a text, a digest of all tokens before the block's end.

    ``ahead`` is the number of tokens after a block that its latents also depend on: 1 for latents of a module
    of multi-token prediction. The digest includes them, and a block is whole only if the text has them.
    """
    numbers, keys, key = np.asarray(tokens, np.int32), [], b""
    for end in range(block_size, len(numbers) + 1 - ahead, block_size):
        key = hashlib.sha256(key + numbers[end - block_size : end + ahead].tobytes()).digest()
        keys.append(key)
    return keys


class Blocks:
    """Which blocks are free, and which known beginnings blocks hold.

    Devices have equal parts of the blocks, in order. All blocks of a request are in one part, and what other
    parts hold is of no use to it.
    """

    def __init__(self, num_blocks: int, num_parts: int = 1):
        self.part_size = num_blocks // num_parts
        parts = range(num_parts)
        # The free blocks of each part; the first one is taken next.
        self._free = [
            OrderedDict.fromkeys(range(p * self.part_size, (p + 1) * self.part_size)) for p in parts
        ]
        self._num_owners = [0] * num_blocks
        self._keys: dict[int, bytes] = {}
        self._holders: list[dict[bytes, int]] = [{} for _ in parts]

    def __len__(self) -> int:
        """The number of blocks without an owner."""
        return sum(map(len, self._free))

    def num_known(self, keys: Sequence[bytes], part: int) -> int:
        """The number of keys, from the front, whose blocks a part holds."""
        return len(self._filled(keys, part))

    def num_free(self, part: int) -> int:
        """The number of blocks of a part without an owner."""
        return len(self._free[part])

    def take(self, number: int, keys: Sequence[bytes] = (), part: int = 0) -> tuple[list[int], int] | None:
        """Take ``number`` blocks of a part: first those of ``keys``, as far as the part holds them, then free ones.

        Returns:
          The blocks, and how many at the front are filled; None if too few are free, and then none is taken.
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
        """Record the keys of filled blocks, so that other requests find them."""
        for block, key in zip(blocks, keys, strict=False):
            holders = self._holders[block // self.part_size]
            if block not in self._keys and key not in holders:
                self._keys[block], holders[key] = key, block

    def give_back(self, blocks: Sequence[int]) -> None:
        """Give up ownership of blocks. Of free blocks, those that hold nothing known are taken first, then
        the known ones in the order in which they were given back, where the end of a text comes before its
        beginning."""
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
