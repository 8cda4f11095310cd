"""The gain of a placement, known before anything moves: load before and after, the bound, and the moves."""

import dataclasses
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from dualpipe_jax.arguments import typechecked
from dualpipe_jax.balance.bounds import lower_bound, packing_bound
from dualpipe_jax.balance.loads import checked, relative
from dualpipe_jax.balance.placement import Layout, Placement


@dataclasses.dataclass(frozen=True, eq=False)
class Outlook:
    """What a change of placement gains in each layer, and the experts that it moves; ``outlook`` makes it.

    A layer takes as long as its busiest device, and all layers have the same number of tokens: so the time of
    a step's experts is proportional to the sum over layers of max/mean.

    >>> from dualpipe_jax.balance import Layout, Placement, balance, outlook
    >>> loads, layout = [[3, 3, 1, 1]], Layout(num_devices=2, num_slots=2)
    >>> before = Placement.in_order(num_layers=1, num_experts=4, num_devices=2, num_slots=2)
    >>> print(outlook(loads, balance(loads, layout), before, layout))
    max/mean 1.5000 -> 1.0000, bound 1.0000; 33.3% less for the busiest devices, 2 experts move

    Attributes:
      before: float64 [layers], max/mean over devices under the placement in force, in the worst window.
      after: float64 [layers], the same under the other placement.
      bound: float64 [layers], max/mean below which no placement of that layout can get.
      moves: int64 [layers], the number of experts that devices have to fetch.
    """

    before: np.ndarray
    after: np.ndarray
    bound: np.ndarray
    moves: np.ndarray

    @property
    def gain(self) -> float:
        """The share of a step's time for experts that is saved; a gain of 0.25 means 4/3 of the speed."""
        return float(1 - self.after.sum() / self.before.sum())

    @property
    def utilisation(self) -> tuple[float, float]:
        """The mean share of time for which devices work, before and after; else they wait for the busiest device."""
        return float(1 / self.before.mean()), float(1 / self.after.mean())

    def to_json(self) -> dict[str, Any]:
        """The outlook as a dict of lists and numbers, which ``json.dumps`` writes."""
        arrays = {field.name: getattr(self, field.name).tolist() for field in dataclasses.fields(self)}
        return arrays | {"gain": self.gain, "utilisation": list(self.utilisation)}

    def __str__(self) -> str:
        return (
            f"max/mean {self.before.mean():.4f} -> {self.after.mean():.4f}, bound {self.bound.mean():.4f}; "
            f"{self.gain:.1%} less for the busiest devices, {int(self.moves.sum())} experts move"
        )


@typechecked
def outlook(loads: ArrayLike, placement: Placement, previous: Placement, layout: Layout) -> Outlook:
    """The gain of changing from a previous placement to another.

    >>> from dualpipe_jax.balance import Layout, Placement, balance, outlook
    >>> loads, layout = [[3, 3, 1, 1]], Layout(num_devices=2, num_slots=2)
    >>> before = Placement.in_order(num_layers=1, num_experts=4, num_devices=2, num_slots=2)
    >>> outlook(loads, balance(loads, layout), before, layout).gain
    0.33333333333333337

    Args:
      loads: [layers, experts] or [windows, layers, experts].
      placement: the new placement, of ``layout``.
      previous: the placement in force, of the same numbers of layers, experts and devices; its number of
        slots may differ.
      layout: devices and their slots.
    """
    windows = checked(loads, "outlook")
    return Outlook(
        worst_imbalance(windows, previous),
        worst_imbalance(windows, placement),
        bound_of(windows, layout),
        placement.moves_from(previous),
    )


@typechecked
def worst_imbalance(loads: ArrayLike, placement: Placement) -> np.ndarray:
    """Max/mean over devices in the worst window: float64 [layers], at least 1."""
    return placement.imbalance(checked(loads, "worst_imbalance")).max(0)


@typechecked
def bound_of(loads: ArrayLike, layout: Layout) -> np.ndarray:
    """A lower bound on max/mean over devices for all placements of a layout: float64 [layers].

    Proven for placements whose copies share evenly, with at most one copy of an expert on a device: see
    ``docs/bounds.md``.

    >>> from dualpipe_jax.balance import Layout, bound_of
    >>> bound_of([[9, 1, 1, 1]], Layout(num_devices=2, num_slots=2)).round(3).tolist()
    [1.667]
    """
    windows = checked(loads, "bound_of")
    layout.check(windows.shape[-1])
    # A layer without load is even wherever its experts are: as equal experts it could have a bound above 1.
    load = relative(windows, layout.num_devices, silent_as=0.0)
    bound = lower_bound(load, layout.num_devices, layout.num_slots)
    if layout.num_groups is None:
        return bound
    groups = load.reshape(*load.shape[:2], layout.num_groups, -1).sum(-1)
    scale = layout.num_nodes / layout.num_devices
    return np.max([bound, *(packing_bound(window * scale, layout.num_nodes) for window in groups)], 0)


@typechecked
def is_due(loads: ArrayLike, placement: Placement, threshold: float = 0.9) -> bool:
    """Whether to look for another placement: whether devices work for less than ``threshold`` of their time.

    Whether another placement is worth its moves is for ``outlook`` to say, or for the move_cost of
    ``balance``.

    >>> from dualpipe_jax.balance import Placement, is_due
    >>> in_order = Placement.in_order(num_layers=1, num_experts=4, num_devices=2, num_slots=2)
    >>> is_due([[3, 3, 1, 1]], in_order), is_due([[3, 1, 3, 1]], in_order)
    (True, False)

    Raises:
      ValueError: the threshold is not in (0, 1].
    """
    if not 0 < threshold <= 1:
        raise ValueError(
            f"is_due: threshold={threshold}; give a share of the devices' time above 0 and at most 1"
        )
    return bool(1 / worst_imbalance(loads, placement).mean() < threshold)
