"""Loads of experts in the form that the solver needs: checked, windows first, the mean device of a layer at 1."""

import numpy as np
from numpy.typing import ArrayLike

LOAD_TOLERANCE = 1e-12
"""Loads, in multiples of the mean device's, that differ by less than this count as equal: such differences
come from the order of sums."""


def checked(loads: ArrayLike, who: str = "balance") -> np.ndarray:
    """Loads as float64 [windows, layers, experts]; [layers, experts] is one window.

    Raises:
      ValueError: loads are not numbers of these dims, or some are NaN, infinite or negative; says where.
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
    """Loads divided by a power of two, so that the largest is below 1: no sum overflows float64, no digit is lost."""
    given = np.asarray(loads, float)
    return np.ldexp(given, -np.frexp(given.max(initial=0.0))[1])


def relative(windows: np.ndarray, num_devices: int, silent_as: float = 1.0) -> np.ndarray:
    """Loads in multiples of the mean device's load: float64 [windows, layers, experts].

    A window in which no layer has load is left out, if another one has load. In a layer without load in all
    windows the experts count as equal, or as without load, by ``silent_as``.

    Args:
      windows: loads as ``checked`` returns them.
      silent_as: 1 or 0, the load of the mean device in a layer without load.
    """
    windows = windows[windows.any((1, 2))] if windows.any() else windows[:1]
    largest = windows.max(-1, keepdims=True)  # divide by it first, since a sum may overflow float64
    scaled = np.divide(windows, largest, out=np.zeros_like(windows), where=largest > 0)
    silent = ~(largest > 0).any(0)[:, 0]
    scaled[:, silent] = silent_as
    total = scaled.sum(-1, keepdims=True)
    return np.divide(scaled * num_devices, total, out=scaled, where=total > 0)
