"""When a run's experts move, and where to: loads followed over steps, a new placement now and then."""

import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from dualpipe_jax.balance import Layout, LoadTracker, Placement, balance, outlook
from train.setup import Run
from train.state.layout import TrainState
from train.state.placement import PlacedLayout

Json = Any


class Balancer:
    """Follows the loads of a run's experts, and moves experts.

    All processes have the same counts, so all find the same placement.

    Args:
      layout: of the run's states.
      every: steps between two looks. Loads are averaged over them: a step of half as long ago counts half as much.
    """

    def __init__(self, layout: PlacedLayout, every: int):
        self._layout, self._every = layout, every
        self._slots = Layout(layout.num_devices, layout.num_slots)
        self._first = LoadTracker.start(layout.num_layers, layout.num_experts, half_life=every / 2)
        self._tracker, self._placement = self._first, layout.start

    def add(self, counts: np.ndarray) -> None:
        """Count a step: int [layers, experts], by logical expert."""
        self._tracker = self._tracker.add(counts)

    def due(self, step: int) -> bool:
        """Whether experts may move after so many steps."""
        return step % self._every == 0

    def rebalance(self, state: TrainState, step: int) -> tuple[TrainState, dict[str, Json]]:
        """The state with experts where the loads want them, and what to write: a line of the metrics.

        Device load is the busiest device's over the mean, on average over layers, as copies that share evenly have it.
        Where nothing is gained nothing moves.
        """
        began = time.perf_counter()
        found = balance(self._tracker.loads, self._slots, self._placement)
        told = outlook(self._tracker.loads, found, self._placement, self._slots)
        if found != self._placement:
            state = self._layout.rebalanced(state, found)
            self._placement = found
        record = {
            "step": step,
            "event": f"experts rebalanced: {told}",
            "device_load_before": float(told.before.mean()),
            "device_load_after": float(told.after.mean()),
            "device_load_bound": float(told.bound.mean()),
            "experts_moved": int(told.moves.sum()),
            "rebalance_s": time.perf_counter() - began,
        }
        return state, record

    def saved(self) -> Json:
        """For a checkpoint: loads, and the placement in force."""
        state = self._tracker.state()
        return {"loads": state | {"sums": state["sums"].tolist()}, "placement": self._placement.to_json()}

    def resume(self, state: TrainState, saved: Mapping[str, Json] | None) -> TrainState:
        """A state that comes from a checkpoint, or is the first one, placed as it was when it was saved.

        If devices or slots are others now, it is placed by the loads that were saved; without any it stays.
        """
        self._tracker, self._placement = self._first, self._layout.start
        if saved is None:
            return state
        self._tracker = LoadTracker.restore(saved["loads"])
        placement = Placement.from_json(saved["placement"])
        if placement.experts.shape != self._layout.start.experts.shape:
            placement = balance(self._tracker.loads, self._slots, self._layout.start)
        if placement != self._placement:
            state = self._layout.rebalanced(state, placement)
            self._placement = placement
        return state


def make_balancer(this: Run) -> Balancer | None:
    every = this.config.experts.rebalance_every
    if every is None:
        return None
    assert isinstance(this.layout, PlacedLayout)
    return Balancer(this.layout, every)
