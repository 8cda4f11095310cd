"""Functions for every picture: formats, a late import of matplotlib, files whose bytes depend on the figure alone."""

from pathlib import Path
from typing import TYPE_CHECKING

from dualpipe_jax.installing import install_command

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INK, FAINT = "#1c1c22", "#686874"
"""The colours of main text and lines, and of secondary ones."""

ORANGE, GREEN = ("#fec86c", "#eb8005"), ("#54c49c", "#1c5c4c")
LIGHT_GREEN, BLUE = ("#acfeb5", "#6b9250"), ("#a6b8fc", "#3860eb")
IDLE = "#e9e9ee"
"""The palest and the deepest shade of each colour that has a meaning, and the grey of idle time. Any two of
the nine differ by a CIELAB distance of at least 24, also for eyes without red, green or blue cones (Machado,
Oliveira and Fernandes 2009)."""

POINTS = 72
"""The number of points in an inch."""


def new_figure(width: float, height: float, path: str | Path | None, dots: float = 160) -> "Figure":
    """An empty white figure. Neither reads nor changes matplotlib's global state.

    Args:
      width, height: the size of the figure in inches.
      path: the file to which the figure will be written, if any; its ending is checked before the figure is
        drawn.
      dots: the resolution in dots per inch.

    Raises:
      ValueError: if the path ends in neither .svg nor .png.
      ModuleNotFoundError: without matplotlib; says how to install it.
    """
    if path is not None and Path(path).suffix.lower() not in (".svg", ".png"):
        raise ValueError(
            f"plot: cannot tell a format from {str(path)!r}; end the name in .svg or .png, "
            f"such as {Path(path).stem + '.svg'!r}"
        )
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "plot draws with matplotlib, which is not installed; run: "
            + install_command("matplotlib", extra="plot")
        ) from error
    return Figure(figsize=(width, height), dpi=dots, facecolor="white")


def save(figure: "Figure", path: str | Path | None) -> "Figure":
    """Write the figure to ``path``, if there is one, and return it.

    Equal figures give equal bytes: the file has no date and no random names.
    """
    if path is not None:
        from matplotlib import rc_context

        svg = Path(path).suffix.lower() == ".svg"
        with rc_context({"svg.hashsalt": "dualpipe_jax"}):
            figure.savefig(path, metadata={"Date": None} if svg else None)
    return figure
