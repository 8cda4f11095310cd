"""Permutations of range(size) that are computed, not stored: any element at once, in memory for that element alone.

A Feistel network permutes the numbers of a fixed count of bits whatever its round function is, since each round
xors one half with a function of the other and can be undone so (Luby, Rackoff: How to construct pseudorandom
permutations, 1988). Numbers beyond ``size`` are sent on until they come back inside: walking along a cycle of the
larger permutation leaves one of the smaller (Black, Rogaway: Ciphers with arbitrary finite domains, 2002).
"""

import numpy as np

NUM_ROUNDS = 6
"""Each round changes both halves."""


def permute(numbers: np.ndarray, size: int, key: int) -> np.ndarray:
    """Where permutation ``key`` of range(size) sends each of ``numbers``.

    Args:
      numbers: integers [n], each in range(size).
      size: how many numbers there are, at most 2^63.
      key: which permutation; 64 bits of it count.

    Returns:
      int64 [n].
    """
    found = numbers.astype(np.uint64)
    if ((found >= size) | (numbers < 0)).any():
        raise ValueError(f"permute: numbers must be in range({size}), got up to {numbers.max()}")
    bits = (size - 1).bit_length()
    low = np.uint64(bits // 2)
    low_mask, high_mask = (np.uint64(2**count - 1) for count in (bits // 2, bits - bits // 2))
    keys = _mix(np.uint64(key % 2**64) + np.arange(1, 2 * NUM_ROUNDS + 1, dtype=np.uint64) * _GOLDEN)

    def network(values: np.ndarray) -> np.ndarray:
        high, right = values >> low, values & low_mask
        for for_high, for_right in keys.reshape(-1, 2):
            high = high ^ (_mix(right ^ for_high) & high_mask)
            right = right ^ (_mix(high ^ for_right) & low_mask)
        return high << low | right

    found = network(found)
    while (outside := found >= size).any():
        found[outside] = network(found[outside])
    return found.astype(np.int64)


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(values: np.ndarray) -> np.ndarray:
    """Each of 64 bits depends on all (the finaliser of splitmix64; Steele, Lea, Flood, 2014)."""
    values = (values ^ values >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ values >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return values ^ values >> np.uint64(31)
