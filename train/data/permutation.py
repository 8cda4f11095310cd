"""Permutations of range(size) that are computed, not stored: any element directly, in memory for that element alone.

A Feistel network permutes all numbers of a fixed number of bits, whatever its round function is: each round xors one
half with a function of the other half, which can be undone (Luby, Rackoff: How to construct pseudorandom permutations,
1988). Results outside of range(size) are permuted again until they are inside. This walk along a cycle of the larger
permutation gives a permutation of range(size) (Black, Rogaway: Ciphers with arbitrary finite domains, 2002).
"""

import numpy as np

NUM_ROUNDS = 6
"""The number of rounds of the network; each changes both halves."""


def permute(numbers: np.ndarray, size: int, key: int) -> np.ndarray:
    """Apply permutation ``key`` of range(size) to each of ``numbers``.

    Args:
      numbers: integers [n], each in range(size).
      size: the number of numbers that are permuted, at most 2^63.
      key: the number of the permutation; its lowest 64 bits count.

    Returns:
      int64 [n].

    Raises:
      ValueError: one of the numbers is not in range(size).
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
    """Mix uint64 values so that each bit depends on all 64 (the finaliser of splitmix64; Steele, Lea, Flood, 2014)."""
    values = (values ^ values >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ values >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return values ^ values >> np.uint64(31)
