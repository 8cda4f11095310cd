"""`balance`: a placement that is as even as can be found."""

import numpy as np
from numpy.typing import ArrayLike

from dualpipe_jax.arguments import typechecked
from dualpipe_jax.balance.bounds import lower_bound, packing_bound
from dualpipe_jax.balance.copies import add_copies, nearby_counts, other_counts
from dualpipe_jax.balance.groups import place_by_groups
from dualpipe_jax.balance.loads import HAIR, checked, relative
from dualpipe_jax.balance.moving import replan
from dualpipe_jax.balance.pack import Packed, count_copies, deal, pack, refine
from dualpipe_jax.balance.placement import Layout, Placement

CLOSE = 5e-4
"""A layer whose busiest device is so little above the bound, as a share, is good enough."""

_SLACK = 2
"""Other numbers of copies are tried where the greedy ones end so many times further above the bound."""

_PATIENCE = 20
"""So many other numbers in a row that are no better, and a layer goes on to what is near its best."""

_TURNS = 32
"""Swaps one after another in a try; the best is swapped to its end."""

_ROUNDS, _SLOTS, _SLOTS_A_ROUND = 16, 400_000, 40_000
"""Rounds of tries near the best, and slots that all tries fill, and a round of them, at most: about a second."""


@typechecked
def balance(
    loads: ArrayLike,
    layout: Layout,
    previous: Placement | None = None,
    *,
    max_moves: int | None = None,
    move_cost: float = 0.0,
    close: float = CLOSE,
    effort: float = 1.0,
) -> Placement:
    """Place experts so that the busiest device of each layer has little to do, and no expert twice on a device.

    Copies and their packing start where DeepSeek's end (greedy, see ``rebalance_experts``). Then slots are swapped
    between devices; where that stays above ``bound_of``, other numbers of copies are tried too. Layers are
    independent of each other. The same input gives the same placement on every machine.

    >>> from dualpipe_jax.balance import Layout, balance
    >>> loads = [[8, 1, 1, 1, 1, 1, 1, 2]]
    >>> placed = balance(loads, Layout(num_devices=2, num_slots=5))
    >>> placed.imbalance(loads).tolist()
    [1.0]

    Args:
      loads: what each expert has to do, such as counts of tokens: [layers, experts], or [windows, layers, experts],
        windows of time of which the worst counts, each relative to its own mean. A layer that has no load at all is
        placed as if its experts were equal, or left as it was.
      layout: devices and their slots.
      previous: the placement in force. The new one names slots so that what stays is not moved, and a layer takes no
        more moves than its gain needs. With groups, these stay on their nodes. One of fewer slots, such as one without
        copies, only lends its devices their names.
      max_moves: the most experts that devices may have to fetch, over all layers; moves go where each gains most.
      move_cost: what moving one expert costs, in loads of the mean device of a layer: a move is made only if it lowers
        the busiest device by more. For example, a move of 5 ms that is to pay within 100 steps, where a layer's mean
        device works for 2 ms a step: 0.025.
      close: a layer is good enough at this share above the bound.
      effort: how long to try other numbers of copies for layers that are not: at 1 about a second, at 0 not at all.

    Raises:
      ValueError: loads are no such numbers, experts do not fit the layout, ``previous`` is of other counts, or
        limits are given without it; says which.
    """
    windows = checked(loads)
    layout.check(windows.shape[-1])
    _check_limits(previous, max_moves, move_cost, close=close, effort=effort)
    if previous is not None:
        _check_previous(previous, windows, layout, limited=max_moves is not None or move_cost > 0)
    load = relative(windows, layout.num_devices, silent_as=1.0 if previous is None else 0.0)

    def place_rows(rows: np.ndarray, num_devices: int, before: np.ndarray | None) -> np.ndarray:
        held = place(rows, num_devices, layout.num_slots, close, effort)
        return held if before is None else replan(before, held, rows, max_moves, move_cost, close)

    before = None if previous is None else previous.experts
    if layout.num_groups is None:
        held = place_rows(load, layout.num_devices, before)
    else:
        held = place_by_groups(load, layout, before, place_rows)
    return Placement(held, windows.shape[-1])


def _check_limits(
    previous: Placement | None, max_moves: int | None, move_cost: float, **others: float
) -> None:
    if max_moves is not None and (not isinstance(max_moves, int | np.integer) or max_moves < 0):
        raise ValueError(
            f"balance: max_moves={max_moves!r}; give an integer of at least 0, or None for no limit"
        )
    for name, value in ({"move_cost": move_cost} | others).items():
        if not 0 <= value < np.inf:
            raise ValueError(f"balance: {name}={value}; give a number of at least 0")
    if previous is None and (max_moves is not None or move_cost):
        raise ValueError("balance: max_moves and move_cost are of moves from a placement; give previous too")


def _check_previous(previous: Placement, windows: np.ndarray, layout: Layout, limited: bool) -> None:
    wanted = windows.shape[1], windows.shape[2], layout.num_devices
    slots = previous.num_slots <= layout.num_slots if not limited else previous.num_slots == layout.num_slots
    if (previous.num_layers, previous.num_experts, previous.num_devices) != wanted or not slots:
        raise ValueError(
            f"balance: previous is {previous}; wanted are {wanted[0]} layers x {wanted[1]} experts on {wanted[2]} "
            f"devices of {layout.num_slots} slots, or fewer if moves are not limited. Leave previous out, to begin anew"
        )


def place(relative: np.ndarray, num_devices: int, num_slots: int, close: float, effort: float) -> np.ndarray:
    """Experts in slots, rows independent of each other: int64 [rows, devices, slots].

    Loads are [windows, rows, experts], the mean device at 1; ``close`` and ``effort`` are as of ``balance``.
    """
    load, copies = relative.max(0), num_devices * num_slots
    counts = add_copies(load, np.ones(load.shape, np.int64), copies, num_devices)
    packed = refined(pack(relative, counts, num_devices), relative, close)
    rows = np.flatnonzero(packed.peak.max(-1) > 1 + _SLACK * close)
    if len(rows) and load.shape[1] < copies < load.shape[1] * num_devices:
        search = _Search(relative[:, rows], packed.only(rows), close)
        others = other_counts(search.relative, search.bound, copies, num_devices)
        search.try_these(np.stack([counts[rows], *others], 1), _SLOTS * effort / 2)
        search.try_nearby(_SLOTS * effort, round(_ROUNDS * effort))
        packed.held[rows] = refined(search.held, search.relative, close).held
    return packed.held


class _Search:
    """Tries numbers of copies for layers that are not at their bound, and keeps the best that they pack to.

    Attributes:
      relative: [windows, layers, experts].
      held: int64 [layers, devices, slots], the best.
      bound: [layers].
    """

    def __init__(self, relative: np.ndarray, packed: Packed, close: float):
        self.relative, self.held, self._close = relative, packed.held, close
        self.bound = lower_bound(relative, *self.held.shape[1:])
        self._peak, self._idle = packed.peak.max(-1), np.zeros(len(self.bound), int)
        self._filled = 0  # slots so far

    def try_these(self, counts: np.ndarray, until: float) -> None:
        """Counts [layers, tries, experts], for layers that are above their bound and have patience left."""
        done = 0
        while done < counts.shape[1] and self._filled < until:
            layers = self._above()
            layers = layers[self._idle[layers] < _PATIENCE]
            if not len(layers):
                return
            some = self._tries_a_round(layers)
            self._try(layers, counts[layers, done : done + some])
            done += some

    def try_nearby(self, until: float, rounds: int) -> None:
        """Counts that differ a little from the best, at random; the same random ones every time."""
        random = np.random.default_rng(0)
        for _ in range(rounds):
            layers = self._above()
            if not len(layers) or self._filled >= until:
                return
            best = count_copies(self.held[layers], self.relative.shape[-1])
            tries = self._tries_a_round(layers)
            self._try(layers, nearby_counts(best, tries, self.held.shape[1], random))

    def _tries_a_round(self, layers: np.ndarray) -> int:
        return int(np.clip(_SLOTS_A_ROUND // self._slots(layers), 1, 64))

    def _slots(self, layers: np.ndarray) -> int:
        return self.held[0].size * len(self.relative) * len(layers)

    def _above(self) -> np.ndarray:
        return np.flatnonzero(self._peak > self.bound * (1 + _SLACK * self._close))

    def _try(self, layers: np.ndarray, counts: np.ndarray) -> None:
        """Counts [layers, tries, experts]."""
        tries, row = counts.shape[1], np.arange(len(layers))
        flat = counts.reshape(len(layers) * tries, -1)
        load = np.repeat(self.relative[:, layers], tries, 1)
        self._filled += tries * self._slots(layers)
        found = refined(deal(load, flat, self.held.shape[1]), load, self._close, _TURNS)
        peaks = found.peak.max(-1).reshape(len(layers), tries)
        best = peaks.argmin(-1)
        better = peaks[row, best] < self._peak[layers] - HAIR
        self._idle[layers] = np.where(better, 0, self._idle[layers] + tries)
        self._peak[layers] = np.where(better, peaks[row, best], self._peak[layers])
        self.held[layers[better]] = found.held[(row * tries + best)[better]]


def refined(held: np.ndarray, relative: np.ndarray, close: float, turns: int | None = None) -> Packed:
    """Swapped until close to the bound of these copies, or until no swap helps or turns are over."""
    packed = Packed.of(held, relative)
    shares = packed.slots.reshape(*packed.slots.shape[:2], -1)
    bound = np.max([packing_bound(window, held.shape[1]) for window in shares], 0)
    refine(packed, np.maximum(bound * (1 + 1e-9), 1 + close), turns)
    return packed
