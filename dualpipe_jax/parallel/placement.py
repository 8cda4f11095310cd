"""Redundant experts: any expert may lie in any slot of any device, and on several devices.

A router chooses among *logical* experts. Their places are a table *held* [N, S]: the expert in each slot of each
device. Every expert has a slot, and no device has an expert twice. A token's choice becomes a *physical* expert, a
slot; from there on dispatch sees N * S experts, and device n has those from n * S on::

    copies = share_copies(held_NS, E)                          # once, on the host
    slot_TK = choose_copies(topk_TK, copies_EX)                # with this device's part of it
    handle = plan_dropless(slot_TK, N * S, axis_name)          # and dispatch, matmul, combine as ever

Weights lie as ``held`` says, and copies are equal. They stay equal if each copy gets the sum of all copies' gradients:
``sum_copies``. When loads have changed, ``move_experts`` brings weights, and whatever belongs to them, from one table
to another.

Tables are arrays that a program takes as arguments: a new placement needs no new compilation.

Shape suffixes: T tokens of this device, K experts per token, E experts, N devices on the axis, S slots of a device, X
copies an expert can have at most, W experts that one device sends another at most.
"""

from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from numpy.typing import ArrayLike

from dualpipe_jax.parallel.expert_plan import Axis, known_experts, sort_by_expert


def share_copies(held: ArrayLike, num_experts: int, *, num_nodes: int = 1, near: bool = True) -> np.ndarray:
    """Return for each device which copies of an expert its tokens take in turn.

    Every copy gets the same share of its expert's tokens if all devices have equally many such tokens. Within this
    limit ``near`` keeps tokens close: a device that has a copy uses only that copy, and other devices use copies on
    their own node before copies on other nodes. Without ``near`` every device uses all copies alike. That is for
    dispatch with a bounded capacity, which is counted per source device: then a copy relieves the device that holds it,
    too.

    >>> from dualpipe_jax.parallel import share_copies
    >>> copies = share_copies([[0, 1], [0, 2]], num_experts=3)  # two devices of two slots; expert 0 is on both
    >>> copies[:, 0].tolist()  # each device's tokens for expert 0 take its own copy: slot 0, and slot 2
    [[0, 0], [2, 2]]

    Args:
      held: int [..., N, S], the expert in each of the S slots of each of the N devices.
      num_experts: E.
      num_nodes: the number of nodes, each of N / num_nodes consecutive devices.
      near: see above.

    Returns:
      int32 [..., N, E, X]: for each device and expert the slots that its tokens take in turn, over and over, numbered
      over all devices; -1 after the last. X is the same for all tables of these N, S and E.

    Raises:
      ValueError: held is not such a table (the message says where), or num_nodes does not divide the devices.

    """
    tables = _checked_tables(held, num_experts)
    *lead, N, S = tables.shape
    if num_nodes < 1 or N % num_nodes:
        raise ValueError(f"share_copies: {N} devices do not divide over {num_nodes} nodes of equal size.")
    flat = tables.reshape(-1, N * S)
    found = np.full((len(flat), N, num_experts, min(N, N * S - num_experts + 1)), -1, np.int32)
    for table, into in zip(flat, found, strict=True):
        into[:, table, 0] = np.arange(N * S)  # right for experts with one copy
        for expert in np.flatnonzero(np.bincount(table, minlength=num_experts) > 1):
            slots = np.flatnonzero(table == expert)
            into[:, expert, : len(slots)] = slots[_copy_order(slots // S, N, N // num_nodes, near)]
    return found.reshape(*lead, *found.shape[1:])


def _copy_order(devices: np.ndarray, N: int, size: int, near: bool) -> np.ndarray:
    """Return the copies that each device uses in turn, as many turns as there are copies: int [N, copies].

    A copy is given by its index in ``devices``, the devices that hold one. Each copy has N turns in all. ``size`` is
    the number of devices of a node.
    """
    copies = len(devices)
    if not near:
        return (np.arange(N)[:, None] + np.arange(copies)) % copies
    left = [N] * copies
    turns: list[list[int]] = [[] for _ in range(N)]
    for copy, device in enumerate(devices.tolist()):
        turns[device] = [copy] * copies
        left[copy] -= copies
    on_node: list[list[int]] = [[] for _ in range(N // size)]
    for copy, node in enumerate((devices // size).tolist()):
        on_node[node].append(copy)
    for near_copies in (on_node, [[*range(copies)]] * len(on_node)):
        # Every device takes one turn per round, so that none takes all copies near it.
        for _ in range(copies):
            for device in range(N):
                if len(turns[device]) == copies:
                    continue
                if choice := [copy for copy in near_copies[device // size] if left[copy]]:
                    # Each device prefers another one of equally unused copies: few tokens must not all go to the first.
                    _, _, copy = min((-left[copy], (copy - device) % copies, copy) for copy in choice)
                    turns[device].append(copy)
                    left[copy] -= 1
    return np.array(turns)


@jax.named_scope("choose_copies")
def choose_copies(topk_TK: Array, copies_EX: Array) -> Array:
    """Turn chosen experts into slots: this device's tokens, in their order, take the copies of an expert in turn.

    >>> import jax.numpy as jnp
    >>> from dualpipe_jax.parallel import choose_copies, share_copies
    >>> copies = share_copies([[0, 1], [0, 2]], num_experts=3, near=False)
    >>> choose_copies(jnp.array([[0, 1], [0, 2]]), jnp.asarray(copies[0])).tolist()  # on device 0
    [[0, 1], [2, 3]]

    Args:
      topk_TK: int32, each token's chosen experts, distinct within a token; E, or any number outside 0..E-1, for none.
      copies_EX: int32, this device's part of what ``share_copies`` returned.

    Returns:
      int32 [T, K], the slot of each choice, for ``plan_capacity`` or ``plan_dropless`` over N * S experts; also
      distinct within a token; -1 for none.

    """
    E, X = copies_EX.shape
    topk_TK = known_experts(topk_TK, E)
    if X == 1:
        return copies_EX[:, 0].at[topk_TK].get(mode="fill", fill_value=-1)
    expert_A = topk_TK.reshape(-1)
    _, rank_A, starts_E, _ = sort_by_expert(topk_TK, E)
    turns_E = jnp.sum(copies_EX >= 0, axis=1, dtype=jnp.int32)
    turn_A = (rank_A - starts_E[expert_A]) % turns_E[expert_A]
    return copies_EX.at[expert_A, turn_A].get(mode="fill", fill_value=-1).reshape(topk_TK.shape)


@jax.named_scope("sum_copies")
def sum_copies(gradient_S: Array, held_NS: Array, num_experts: int, axis_name: Axis) -> Array:
    """Give every copy of an expert the sum of all copies' gradients, the same to the last bit.

    One all-reduce sums an array of as many experts as there are redundant ones, N * S - E. Without redundant experts
    nothing is sent.

    On two devices with two slots each, where both hold expert 0:

    >>> import jax, jax.numpy as jnp
    >>> from dualpipe_jax import make_mesh
    >>> from dualpipe_jax.parallel import sum_copies
    >>> held, spec = jnp.array([[0, 1], [0, 2]]), jax.P("ep")
    >>> summed = jax.shard_map(
    ...     lambda gradient: sum_copies(gradient, held, num_experts=3, axis_name="ep"),
    ...     mesh=make_mesh(pp=1, ep=2), in_specs=spec, out_specs=spec,
    ... )
    >>> jax.jit(summed)(jnp.array([1.0, 2.0, 10.0, 3.0])).tolist()
    [11.0, 2.0, 11.0, 3.0]

    Args:
      gradient_S: [S, ...], the gradients of the experts in this device's slots.
      held_NS: int32, the expert in each slot of each device.
      num_experts: E.
      axis_name: the mesh axis (or axes) that shards the experts.

    Returns:
      [S, ...] of the gradients' dtype.

    """
    N, S = held_NS.shape
    spare = N * S - num_experts
    if not spare:
        return gradient_S
    # Number the experts that have several copies. Each has at least one redundant copy, so ``spare`` numbers suffice.
    several_E = jnp.zeros(num_experts, jnp.int32).at[held_NS.reshape(-1)].add(1) > 1
    number_E = jnp.where(several_E, jnp.cumsum(several_E.astype(jnp.int32)) - 1, spare)
    number_S = number_E[held_NS[lax.axis_index(axis_name)]]
    own = jnp.zeros((spare, *gradient_S.shape[1:]), gradient_S.dtype)
    total = lax.psum(own.at[number_S].set(gradient_S, mode="drop"), axis_name)
    among_S = (number_S < spare).reshape(-1, *(1,) * (gradient_S.ndim - 1))
    return jnp.where(among_S, jnp.take(total, number_S, axis=0, mode="clip"), gradient_S)


def first_copies(held_NS: Array, num_experts: int) -> Array:
    """Return whether each slot has the first copy of its expert, bool [N, S]. A norm counts only these slots."""
    held_P = held_NS.reshape(-1)
    slot_P = jnp.arange(held_P.size, dtype=jnp.int32)
    first_E = jnp.full(num_experts, held_P.size, jnp.int32).at[held_P].min(slot_P)
    return (first_E[held_P] == slot_P).reshape(held_NS.shape)


class Moves(NamedTuple):
    """How experts get from one table to another, for ``move_experts``.

    Attributes:
      send: int32 [..., N, N, W]: for each device and each device that it sends to, the slots that it sends; filled up
        with 0.
      take: int32 [..., N, S]: for each slot of the new table, the row that fills it. Row n * W + w is the w-th row that
        device n sends; rows from N * W on are the device's own old slots.
      moved: the number of new slots whose expert has to be fetched from another device.
    """

    send: np.ndarray
    take: np.ndarray
    moved: int


def plan_moves(before: ArrayLike, after: ArrayLike, num_experts: int) -> Moves:
    """Plan how devices get the experts of another table.

    An expert that a device has already is not sent. Any other is fetched from the holder of a copy that has sent this
    device the fewest experts so far; of equal ones, from the holder that has sent the fewest experts to all devices.

    >>> from dualpipe_jax.parallel import plan_moves
    >>> moves = plan_moves(before=[[0, 1], [2, 3]], after=[[0, 2], [1, 3]], num_experts=4)
    >>> moves.moved  # expert 2 to device 0, expert 1 to device 1
    2

    Args:
      before: int [..., N, S], the expert in each slot of each device.
      after: int [..., N, S'], for the same number of devices.
      num_experts: E.

    Returns:
      Moves. W is a power of two, so that few programs are compiled, or 0 if all devices have what they need.

    Raises:
      ValueError: an argument is not such a table, or the two have different numbers of devices or layers.

    """
    old, new = _checked_tables(before, num_experts), _checked_tables(after, num_experts)
    if old.shape[:-1] != new.shape[:-1]:
        raise ValueError(
            f"plan_moves: before is {list(old.shape)} and after {list(new.shape)}; both need the same [..., N], only "
            "the number of slots may change."
        )
    *lead, N, S = old.shape
    olds, news = old.reshape(-1, N, S), new.reshape(-1, N, new.shape[-1])
    fetches = [list(_fetches(*pair)) for pair in zip(olds, news, strict=True)]
    most = max((turn + 1 for layer in fetches for *_, turn in layer), default=0)
    width = 0 if most == 0 else 1 << (most - 1).bit_length()
    send = np.zeros((len(olds), N, N, width), np.int32)
    take = np.zeros(news.shape, np.int32)
    for layer, (held, wanted) in enumerate(zip(olds, news, strict=True)):
        at = (wanted[:, :, None] == held[:, None, :]).argmax(-1)  # right only for experts that stay
        take[layer] = N * width + at
        for source, slot, device, into, turn in fetches[layer]:
            send[layer, source, device, turn] = slot
            take[layer, device, into] = source * width + turn
    return Moves(
        send.reshape(*lead, N, N, width),
        take.reshape(*lead, N, new.shape[-1]),
        sum(len(layer) for layer in fetches),
    )


def _fetches(held: np.ndarray, wanted: np.ndarray) -> Iterator[tuple[int, int, int, int, int]]:
    """Yield each expert that a device lacks, as (source, its slot, device, its slot, number of earlier sends).

    The number of earlier sends counts the experts that the source sends to this device before this one.
    """
    N = len(held)
    sent = np.zeros((N, N), int)
    for device, into in np.argwhere(~(wanted[:, :, None] == held[:, None, :]).any(-1)):
        there = np.argwhere(held == wanted[device, into])
        source, slot = min(there.tolist(), key=lambda at: (sent[at[0], device], sent[at[0]].sum(), at[0]))
        yield source, slot, int(device), int(into), int(sent[source, device])
        sent[source, device] += 1


@jax.named_scope("move_experts")
def move_experts(rows_S: Array, send_NW: Array, take_S: Array, axis_name: Axis) -> Array:
    """Bring rows that belong to experts from one table to another: one all_to_all, none if no device lacks an expert.

    On two devices of two slots:

    >>> import jax, jax.numpy as jnp
    >>> from dualpipe_jax import make_mesh
    >>> from dualpipe_jax.parallel import move_experts, plan_moves
    >>> moves, spec = plan_moves([[0, 1], [2, 3]], [[0, 2], [1, 3]], num_experts=4), jax.P("ep")
    >>> moved = jax.shard_map(
    ...     lambda rows, send, take: move_experts(rows, send[0], take[0], "ep"),
    ...     mesh=make_mesh(pp=1, ep=2), in_specs=spec, out_specs=spec,
    ... )
    >>> jax.jit(moved)(jnp.array([0, 10, 20, 30]), moves.send, moves.take).tolist()
    [0, 20, 10, 30]

    Args:
      rows_S: [S, ...], one row for each expert in this device's slots.
      send_NW: int32, this device's part of ``Moves.send``.
      take_S: int32 [S'], this device's part of ``Moves.take``.
      axis_name: the mesh axis (or axes) that shards the experts.

    Returns:
      [S', ...], one row for each expert in this device's slots of the new table.

    """
    if send_NW.shape[1]:
        sent = jnp.take(rows_S, send_NW, axis=0, mode="clip")
        arrived = lax.all_to_all(sent, axis_name, 0, 0)
        rows_S = jnp.concatenate([arrived.reshape(-1, *rows_S.shape[1:]), rows_S])
    return jnp.take(rows_S, take_S, axis=0, mode="clip")


def _checked_tables(held: ArrayLike, num_experts: int) -> np.ndarray:
    tables = np.asarray(held)
    if tables.ndim < 2 or tables.dtype.kind not in "iu" or 0 in tables.shape:
        raise ValueError(
            f"held is {tables.dtype} {list(tables.shape)}; give integers [..., devices, slots], each slot's expert."
        )
    N, S = tables.shape[-2:]
    if num_experts > N * S:
        raise ValueError(
            f"{N} devices of {S} slots have no room for {num_experts} experts; give at least "
            f"{-(-num_experts // N)} slots."
        )
    if tables.min() < 0 or tables.max() >= num_experts:
        wrong = tables[(tables < 0) | (tables >= num_experts)][0]
        raise ValueError(f"held has expert {wrong}; there are experts 0 to {num_experts - 1}.")
    ordered = np.sort(tables, -1)
    if (twice := ordered[..., 1:] == ordered[..., :-1]).any():
        *at, device, slot = np.argwhere(twice)[0].tolist()
        expert = ordered[(*at, device, slot)]
        raise ValueError(f"held has expert {expert} twice on device {device}; give it one copy there.")
    present = np.zeros((tables.size // (N * S), num_experts), bool)
    np.put_along_axis(present, tables.reshape(len(present), -1), True, 1)
    if not present.all():
        raise ValueError(f"held has no copy of expert {np.argwhere(~present)[0][1]}; every expert needs one.")
    return tables
