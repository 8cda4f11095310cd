"""When a run's experts move, and where to: loads are averaged over steps, and a new placement is found regularly."""

import dataclasses
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
    """Averages the loads of a run's experts, and moves experts.

    All processes have the same counts, so all find the same placement.

    Args:
      layout: the layout of the run's states.
      every: the number of steps after which experts may move. Loads are averaged over steps with a half-life of half
        this number.
    """

    def __init__(self, layout: PlacedLayout, every: int):
        self._layout, self._every = layout, every
        self._slots = Layout(layout.num_devices, layout.num_slots)
        self._first = LoadTracker.start(layout.num_layers, layout.num_experts, half_life=every / 2)
        self._tracker, self._placement = self._first, layout.initial_placement

    def add(self, counts: np.ndarray) -> None:
        """Add the loads of a step: ``counts``, int [layers, experts], by logical expert."""
        self._tracker = self._tracker.add(counts)

    def due(self, step: int) -> bool:
        """Whether experts may move after ``step`` steps."""
        return step % self._every == 0

    def rebalance(self, state: TrainState, step: int) -> tuple[TrainState, dict[str, Json]]:
        """The state with experts placed by their loads, and a record of that for the metrics.

        The device load in it is the load of the busiest device over the mean, on average over layers, if the copies of
        an expert share its load evenly. Experts move only if that gains something.
        """
        began = time.perf_counter()
        found = balance(self._tracker.loads, self._slots, self._placement)
        expected = outlook(self._tracker.loads, found, self._placement, self._slots)
        if found != self._placement:
            state = self._layout.rebalanced(state, found)
            self._placement = found
        record = {
            "step": step,
            "event": f"experts rebalanced: {expected}",
            "device_load_before": float(expected.before.mean()),
            "device_load_after": float(expected.after.mean()),
            "device_load_bound": float(expected.bound.mean()),
            "experts_moved": int(expected.moves.sum()),
            "rebalance_s": time.perf_counter() - began,
        }
        return state, record

    def to_json(self) -> Json:
        """The loads and the present placement, as JSON values for a checkpoint."""
        state = self._tracker.state()
        return {"loads": state | {"sums": state["sums"].tolist()}, "placement": self._placement.to_json()}

    def resume(self, state: TrainState, saved: Mapping[str, Json] | None) -> TrainState:
        """A restored or initial state, with its experts placed as they were when ``saved`` was made.

        If the number of devices or slots has changed, experts are placed by the saved loads. If ``saved`` is None, the
        state stays as it is.
        """
        self._tracker, self._placement = self._first, self._layout.initial_placement
        if saved is None:
            return state
        # --rebalance-every may have changed, and the half-life with it.
        self._tracker = dataclasses.replace(
            LoadTracker.restore(saved["loads"]), half_life=self._first.half_life
        )
        placement = Placement.from_json(saved["placement"])
        if placement.experts.shape != self._layout.initial_placement.experts.shape:
            placement = balance(self._tracker.loads, self._slots, self._layout.initial_placement)
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
