"""A heat map of the load of devices in each layer, before and after a change of placement."""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike

from dualpipe_jax.balance.loads import checked, in_range
from dualpipe_jax.balance.placement import Placement
from dualpipe_jax.present.figure import BLUE, FAINT, INK, ORANGE, new_figure, save

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLOURS = *reversed(BLUE), "#ffffff", *ORANGE, "#5a2d00"
"""The colours of the scale: blue below the mean, white at the mean, orange above, brown at the scale's end."""
_WIDTH, _LEFT, _GAP, _RIGHT, _HEAD, _FOOT = 10.0, 0.6, 0.25, 0.9, 0.85, 0.5  # inches
_LARGEST = 2.0
"""The end of the scale in multiples of the mean; higher loads have the same colour."""
_WHITE = 0.02
"""Loads that differ from the mean by less than this share look white; a map with no others gets its range in words."""


def plot(
    loads: ArrayLike,
    before: Placement,
    after: Placement,
    path: str | Path | None = None,
    *,
    bound: float | None = None,
) -> "Figure":
    """Draw the load of each device in each layer, over the layer's mean, for two placements side by side.

    A row is a layer, a column a device. With several windows, each device shows its worst window. The
    function neither reads nor changes matplotlib's global state.

    >>> from dualpipe_jax.balance import Layout, Placement, balance, plot
    >>> loads = [[3, 3, 1, 1]]
    >>> before = Placement.in_order(num_layers=1, num_experts=4, num_devices=2, num_slots=2)
    >>> figure = plot(loads, before, balance(loads, Layout(num_devices=2, num_slots=2)))
    >>> [axes.get_title(loc="left") for axes in figure.axes[:2]]
    ['before: max/mean 1.5000, worst layer 1.5000', 'after: max/mean 1.0000, worst layer 1.0000']

    Args:
      loads: [layers, experts] or [windows, layers, experts].
      before, after: placements of these layers and experts.
      path: the file to write the figure to, if any; SVG or PNG by its ending.
      bound: the mean over layers of the lower bound on max/mean (``bound_of``), to write into the title.

    Raises:
      ValueError: if the path ends in neither .svg nor .png.
      ModuleNotFoundError: without matplotlib; says how to install it.
    """
    windows = in_range(checked(loads, "plot"))
    maps = [_relative(windows, placement) for placement in (before, after)]
    height = min(max(0.1 * len(maps[0]), 1.2), 6.0)
    whole = _HEAD + height + _FOOT
    figure = new_figure(_WIDTH, whole, path)
    from matplotlib.colors import LinearSegmentedColormap, TwoSlopeNorm

    across = (_WIDTH - _LEFT - _GAP - _RIGHT) / 2
    colours = LinearSegmentedColormap.from_list(
        "load", list(zip((0, 0.25, 0.5, 0.65, 0.85, 1), _COLOURS, strict=True))
    )
    scale = TwoSlopeNorm(1.0, 0.0, _LARGEST)
    for at, (name, values) in enumerate(zip(("before", "after"), maps, strict=True)):
        left = _LEFT + at * (across + _GAP)
        axes = figure.add_axes((left / _WIDTH, _FOOT / whole, across / _WIDTH, height / whole))
        image = axes.imshow(values, cmap=colours, norm=scale, aspect="auto", interpolation="none")
        peak = values.max(-1)
        axes.set_title(
            f"{name}: max/mean {peak.mean():.4f}, worst layer {peak.max():.4f}", size=9, color=INK, loc="left"
        )
        if abs(values - 1).max() < _WHITE:
            even = f"even: {values.min():.4f} to {values.max():.4f} of the mean"
            axes.text(0.5, 0.5, even, size=9, color=FAINT, ha="center", va="center", transform=axes.transAxes)
        axes.set_xlabel("device", size=8.5, color=INK)
        axes.tick_params(labelsize=7.5, colors=INK, length=2)
        axes.locator_params(integer=True)
        if at:
            axes.tick_params(labelleft=False)
        else:
            axes.set_ylabel("layer", size=8.5, color=INK)
        for side in axes.spines.values():
            side.set_color(FAINT)
    place = ((_WIDTH - _RIGHT + 0.15) / _WIDTH, _FOOT / whole, 0.13 / _WIDTH, height / whole)
    bar = figure.colorbar(image, cax=figure.add_axes(place), extend="max")
    bar.ax.tick_params(labelsize=7.5, colors=INK, length=2)
    bar.outline.set_edgecolor(FAINT)  # type: ignore[operator]
    title = f"Load of a device over the mean: {after.num_layers} layers x {after.num_experts} experts on "
    title += f"{after.num_devices} devices" + (f"; bound {bound:.4f}" if bound is not None else "")
    figure.text(_LEFT / _WIDTH, 1 - 0.2 / whole, title, size=11, weight="bold", color=INK, va="top")
    return save(figure, path)


def _relative(windows: np.ndarray, placement: Placement) -> np.ndarray:
    """The load of each device over the layer's mean, in its worst window: float64 [layers, devices]."""
    devices = placement.device_loads(windows)
    mean = devices.mean(-1, keepdims=True)
    return np.divide(devices, mean, out=np.ones_like(devices), where=mean > 0).max(0)
