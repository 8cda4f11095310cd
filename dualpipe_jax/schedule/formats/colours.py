"""The colours of ops and stages in all drawings of schedules, and their names."""

import math

from dualpipe_jax.present.figure import BLUE, GREEN, LIGHT_GREEN, ORANGE
from dualpipe_jax.schedule.ir import Op, Placement

COLOURS: dict[Op, tuple[str, str]] = {Op.F: ORANGE, Op.B: GREEN, Op.I: LIGHT_GREEN, Op.W: BLUE}
"""The palest and the deepest shade of each op, in the hues of DeepSeek's figure of DualPipe."""

NAMES = {Op.F: "forward", Op.B: "backward", Op.I: "backward for input", Op.W: "backward for weights"}


def num_shades(placement: Placement) -> int:
    """The number of shades in which the stages of a placement are drawn."""
    return placement.num_pipes * _passes_over_ranks(placement)


def shade(placement: Placement, stage: int) -> int:
    """The number of a stage's shade: by its pipe and, within it, by how often the pipe has passed all ranks."""
    return (
        placement.pipe_of(stage) * _passes_over_ranks(placement)
        + placement.model_stage(stage) // placement.num_ranks
    )


def shade_names(placement: Placement) -> tuple[str, ...]:
    """The meaning of each shade in words, palest first."""
    laps = _passes_over_ranks(placement)
    if placement.num_pipes > 1:
        pipes = [f"pipe {pipe}" for pipe in range(placement.num_pipes)]
        return tuple(f"{pipe} lap {lap}" if laps > 1 else pipe for pipe in pipes for lap in range(laps))
    if placement == Placement.v(placement.num_ranks):
        return "way there", "way back"
    return tuple(f"lap {lap}" for lap in range(laps))


def colours(op: Op, shades: int) -> list[str]:
    """An op's colour in a number of shades, as "#rrggbb", palest first."""
    pale, deep = ([int(colour[i : i + 2], 16) for i in (1, 3, 5)] for colour in COLOURS[op])
    parts = [at / (shades - 1) if shades > 1 else 0.0 for at in range(shades)]
    mixed = ([round(p + part * (d - p)) for p, d in zip(pale, deep, strict=True)] for part in parts)
    return ["#" + "".join(f"{channel:02x}" for channel in rgb) for rgb in mixed]


def _passes_over_ranks(placement: Placement) -> int:
    return math.ceil(placement.num_model_stages / placement.num_ranks)


def is_dark(colour: str) -> bool:
    """Whether white text is easier to read than black on a colour, "#rrggbb", by the contrast of WCAG 2."""
    channels = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    r, g, b = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return (0.2126 * r + 0.7152 * g + 0.0722 * b + 0.05) ** 2 < 1.05 * 0.05
