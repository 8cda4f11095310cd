"""Colours are the paper's hues, apart to every kind of eye, and what is written on them can be read."""

import itertools

import numpy as np
import pytest

from dualpipe_jax.present.figure import FAINT, IDLE
from dualpipe_jax.schedule import Op
from dualpipe_jax.schedule.formats.colours import COLOURS, colours, is_dark

CONES = {
    "all": np.eye(3),
    "no red": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "no green": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "no blue": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}  # fmt: skip
"""Of linear RGB: Machado, Oliveira and Fernandes 2009, severity 1."""

XYZ = np.array(
    [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]]
)
"""Of linear sRGB, IEC 61966-2-1."""


def linear(colour):
    s = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(s <= 0.04045, s / 12.92, ((s + 0.055) / 1.055) ** 2.4)


def lab(rgb):
    """CIELAB of linear sRGB under its own white."""
    t = XYZ @ np.clip(rgb, 0, 1) / XYZ.sum(1)
    x, y, z = np.where(t > 216 / 24389, np.cbrt(t), (24389 / 27 * t + 16) / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def contrast(one, other):
    """Of WCAG 2."""
    low, high = sorted(XYZ[1] @ linear(colour) for colour in (one, other))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("eyes", CONES)
def test_no_two_are_alike(eyes):
    seen = [lab(CONES[eyes] @ linear(one)) for one in (IDLE, *itertools.chain(*COLOURS.values()))]
    assert min(np.linalg.norm(a - b) for a, b in itertools.combinations(seen, 2)) >= 24


def test_they_are_those_of_deepseeks_figure():
    """Hue angles of CIELAB: yellow is near 100 degrees, green near 140, blue near 290."""
    ranges = {Op.F: (50, 90), Op.B: (130, 180), Op.I: (120, 180), Op.W: (260, 300)}
    for op, (least, most) in ranges.items():
        for colour in COLOURS[op]:
            _, a, b = lab(linear(colour))
            assert least < np.degrees(np.arctan2(b, a)) % 360 < most, (op, colour)


def test_what_is_written_can_be_read():
    assert contrast(FAINT, "#ffffff") >= 4.5
    for op, shades in itertools.product(Op, (1, 2, 3, 4)):
        for colour in colours(op, shades):
            white, black = contrast(colour, "#ffffff"), contrast(colour, "#000000")
            assert is_dark(colour) == (white > black) and max(white, black) >= 4.5
