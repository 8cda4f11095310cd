"""What every picture shares: its formats, matplotlib imported late, a file whose bytes depend on the figure alone."""

from pathlib import Path
from typing import TYPE_CHECKING

from dualpipe_jax.installing import install_command

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INK, FAINT = "#1c1c22", "#686874"
"""The colours of what matters, and of what stands beside it."""

ORANGE, GREEN = ("#fec86c", "#eb8005"), ("#54c49c", "#1c5c4c")
LIGHT_GREEN, BLUE = ("#acfeb5", "#6b9250"), ("#a6b8fc", "#3860eb")
IDLE = "#e9e9ee"
"""The palest and the deepest shade of each colour that means something, and the grey behind idle time. Any two of the
nine differ by a CIELAB distance of at least 24, to eyes without red, green or blue cones too (Machado, Oliveira and
Fernandes 2009)."""

POINTS = 72
"""To an inch."""


def new_figure(width: float, height: float, path: str | Path | None, dots: float = 160) -> "Figure":
    """An empty white figure of so many inches; nothing of matplotlib's global state is read or left changed.

    Args:
      width, height: in inches.
      path: where it will be written, if anywhere; looked at now, for drawing takes time.
      dots: an inch.

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
    """The figure, written if there is a path: the same bytes for the same figure, no date, no random names."""
    if path is not None:
        from matplotlib import rc_context

        svg = Path(path).suffix.lower() == ".svg"
        with rc_context({"svg.hashsalt": "dualpipe_jax"}):
            figure.savefig(path, metadata={"Date": None} if svg else None)
    return figure
