"""`dualpipe balance`: place experts on devices by their loads."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro

from dualpipe_jax.balance import Layout, Outlook, Placement, balance, outlook, rebalance_experts
from dualpipe_jax.balance.loads import checked, in_range
from dualpipe_jax.balance.placement import count_moves, read_placement
from dualpipe_jax.command.loads import read_loads
from dualpipe_jax.command.options import CommandError, Count, check_files
from dualpipe_jax.command.output import say_written, show, show_json
from dualpipe_jax.present.numbers import amount, how_many, percent
from dualpipe_jax.present.table import Table

MOST_OF_A_LAYER, MOST_SLOTS = 65_536, 1_000_000
"""The most slots of a layer, and of all layers together, that can be filled in minutes."""

V3_EXPERT = 3 * 7168 * 2048 * 2
"""Bytes of an expert of DeepSeek-V3: three matrices in bfloat16."""

Row = tuple[str, np.ndarray, int | None]
"""A line of the table: name, max/mean of each layer, experts moved."""


@dataclasses.dataclass(frozen=True)
class Balance:
    """Place experts on devices by their loads, so that no device has more to do than it must.

    dualpipe balance runs/NAME/metrics.jsonl --devices 32 --slots 9 -o before_after.svg plan.json
    """

    loads: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="LOADS")]
    """What each expert had to do, [layers, experts] or [windows, layers, experts] of which the worst window
    counts: an array "loads" in .npz or .npy, .json, or a training run's metrics.jsonl or folder."""
    devices: int
    """Number of devices over which a layer's experts lie."""
    slots: Count = None
    """Number of experts that a device holds in a layer, copies included. If left out, just enough for one of each."""
    nodes: int = 1
    """Number of machines that have the devices. It matters only with --groups."""
    groups: Count = None
    """Number of groups of experts, each of which stays on one node. Needed only where routing is limited to groups."""
    windows: int = 10
    """How many of the latest windows count, at most."""
    previous: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Placement in force: a plan that this command wrote. Without it "before" is experts in order, one copy
    each."""
    max_moves: Count = None
    """The most experts that may move, over all layers. Needs --previous."""
    move_cost: float = 0.0
    """What a move costs, in loads of a layer's mean device: a move must gain more. Needs --previous."""
    expert_bytes: float = V3_EXPERT
    """Bytes of an expert, for those that move. The default is DeepSeek-V3's expert in bfloat16."""
    output: Annotated[tuple[Path, ...], tyro.conf.arg(metavar="FILE ...", aliases=["-o"])] = ()
    """Files to write: the plan as .json, a heat map of devices by layers, before and after, as .svg or
    .png."""
    json: bool = False
    """Print JSON, for programs."""

    def run(self) -> int:
        if wrong := [path for path in self.output if path.suffix.lower() not in (".json", ".svg", ".png")]:
            raise CommandError(
                f"--output {wrong[0]}: end the name in .json for the plan, .svg or .png for a picture"
            )
        check_files(*self.output)
        if self.windows < 1:
            raise CommandError(f"--windows {self.windows}: give at least 1")
        if not 0 <= self.expert_bytes < math.inf:
            raise CommandError(f"--expert-bytes {self.expert_bytes}: give a number of at least 0")
        given = read_loads(self.loads)
        loads = given[-self.windows :] if given.ndim == 3 else given
        layers, experts = loads.shape[-2:]
        slots = -(-experts // max(self.devices, 1)) if self.slots is None else self.slots
        layout = Layout(self.devices, slots, self.nodes, self.groups)
        layout.check(experts)
        _check_size(layers, layout)
        before, limits = self._before(layers, experts, layout)
        checked(loads)
        loads = in_range(loads)
        placed = balance(loads, layout, **limits)
        found = outlook(loads, placed, before, layout)
        title = (
            f"{layers} layers x {experts} experts on {layout.num_devices} devices of {layout.num_slots} slots"
        )
        if given.ndim == 3:
            title += f"; the worst of {how_many(len(loads), 'window')} of {how_many(len(given), 'count')}"
        name = "in order" if self.previous is None else str(self.previous)
        rows = [
            (name, found.before, 0),
            *self._deepseek(loads, before, layout),
            ("this", found.after, int(found.moves.sum())),
        ]
        if self.json:
            show_json(self._plan(placed, layout, found))
        else:
            show(
                title, self._table(rows, found), f"the busiest devices have {percent(found.gain)} less to do"
            )
        self._write(loads, before, placed, found, layout)
        return 0

    def _before(self, layers: int, experts: int, layout: Layout) -> tuple[Placement, dict[str, Any]]:
        if self.previous is not None:
            before = read_placement(self.previous.read_text())
            limits = {"previous": before, "max_moves": self.max_moves, "move_cost": self.move_cost}
            return before, limits
        if self.max_moves is not None or self.move_cost:
            raise CommandError(
                "--max-moves and --move-cost are of moves from a placement; add --previous plan.json"
            )
        once = experts // layout.num_devices if experts % layout.num_devices == 0 else layout.num_slots
        before = Placement.in_order(layers, experts, layout.num_devices, once)
        return before, {"previous": before} if layout.num_groups is None else {}

    def _deepseek(self, loads: np.ndarray, before: Placement, layout: Layout) -> list[Row]:
        """The row of DeepSeek's algorithm for the same layout; empty where it has no solution."""
        mean = loads if loads.ndim == 2 else loads.mean(0)
        groups = layout.num_groups or 1
        try:
            found, _, counts = rebalance_experts(
                mean, layout.num_replicas, groups, layout.num_nodes, layout.num_devices
            )
        except ValueError:
            return []
        layer = np.arange(len(found))[:, None]
        devices = (
            (loads / counts)[..., layer, found].reshape(*loads.shape[:-1], layout.num_devices, -1).sum(-1)
        )
        mean = devices.mean(-1)
        peak = np.divide(devices.max(-1), mean, out=np.ones_like(mean), where=mean > 0)
        moves = count_moves(before.experts, found.reshape(len(found), layout.num_devices, -1))
        return [("DeepSeek's", peak if peak.ndim == 1 else peak.max(0), int(moves.sum()))]

    def _table(self, rows: list[Row], found: Outlook) -> Table:
        head = "placement", "max/mean", "worst layer", "devices at work", "experts moved", "bytes"
        lines = [
            (
                name,
                f"{peak.mean():.4f}",
                f"{peak.max():.4f}",
                percent(1 / peak.mean()),
                "" if moves is None else str(moves),
                "" if moves is None else amount(moves * self.expert_bytes),
            )
            for name, peak, moves in [*rows, ("bound", found.bound, None)]
        ]
        return Table(head, tuple(lines), best=len(rows) - 1)

    def _plan(self, placed: Placement, layout: Layout, found: Outlook) -> dict[str, Any]:
        moved = {"moved_bytes": float(found.moves.sum() * self.expert_bytes)}
        return placed.to_json() | {"layout": dataclasses.asdict(layout), "outlook": found.to_json() | moved}

    def _write(
        self, loads: np.ndarray, before: Placement, placed: Placement, found: Outlook, layout: Layout
    ) -> None:
        for path in self.output:
            if path.suffix.lower() == ".json":
                path.write_text(json.dumps(self._plan(placed, layout, found)) + "\n")
            else:
                from dualpipe_jax.balance import plot

                plot(loads, before, placed, path, bound=float(found.bound.mean()))
            say_written(path)


def _check_size(layers: int, layout: Layout) -> None:
    """Refuse more slots than can be filled in minutes.

    Raises:
      CommandError: there are more.
    """
    slots = layout.num_replicas
    if slots > MOST_OF_A_LAYER or layers * slots > MOST_SLOTS:
        raise CommandError(
            f"{layers:,} layers x {layout.num_devices:,} devices x {layout.num_slots:,} slots are {layers * slots:,} "
            f"slots; at most {MOST_OF_A_LAYER:,} of a layer and {MOST_SLOTS:,} in all can be filled. Give fewer "
            "devices, or fewer layers at a time."
        )
