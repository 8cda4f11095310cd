"""Loads of experts as numbers to work with: checked, windows first, the mean device of a layer at 1."""

import numpy as np
from numpy.typing import ArrayLike

HAIR = 1e-12
"""Loads, over the mean device's, that differ by less are the same: sums in another order."""


def checked(loads: ArrayLike, who: str = "balance") -> np.ndarray:
    """Loads as float64 [windows, layers, experts]; [layers, experts] is one window.

    Raises:
      ValueError: not numbers of these dims, or some are NaN, infinite or negative; says where.
    """
    try:
        given = np.asarray(loads)
    except ValueError:  # rows of unequal length
        given = np.empty(0, object)
    if given.ndim not in (2, 3) or 0 in given.shape or given.dtype.kind not in "iuf":
        raise ValueError(
            f"{who}: loads are {given.dtype} {list(given.shape)}; give numbers [layers, experts] or "
            "[windows, layers, experts]"
        )
    windows = given.astype(float).reshape(-1, *given.shape[-2:])
    wrong = ~(np.isfinite(windows) & (windows >= 0))
    if wrong.any():
        window, layer, expert = np.argwhere(wrong)[0].tolist()
        where = f"window {window}, layer {layer}" if given.ndim == 3 else f"layer {layer}"
        raise ValueError(
            f"{who}: the load of {where}, expert {expert} is {windows[window, layer, expert]}; loads are counts of "
            "tokens, finite and at least 0"
        )
    return windows


def in_range(loads: ArrayLike) -> np.ndarray:
    """Loads over a power of two, the largest below 1: no sum is too large for float64, and no digit is lost."""
    given = np.asarray(loads, float)
    return np.ldexp(given, -np.frexp(given.max(initial=0.0))[1])


def relative(windows: np.ndarray, num_devices: int, silent_as: float = 1.0) -> np.ndarray:
    """Loads in multiples of what a device has to do on average: float64 [windows, layers, experts].

    A window without load asks for nothing, and is left out if no layer has any. A layer without load in all windows
    says nothing: its experts count as equal, or as nothing.

    Args:
      windows: as ``checked`` gives them.
      silent_as: 1 or 0, what the mean device has to do in a layer without load.
    """
    windows = windows[windows.any((1, 2))] if windows.any() else windows[:1]
    largest = windows.max(-1, keepdims=True)  # first, since a sum may be too large for float64
    scaled = np.divide(windows, largest, out=np.zeros_like(windows), where=largest > 0)
    silent = ~(largest > 0).any(0)[:, 0]
    scaled[:, silent] = silent_as
    total = scaled.sum(-1, keepdims=True)
    return np.divide(scaled * num_devices, total, out=scaled, where=total > 0)
