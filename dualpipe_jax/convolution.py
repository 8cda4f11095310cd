"""How much a convolution multiplies. Python and NumPy only."""

import numpy as np


def num_window_hits(
    size: int, window: int, made: int, stride: int, before: int, spread: int, apart: int
) -> int:
    """Return the number of pairs of an output and a window position, along one dim, that read an input element.

    The others read padding, or a gap of a dilated input, as most do in the gradient of a strided convolution's input.

    >>> num_window_hits(size=4, window=3, made=4, stride=1, before=1, spread=1, apart=1)
    10

    Arguments:
      size, window, made: the sizes of the input, of the window and of the output.
      stride: by how many places the window moves from output to output.
      before: the padding before the first element.
      spread, apart: the distance between neighbouring elements of the input, and of the window.
    """
    places = (np.arange(made)[:, None] * stride - before) + np.arange(window)[None] * apart
    return int(((places >= 0) & (places <= (size - 1) * spread) & (places % spread == 0)).sum())
