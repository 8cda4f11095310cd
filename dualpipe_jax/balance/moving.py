"""From an old placement to a new one with few moves of experts, and moves only where they gain more than they cost."""

import numpy as np

from dualpipe_jax.balance.loads import LOAD_TOLERANCE
from dualpipe_jax.balance.pack import SlotLoads, holds
from dualpipe_jax.balance.placement import count_moves
from dualpipe_jax.balance.steps import improve


def renumber_devices(held: np.ndarray, previous: np.ndarray) -> np.ndarray:
    """A new placement with its devices renamed, so that each set of experts is where most of them are already.

    The pair of a new and an old device with most experts in common is matched first. Experts that stay on a
    device keep their slots.

    Args:
      held: int64 [layers, devices, slots], the new placement.
      previous: [layers, devices, slots], the old one, with as many or fewer slots.
    """
    layers, devices, _ = held.shape
    row = np.arange(layers)
    experts = int(max(held.max(), previous.max())) + 1
    there = holds(held, experts).astype(np.float32)
    before = holds(previous, experts).astype(np.float32)
    shared = (there @ before.swapaxes(1, 2)).reshape(layers, -1)
    moved = np.empty_like(held)
    for _ in range(devices):
        new, old = np.divmod(shared.argmax(-1), devices)
        moved[row, old] = held[row, new]
        grid = shared.reshape(layers, devices, devices)
        grid[row, new] = -1
        grid[row, :, old] = -1
    return keep_slots(moved, previous)


def keep_slots(held: np.ndarray, previous: np.ndarray) -> np.ndarray:
    """Each device's experts in the slots where they were before; new experts in the other slots, in order."""
    same = held[..., :, None] == previous[..., None, :]
    stays = same.any(-1)
    taken = np.zeros(held.shape, bool)
    taken[..., : previous.shape[-1]] = same.any(-2)
    # There are as many experts that are new as slots that are not taken: pair them in order.
    to = np.empty(held.shape, np.int64)
    arrivals, free = np.argsort(stays, -1, kind="stable"), np.argsort(taken, -1, kind="stable")
    np.put_along_axis(to, arrivals, free, -1)
    to = np.where(stays, same.argmax(-1), to)
    result = np.empty_like(held)
    np.put_along_axis(result, to, held, -1)
    return result


def replan(
    previous: np.ndarray,
    fresh: np.ndarray,
    relative: np.ndarray,
    max_moves: int | None,
    move_cost: float,
    close: float,
    num_nodes: int,
) -> np.ndarray:
    """The placement after a previous one: unchanged, improved step by step, or a fresh one; chosen for each row.

    A row is a layer's part on one node, ``num_nodes`` rows a layer. Each option costs moves and leaves a peak, and a
    layer's peak is that of its worst node. Without max_moves each layer takes the options with the least
    peak + move_cost x moves. With max_moves, the moves are spent one after another on the layer where a move
    gains most.

    Args:
      previous, fresh: int64 [rows, devices, slots]; if previous has fewer slots, the fresh one is taken.
      relative: [windows, rows, experts].
      max_moves: the largest number of moves of all layers together, or None.
      move_cost: the cost of one move, in loads of the mean device.
      close: peaks above a layer's best by no more than this share of it count as equal to the best.
    """
    rows, devices, slots = fresh.shape
    if previous.shape != fresh.shape:
        return renumber_devices(fresh, previous)
    target = np.full(rows, 1 + close)
    num_steps = devices * slots if max_moves is None else min(max_moves, devices * slots)
    options = [previous, *improve(previous, relative, target, num_steps), renumber_devices(fresh, previous)]
    moves = np.stack([count_moves(previous, option) for option in options])
    peaks = np.stack([SlotLoads.of_placement(option, relative).peak.max(-1) for option in options])
    best = np.maximum(1.0, peaks.min(0)).reshape(-1, num_nodes).max(-1)
    peaks = np.maximum(peaks, np.repeat(best * (1 + close), num_nodes))
    taken = _options_within_levels(moves, peaks, num_nodes)
    layers = len(taken), -1, num_nodes
    moves = np.take_along_axis(moves, taken, 0).reshape(layers).sum(-1)
    peaks = np.take_along_axis(peaks, taken, 0).reshape(layers).max(-1)
    if max_moves is None:
        chosen = np.lexsort((moves, np.round(peaks + move_cost * moves, 12)), axis=0)[0]
    else:
        chosen = _spend_moves(moves, peaks, max_moves, move_cost)
    row = np.arange(rows)
    return keep_slots(np.stack(options)[taken[np.repeat(chosen, num_nodes), row], row], previous)


def _options_within_levels(moves: np.ndarray, peaks: np.ndarray, num_nodes: int) -> np.ndarray:
    """Of each row, the option with the fewest moves whose peak is within each level of its layer: int64 [levels, rows].

    A layer's levels are the peak with which nothing moves, and then the peaks of all options of its nodes. A node
    whose peak is within a level needs no moves, since another node of the layer is as slow.

    Args:
      moves, peaks: [options, rows]; option 0 is to stay, and all rows of a layer have the same least peak.
    """
    options, rows = peaks.shape
    of_layers = peaks.reshape(options, -1, num_nodes)
    levels = np.concatenate([of_layers[:1].max(-1), *np.moveaxis(of_layers, -1, 0)])
    order = np.argsort(peaks, 0, kind="stable")
    fewest = np.take_along_axis(moves, order, 0)
    fewer = fewest[1:] < np.minimum.accumulate(fewest, 0)[:-1]
    last_fewer = np.where(fewer, np.arange(1, options)[:, None], 0)
    cheapest = np.maximum.accumulate(np.concatenate([np.zeros((1, rows), np.int64), last_fewer]), 0)
    taken = np.empty((len(levels), rows), np.int64)
    for row in range(rows):
        within = np.searchsorted(peaks[order[:, row], row], levels[:, row // num_nodes], "right") - 1
        taken[:, row] = order[cheapest[within, row], row]
    return taken


def _spend_moves(moves: np.ndarray, peaks: np.ndarray, budget: int, move_cost: float) -> np.ndarray:
    """The option that each layer takes, of options [options, layers]: int64 [layers]. Option 0 is to stay."""
    chosen = np.zeros(moves.shape[1], np.int64)
    while True:
        row = np.arange(len(chosen))
        more, gain = moves - moves[chosen, row], peaks[chosen, row] - peaks
        fits = (more > 0) & (more <= budget - moves[chosen, row].sum()) & (gain > LOAD_TOLERANCE)
        rate = np.where(fits, gain / np.maximum(more, 1), 0.0)
        option, layer = np.unravel_index(rate.argmax(), rate.shape)
        if rate[option, layer] <= move_cost:
            return chosen
        chosen[layer] = option
