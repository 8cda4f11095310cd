"""`balance`: search for the most even placement."""

import numpy as np
from numpy.typing import ArrayLike

from dualpipe_jax.arguments import typechecked
from dualpipe_jax.balance.bounds import lower_bound, packing_bound
from dualpipe_jax.balance.copies import add_copies, nearby_counts, other_counts
from dualpipe_jax.balance.groups import place_by_groups
from dualpipe_jax.balance.loads import LOAD_TOLERANCE, checked, relative
from dualpipe_jax.balance.moving import replan
from dualpipe_jax.balance.pack import SlotLoads, count_copies, deal_in_rounds, pack, refine
from dualpipe_jax.balance.placement import Layout, Placement

CLOSE = 5e-4
"""The default of ``close``, see ``balance``: a share of the load of the mean device."""

_SLACK_FACTOR = 2
"""Other numbers of copies are tried in layers whose busiest device is above the bound by more than this many
times ``close``."""

_PATIENCE = 20
"""After this many tries in a row without improvement, a layer skips the rest of ``other_counts``; tries near
its best follow."""

_TURNS_PER_TRY = 32
"""The number of turns of ``refine`` in a try; the best try of a layer is later refined to the end."""

_MAX_ROUNDS, _MAX_SLOTS, _MAX_SLOTS_PER_ROUND = 16, 400_000, 40_000
"""Limits of the search: the number of rounds of tries near the best; the number of slots that all tries fill,
in all windows; and that of one round. Together about a second."""


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
    """Place experts so that the load of the busiest device of each layer is low, with no expert twice on a device.

    The search starts from DeepSeek's result (greedy, see ``rebalance_experts``). Then slots are swapped
    between devices; in layers that stay above ``bound_of``, other numbers of copies are tried too. Layers are
    independent of each other. The same input gives the same placement on every machine.

    >>> from dualpipe_jax.balance import Layout, balance
    >>> loads = [[8, 1, 1, 1, 1, 1, 1, 2]]
    >>> placed = balance(loads, Layout(num_devices=2, num_slots=5))
    >>> placed.imbalance(loads).tolist()
    [1.0]

    Args:
      loads: the load of each expert, such as counts of tokens: [layers, experts], or [windows, layers,
        experts], windows of time, each relative to its own mean, of which the worst decides. A layer without
        any load is placed as if its experts were equal, or with ``previous`` stays as it was.
      layout: devices and their slots.
      previous: the placement in force. In the new one experts that stay on a device keep their slots, and a
        layer takes no more moves than its gain needs. With groups, these stay on their nodes. If it has fewer
        slots than the layout, as one without copies has, all is placed anew, and devices are numbered so that
        most experts stay.
      max_moves: the largest number of experts that devices may have to fetch, over all layers; moves are made
        where each gains most.
      move_cost: the cost of moving one expert, in loads of the mean device of a layer: a move is made only if
        it lowers the load of the busiest device by more. For example, if a move takes 5 ms and is to pay
        within 100 steps, and a layer's mean device works for 2 ms a step, it is 0.025.
      close: a layer is good enough if its busiest device is at most this share above the mean device, or at
        the bound for its numbers of copies. Other numbers are tried only where it is more than twice this
        share above the bound.
      effort: how long to try other numbers of copies, in layers that are not good enough: at 1 about a
        second, at 0 not at all.

    Raises:
      ValueError: loads are no such numbers, experts do not fit the layout, ``previous`` is of other counts,
        or limits are given without it; says which.
    """
    windows = checked(loads)
    layout.check(windows.shape[-1])
    _check_limits(previous, max_moves, move_cost, close=close, effort=effort)
    if previous is not None:
        _check_previous(previous, windows, layout, limited=max_moves is not None or move_cost > 0)
    load = relative(windows, layout.num_devices, silent_as=1.0 if previous is None else 0.0)

    def place_rows(rows: np.ndarray, num_devices: int, before: np.ndarray | None) -> np.ndarray:
        held = place(rows, num_devices, layout.num_slots, close, effort)
        nodes = 1 if layout.num_groups is None else layout.num_nodes
        return held if before is None else replan(before, held, rows, max_moves, move_cost, close, nodes)

    before = None if previous is None else previous.experts
    if layout.num_groups is None:
        held = place_rows(load, layout.num_devices, before)
    else:
        held = place_by_groups(load, layout, before, place_rows)
    return Placement(held, windows.shape[-1])


def _check_limits(
    previous: Placement | None, max_moves: int | None, move_cost: float, **others: float
) -> None:
    if max_moves is not None and max_moves < 0:
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
    """Place experts without a previous placement, each row by itself: int64 [rows, devices, slots].

    ``relative`` is [windows, rows, experts], the mean device at 1; for ``close`` and ``effort`` see
    ``balance``.
    """
    load, copies = relative.max(0), num_devices * num_slots
    counts = add_copies(load, np.ones(load.shape, np.int64), copies, num_devices)
    packed = refined(pack(relative, counts, num_devices), relative, close)
    rows = np.flatnonzero(packed.peak.max(-1) > 1 + _SLACK_FACTOR * close)
    if len(rows) and load.shape[1] < copies < load.shape[1] * num_devices:
        search = _Search(relative[:, rows], packed.select(rows), close)
        others = other_counts(search.relative, search.bound, copies, num_devices)
        search.try_counts(np.stack([counts[rows], *others], 1), _MAX_SLOTS * effort / 2)
        search.try_nearby(_MAX_SLOTS * effort, round(_MAX_ROUNDS * effort))
        packed.held[rows] = refined(search.held, search.relative, close).held
    return packed.held


class _Search:
    """Tries other numbers of copies for layers that are above their bound, and keeps the best placement of each.

    Attributes:
      relative: loads, [windows, layers, experts].
      held: int64 [layers, devices, slots], the best placement so far.
      bound: [layers], the lower bound on max/mean.
    """

    def __init__(self, relative: np.ndarray, packed: SlotLoads, close: float):
        self.relative, self.held, self._close = relative, packed.held, close
        self.bound = lower_bound(relative, *self.held.shape[1:])
        self._peak, self._tries_without_gain = packed.peak.max(-1), np.zeros(len(self.bound), int)
        self._slots_filled = 0  # the number of slots that tries have filled so far, in all windows

    def try_counts(self, counts: np.ndarray, until: float) -> None:
        """Try counts [layers, tries, experts] for layers above their bound that have patience (``_PATIENCE``) left."""
        done = 0
        while done < counts.shape[1] and self._slots_filled < until:
            layers = self._layers_above_bound()
            layers = layers[self._tries_without_gain[layers] < _PATIENCE]
            if not len(layers):
                return
            some = self._tries_per_round(layers)
            self._try(layers, counts[layers, done : done + some])
            done += some

    def try_nearby(self, until: float, rounds: int) -> None:
        """Try counts that differ a little from the best, at random, with the same seed each time."""
        random = np.random.default_rng(0)
        for _ in range(rounds):
            layers = self._layers_above_bound()
            if not len(layers) or self._slots_filled >= until:
                return
            best = count_copies(self.held[layers], self.relative.shape[-1])
            tries = self._tries_per_round(layers)
            self._try(layers, nearby_counts(best, tries, self.held.shape[1], random))

    def _tries_per_round(self, layers: np.ndarray) -> int:
        return int(np.clip(_MAX_SLOTS_PER_ROUND // self._slots_per_try(layers), 1, 64))

    def _slots_per_try(self, layers: np.ndarray) -> int:
        return self.held[0].size * len(self.relative) * len(layers)

    def _layers_above_bound(self) -> np.ndarray:
        return np.flatnonzero(self._peak > self.bound * (1 + _SLACK_FACTOR * self._close))

    def _try(self, layers: np.ndarray, counts: np.ndarray) -> None:
        """Try counts [layers, tries, experts] for these layers, and keep each layer's best placement."""
        tries, row = counts.shape[1], np.arange(len(layers))
        flat = counts.reshape(len(layers) * tries, -1)
        load = np.repeat(self.relative[:, layers], tries, 1)
        self._slots_filled += tries * self._slots_per_try(layers)
        found = refined(deal_in_rounds(load, flat, self.held.shape[1]), load, self._close, _TURNS_PER_TRY)
        peaks = found.peak.max(-1).reshape(len(layers), tries)
        best = peaks.argmin(-1)
        better = peaks[row, best] < self._peak[layers] - LOAD_TOLERANCE
        self._tries_without_gain[layers] = np.where(better, 0, self._tries_without_gain[layers] + tries)
        self._peak[layers] = np.where(better, peaks[row, best], self._peak[layers])
        self.held[layers[better]] = found.held[(row * tries + best)[better]]


def refined(held: np.ndarray, relative: np.ndarray, close: float, turns: int | None = None) -> SlotLoads:
    """A placement after swaps of slots, see ``refine``.

    A layer is done at the packing bound of its copies, or at 1 + ``close`` if that is higher.
    """
    packed = SlotLoads.of_placement(held, relative)
    shares = packed.slots.reshape(*packed.slots.shape[:2], -1)
    bound = np.max([packing_bound(window, held.shape[1]) for window in shares], 0)
    refine(packed, np.maximum(bound * (1 + 1e-9), 1 + close), turns)
    return packed
