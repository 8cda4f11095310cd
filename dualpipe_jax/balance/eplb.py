"""DeepSeek's load balancer for experts, with its contract, its arithmetic and its ties (github.com/deepseek-ai/EPLB).

Three steps, each greedy: pack groups of experts onto nodes; in each node copy, one by one, the expert whose
copies carry most; pack the copies onto the node's devices. `dualpipe_jax.balance.balance` does better; use
this module to get DeepSeek's own result. All layers go through each step at once.
"""

from collections.abc import Callable
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from dualpipe_jax.arguments import typechecked
from dualpipe_jax.balance import torch_cpu


@typechecked
def rebalance_experts(
    weight: ArrayLike,
    num_replicas: int,
    num_groups: int,
    num_nodes: int,
    num_gpus: int,
    *,
    ties: Literal["torch", "stable"] = "torch",
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The placement of experts' copies that DeepSeek's function of this name returns, index for index.

    If num_groups is a multiple of num_nodes, each group stays on one node (hierarchical); else nodes and
    groups are ignored (global). Everything is computed in float32, as in DeepSeek's code. Of experts whose
    copies carry the same load, the first is copied; of equally light packs, the first that has room takes the
    next item; if a pack takes only one item, item i goes to pack i whatever its weight. ``ties`` sets the
    order in which items of equal weight are packed.

    >>> from dualpipe_jax.balance import rebalance_experts
    >>> counts = dict(num_replicas=6, num_groups=1, num_nodes=1, num_gpus=2)
    >>> in_slots, _, copies = rebalance_experts([[90, 10, 10, 10]], **counts)
    >>> in_slots.tolist(), copies.tolist()
    ([[0, 0, 3, 0, 1, 2]], [[3, 1, 1, 1]])

    Args:
      weight: [layers, experts], the load of each expert; any real numbers of at least 0.
      num_replicas: the number of slots of all devices, which is the number of copies of all experts: at least
        experts, a multiple of num_gpus.
      num_groups: the number of groups of experts of consecutive indices.
      num_nodes: the number of machines.
      num_gpus: the number of devices of all nodes.
      ties: "torch" packs items of equal weight in the order in which PyTorch sorts them on a CPU, so that the
        result is that of DeepSeek's function there; "stable" packs the lower index first. Neither depends on
        the machine.

    Returns (phy2log, log2phy, logcnt), all int64: [layers, num_replicas], the expert in each slot, where
    device g has the slots from g * num_replicas / num_gpus; [layers, experts, most copies], the slots of each
    expert, -1 where it has fewer copies; [layers, experts], the number of copies.

    Raises:
      ValueError: the counts do not divide each other, or weights are not finite numbers of at least 0; says which.
    """
    weights = _weights(weight)
    order = _ORDERS[ties]
    _check(weights, num_replicas, num_groups, num_nodes, num_gpus)
    if num_groups % num_nodes:
        num_groups, num_nodes = 1, 1
    layers, experts = weights.shape
    size, local = experts // num_groups, experts // num_nodes

    # Experts in the order of their nodes, and back
    node, place = pack(torch_cpu.sum_last(weights.reshape(layers, num_groups, size)), num_nodes, order)
    first = (node * (num_groups // num_nodes) + place) * size
    to_ordered = (first[..., None] + np.arange(size)).reshape(layers, experts)
    from_ordered = to_ordered.argsort(-1)

    # From here on there is one row for each node of each layer
    ordered = np.take_along_axis(weights, from_ordered, -1).reshape(layers * num_nodes, local)
    expert, rank, counts = replicate(ordered, num_replicas // num_nodes)
    loads = np.take_along_axis(ordered / counts.astype(np.float32), expert, -1)
    device, place = pack(loads, num_gpus // num_nodes, order)
    in_slot = (device * (num_replicas // num_gpus) + place).argsort(-1)

    expert = np.take_along_axis(expert, in_slot, -1).reshape(layers, num_nodes, -1)
    expert = (expert + local * np.arange(num_nodes)[:, None]).reshape(layers, num_replicas)
    phy2log = np.take_along_axis(from_ordered, expert, -1)
    rank = np.take_along_axis(rank, in_slot, -1).reshape(layers, num_replicas)
    logcnt = np.take_along_axis(counts.reshape(layers, experts), to_ordered, -1)
    log2phy = np.full((layers, experts, logcnt.max(initial=1)), -1)
    log2phy[np.arange(layers)[:, None], phy2log, rank] = np.arange(num_replicas)
    return phy2log, log2phy, logcnt


def stable_order(weights: np.ndarray) -> np.ndarray:
    """Indices that sort each row, the heaviest item first, of equal items the lower index: int64 [rows, items]."""
    return np.argsort(-weights, -1, kind="stable")


_ORDERS = {"torch": torch_cpu.sort_descending, "stable": stable_order}


def pack(
    weights: np.ndarray, num_packs: int, order: Callable[[np.ndarray], np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """Pack the same number of items into each pack: the heaviest first, each into the lightest pack that has room.

    Args:
      weights: float32 [rows, items], items a multiple of num_packs.
      order: a function from weights to the indices of each row's items, the heaviest first.

    Returns int64 [rows, items] twice: each item's pack, and its place there in order of arrival.
    """
    rows, items = weights.shape
    room = items // num_packs
    if room == 1:
        return np.tile(np.arange(items), (rows, 1)), np.zeros((rows, items), int)
    row = np.arange(rows)
    filled, held = np.zeros((rows, num_packs), weights.dtype), np.zeros((rows, num_packs), int)
    open_only = filled.copy()  # equal to filled, but infinite where a pack is full
    pack_of, place = np.empty((rows, items), int), np.empty((rows, items), int)
    for item in order(weights).T:
        lightest = open_only.argmin(-1)
        pack_of[row, item], place[row, item] = lightest, held[row, lightest]
        filled[row, lightest] += weights[row, item]
        held[row, lightest] += 1
        open_only[row, lightest] = np.where(held[row, lightest] < room, filled[row, lightest], np.inf)
    return pack_of, place


def replicate(weights: np.ndarray, num_copies: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Make one copy of each item, then one more at a time, of the item whose copies carry most.

    No other counts have a lighter heaviest copy.

    Args:
      weights: float32 [rows, items].
      num_copies: the number of copies of all items, at least the number of items.

    Returns int64 [rows, copies] twice, the item of each copy and the copy's number among those of its item;
    and the counts, int64 [rows, items].
    """
    rows, items = weights.shape
    row = np.arange(rows)
    item = np.tile(np.arange(num_copies), (rows, 1))
    rank = np.zeros((rows, num_copies), int)
    counts = np.ones((rows, items), int)
    share = weights.copy()
    for copy in range(items, num_copies):
        heaviest = share.argmax(-1)
        item[:, copy], rank[:, copy] = heaviest, counts[row, heaviest]
        counts[row, heaviest] += 1
        share[row, heaviest] = weights[row, heaviest] / counts[row, heaviest].astype(weights.dtype)
    return item, rank, counts


def _weights(weight: ArrayLike) -> np.ndarray:
    given = np.asarray(weight)
    if given.ndim != 2 or 0 in given.shape or given.dtype.kind not in "biuf":
        raise ValueError(
            f"rebalance_experts: weight is {given.dtype} {list(given.shape)}; give numbers [layers, experts]"
        )
    with np.errstate(over="ignore"):
        weights = given.astype(np.float32)
        whole = weights.sum(-1)
    if not (np.isfinite(whole).all() and (weights >= 0).all()):
        layer = int(np.flatnonzero(~(np.isfinite(whole) & (weights >= 0).all(-1)))[0])
        raise ValueError(
            f"rebalance_experts: weight of layer {layer} has NaN, negative or infinite entries, or a sum beyond "
            "float32; give counts of tokens, or numbers of at least 0 in their place"
        )
    return weights


def _check(weights: np.ndarray, num_replicas: int, num_groups: int, num_nodes: int, num_gpus: int) -> None:
    experts = weights.shape[1]
    given = dict(num_replicas=num_replicas, num_groups=num_groups, num_nodes=num_nodes, num_gpus=num_gpus)
    for name, count in given.items():
        if count < 1:
            raise ValueError(f"rebalance_experts: {name}={count}; it must be at least 1")
    wrong = []
    if num_replicas < experts:
        wrong.append(f"num_replicas={num_replicas} leaves no slot for some of the {experts} experts")
    if num_replicas % num_gpus:
        wrong.append(f"num_replicas={num_replicas} is no multiple of num_gpus={num_gpus}")
    if num_groups % num_nodes == 0:
        if experts % num_groups:
            wrong.append(f"{experts} experts are no multiple of num_groups={num_groups}")
        if num_gpus % num_nodes:
            wrong.append(
                f"num_gpus={num_gpus} is no multiple of num_nodes={num_nodes}; nodes of unequal size go by "
                "num_groups=1, num_nodes=1"
            )
    if wrong:
        raise ValueError("rebalance_experts: " + "; ".join(wrong))
