"""Plans of a dispatch to experts: where every token goes, from the router's choices alone.

Plans are integers, without rows; ``expert`` moves the rows. An *assignment* is a (token, k) pair, numbered
token * K + k; a *slot* is a row of the buffer that is sent.

Shape suffixes: T tokens of this device, K experts per token, E experts, N devices on the axis, L = E / N local experts,
C capacity, S slots to send, R rows received; A = T * K assignments, W slots to send one device.
"""

import functools
import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from dualpipe_jax.arguments import typechecked
from dualpipe_jax.parallel.wire import Payload

Axis = str | tuple[str, ...]
"""The name of a mesh axis, or names of several that are taken as one, the first varying slowest."""


_MAX_PAIRWISE = 512
"""Up to this many assignments, as in a decode step, are compared with one another instead of sorted."""

DROPPED = "dualpipe_dropped"
"""The ``checkpoint_name`` of every count of dropped assignments. The engine finds the counts of a stage by it, for
``Report.dropped``."""


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("slot_TK", "assignment_S", "dropped", "arrival_R", "departure_R", "group_sizes_L", "outer"),
    meta_fields=("capacity", "num_devices", "axis_name", "payload"),
)
@dataclass(frozen=True)
class Handle:
    """The plan of a dispatch: where every assignment goes. ``dispatch`` and ``combine`` share it.

    Attributes:
      slot_TK: int32, the slot of each assignment; S if it was dropped.
      assignment_S: int32, the assignment in each slot; T * K if the slot is empty.
      dropped: int32 [], the number of this device's assignments that found no slot.
      arrival_R: int32, for each row in expert order, the row of the received buffer it comes from; R if the
        row is empty. None if rows arrive in expert order.
      departure_R: int32, the inverse of arrival_R; R if the received row is empty. None if arrival_R is None.
      group_sizes_L: int32, the number of rows of each local expert. None for ``plan_capacity``, where all experts have
        the same number of rows.
      capacity: C, static; None for ``plan_dropless``.
      num_devices: N, static.
      axis_name: the mesh axis or axes, static; None if one device holds all experts.
      outer: the handle of a first hop, which rows take before this one, and after it on their way back; None without
        one. See ``plan_two_hops``. T is then the number of rows that arrive by the first hop.
      payload: how rows travel to experts, static.

    """

    slot_TK: Array
    assignment_S: Array
    dropped: Array
    arrival_R: Array | None
    departure_R: Array | None
    group_sizes_L: Array | None
    capacity: int | None
    num_devices: int
    axis_name: Axis | None
    payload: Payload = "plain"
    outer: "Handle | None" = None


@typechecked
def plan_capacity(
    topk_TK: Array,
    num_experts: int,
    capacity: int | None = None,
    axis_name: Axis | None = None,
    payload: Payload = "plain",
) -> Handle:
    """Plan a dispatch where every device may send each expert at most ``capacity`` tokens.

    All shapes are static and every expert gets the same number of rows, so the experts are one batched
    matmul. Assignments beyond the capacity are dropped (they add nothing to the output), those of later
    tokens first, and counted in ``handle.dropped``. See ``capacity_for`` for usual values.

    >>> import jax.numpy as jnp
    >>> from dualpipe_jax.parallel import combine, dispatch, expert_matmul, plan_capacity
    >>> tokens, chosen = jnp.ones((4, 3)), jnp.array([[0, 1], [0, 2], [0, 1], [1, 2]])
    >>> handle = plan_capacity(chosen, num_experts=4, capacity=2)
    >>> rows = expert_matmul(dispatch(tokens, handle), jnp.ones((4, 3, 3)), handle)
    >>> combine(rows, jnp.full((4, 2), 0.5), handle)[:, 0].tolist(), int(handle.dropped)
    ([3.0, 3.0, 1.5, 1.5], 2)

    Args:
      topk_TK: int32, each token's chosen experts, distinct within a token; E, or any number outside 0..E-1, for none.
      num_experts: E, over all devices; device n holds experts n * L to (n + 1) * L - 1.
      capacity: C, for each (expert, source device) pair. None means T, with which nothing is dropped.
      axis_name: the mesh axis (or axes) that shards the experts; None if this device holds them all.
      payload: "plain" sends rows as they are, "float8" in eight bits, with a scale for each 128 numbers.

    Returns:
      A handle with which ``dispatch`` returns [L, N, C, D].

    Raises:
      ValueError: the devices do not divide the experts, capacity is below 1, or there is no such payload.

    """
    num_devices = _num_devices(num_experts, axis_name)
    T, K = topk_TK.shape
    if T < 1 or (capacity is not None and capacity < 1):
        raise ValueError(
            f"plan_capacity: {T} tokens in topk_TK and capacity {capacity} must both be at least 1."
        )
    C = T if capacity is None else min(capacity, T)
    topk_TK = known_experts(topk_TK, num_experts)
    order_A, rank_A, starts_E, counts_E = sort_by_expert(topk_TK, num_experts)
    expert_A = topk_TK.reshape(-1)
    place_A = rank_A - starts_E[expert_A]
    # Slots are laid out [E, C], which is [N, L, C]: what goes to one device lies together. With L before N
    # the TPU compiler transposes all that is dispatched before and after every all_to_all.
    kept_A = (expert_A < num_experts) & (place_A < C)
    slot_A = jnp.where(kept_A, expert_A * C + place_A, num_experts * C)

    place_C = jnp.arange(C, dtype=jnp.int32)
    index_EC = starts_E[:, None] + place_C
    filled_EC = place_C < counts_E[:, None]
    assignment_S = jnp.where(filled_EC, order_A.at[index_EC].get(mode="clip"), T * K).reshape(-1)
    dropped = checkpoint_name(jnp.sum(jnp.maximum(counts_E - C, 0), dtype=jnp.int32), DROPPED)
    slot_TK = slot_A.reshape(T, K)
    return Handle(slot_TK, assignment_S, dropped, None, None, None, C, num_devices, axis_name, payload)


@typechecked
def capacity_for(num_tokens: int, top_k: int, num_experts: int, factor: float) -> int:
    """Return the capacity for ``factor`` times an even load, at least 1 and at most ``num_tokens``.

    >>> from dualpipe_jax.parallel import capacity_for
    >>> capacity_for(num_tokens=4096, top_k=8, num_experts=256, factor=1.25)  # an even load is 128
    160

    Args:
      num_tokens: T, the tokens of one device.
      top_k: K, the number of experts that a token chooses.
      num_experts: E, over all devices.
      factor: the capacity in multiples of an even load, T * K / E.

    Raises:
      ValueError: num_experts is below 1, or factor is not positive and finite.

    """
    if num_experts < 1 or not 0 < factor < math.inf:
        raise ValueError(
            f"capacity_for: num_experts {num_experts} and factor {factor} must both be positive and finite."
        )
    return max(1, min(num_tokens, math.ceil(factor * num_tokens * top_k / num_experts)))


@typechecked
def plan_dropless(
    topk_TK: Array,
    num_experts: int,
    axis_name: Axis | None = None,
    buffer_factor: float | None = None,
    payload: Payload = "plain",
) -> Handle:
    """Plan a dispatch that sorts assignments by expert and sends each device the rows of its experts.

    Rows arrive grouped by expert in groups of unequal sizes, for ``grouped_matmul``. Between devices the
    buffers are padded, not the experts: each device sends every device a fixed number of rows, by default
    enough for the worst case, T * min(K, L), so that nothing can be dropped. A ``buffer_factor`` bounds this
    number to that multiple of an even load; what does not fit is dropped, highest experts of a device first,
    and counted in ``handle.dropped``. (``lax.ragged_all_to_all`` does not exist on XLA:CPU.)

    >>> import jax.numpy as jnp
    >>> from dualpipe_jax.parallel import dispatch, plan_dropless
    >>> handle = plan_dropless(jnp.array([[0, 1], [0, 2], [0, 1], [1, 2]]), num_experts=4)
    >>> handle.group_sizes_L.tolist(), dispatch(jnp.ones((4, 3)), handle).shape
    ([3, 3, 2, 0], (8, 3))

    Args:
      topk_TK: int32, each token's chosen experts, distinct within a token; E, or any number outside 0..E-1, for none.
      num_experts: E, over all devices; device n holds experts n * L to (n + 1) * L - 1.
      axis_name: the mesh axis (or axes) that shards the experts; None if this device holds them all.
      buffer_factor: the bound on the rows that go to one device, in multiples of an even load, T * K / N; None for the
        worst case.
      payload: see ``plan_capacity``.

    Returns:
      A handle with which ``dispatch`` returns [R, D]: the rows of local expert 0, then 1, ..., then zeros.

    Raises:
      ValueError: the devices do not divide the experts, buffer_factor is not positive, or there is no such payload.

    """
    num_devices = _num_devices(num_experts, axis_name)
    if buffer_factor is not None and not 0 < buffer_factor < math.inf:
        raise ValueError(f"plan_dropless: buffer_factor must be positive and finite, got {buffer_factor}.")
    T, K = topk_TK.shape
    L = num_experts // num_devices
    width = T * min(K, L)
    if buffer_factor is not None:
        width = max(1, min(width, math.ceil(buffer_factor * T * K / num_devices)))

    topk_TK = known_experts(topk_TK, num_experts)
    order_A, rank_A, starts_E, counts_E = sort_by_expert(topk_TK, num_experts)
    if width == T * K and num_devices == 1:  # the slot of an assignment is its rank
        known_A = topk_TK.reshape(-1) < num_experts
        slot_TK = jnp.where(known_A, rank_A, T * K).reshape(T, K)
        assignment_S = order_A
        if T * K > _MAX_PAIRWISE:
            num_known = jnp.sum(known_A, dtype=jnp.int32)
            assignment_S = jnp.where(jnp.arange(T * K, dtype=jnp.int32) < num_known, order_A, T * K)
        dropped = checkpoint_name(jnp.zeros_like(counts_E[0]), DROPPED)
        return Handle(slot_TK, assignment_S, dropped, None, None, counts_E, None, 1, axis_name, payload)
    starts_N = starts_E.reshape(num_devices, L)[:, 0]
    device_A = topk_TK.reshape(-1) // L
    place_A = rank_A - starts_N[device_A]
    kept_A = (device_A < num_devices) & (place_A < width)
    slot_A = jnp.where(kept_A, device_A * width + place_A, num_devices * width)

    ends_NL = jnp.minimum(jnp.cumsum(counts_E.reshape(num_devices, L), axis=1), width)
    place_W = jnp.arange(width, dtype=jnp.int32)
    filled_NW = place_W < ends_NL[:, -1:]
    assignment_NW = order_A.at[starts_N[:, None] + place_W].get(mode="clip")
    assignment_S = jnp.where(filled_NW, assignment_NW, T * K).reshape(-1)
    dropped = jnp.sum(counts_E, dtype=jnp.int32) - jnp.sum(ends_NL[:, -1], dtype=jnp.int32)
    dropped = checkpoint_name(dropped, DROPPED)

    slot_TK = slot_A.reshape(T, K)
    sent_NL = jnp.diff(ends_NL, axis=1, prepend=0)
    if num_devices == 1:
        return Handle(slot_TK, assignment_S, dropped, None, None, sent_NL[0], None, 1, axis_name, payload)
    received_NL = lax.all_to_all(sent_NL, axis_name, 0, 0, tiled=True)
    arrival_R, departure_R = _sort_arrivals(received_NL, width)
    sizes_L = jnp.sum(received_NL, axis=0, dtype=jnp.int32)
    return Handle(
        slot_TK, assignment_S, dropped, arrival_R, departure_R, sizes_L, None, num_devices, axis_name, payload
    )


def _num_devices(num_experts: int, axis_name: Axis | None) -> int:
    if not 1 <= num_experts < 2**31:
        raise ValueError(f"num_experts must be at least 1 and fit int32, got {num_experts}.")
    try:
        num_devices = 1 if axis_name is None else lax.axis_size(axis_name)
    except NameError:
        raise ValueError(
            f"axis_name {axis_name!r}: no mesh axis of this name here; call it inside a shard_map over that axis."
        ) from None
    if num_experts % num_devices:
        raise ValueError(
            f"{num_experts} experts do not divide over the {num_devices} devices of axis {axis_name!r}: "
            f"{num_experts} % {num_devices} = {num_experts % num_devices}."
        )
    return num_devices


def known_experts(topk_TK: Array, num_experts: int) -> Array:
    """Return the choices as int32, with E in place of every number that is not an expert's.

    A negative number would be read from the end of a table. Raises TypeError unless the choices are integers.
    """
    _check_integers(topk_TK)
    topk_TK = topk_TK.astype(jnp.int32)
    return jnp.where((topk_TK >= 0) & (topk_TK < num_experts), topk_TK, num_experts)


def _check_integers(topk_TK: Array) -> None:
    if not jnp.issubdtype(topk_TK.dtype, jnp.integer):
        raise TypeError(f"topk_TK must be integers, numbers of experts, got {topk_TK.dtype}.")


def sort_by_expert(topk_TK: Array, num_experts: int) -> tuple[Array, Array, Array, Array]:
    """Sort assignments by expert, stably; return the order, its inverse, and each expert's start and count.

    ``topk_TK`` comes from ``known_experts``. With up to ``_MAX_PAIRWISE`` assignments the order has A, a number past
    all of them, in place of the assignments to no expert.
    """
    expert_A = topk_TK.reshape(-1)
    iota_A = jnp.arange(expert_A.size, dtype=jnp.int32)
    if expert_A.size * (num_experts + 1) >= 2**31:
        order_A = jnp.argsort(expert_A, stable=True)
        rank_A = _inverse(order_A)
    elif expert_A.size > _MAX_PAIRWISE:
        # One sort of unique keys: several times cheaper on CPU than a stable argsort.
        order_A = jnp.sort(expert_A * expert_A.size + iota_A) % expert_A.size
        rank_A = _inverse(order_A)
    else:
        # Each assignment is compared with all others: two kernels, where a sort takes many.
        key_A = expert_A * expert_A.size + iota_A
        rank_A = jnp.sum(key_A < key_A[:, None], axis=1, dtype=jnp.int32)
        name_A = jnp.where(expert_A < num_experts, iota_A, jnp.int32(expert_A.size))
        order_A = jnp.sum(jnp.where(rank_A == iota_A[:, None], name_A, 0), axis=1, dtype=jnp.int32)
    counts_E = count(topk_TK, num_experts)
    return order_A, rank_A, jnp.cumsum(counts_E) - counts_E, counts_E


def _inverse(order_A: Array) -> Array:
    iota_A = jnp.arange(order_A.size, dtype=order_A.dtype)
    return jnp.zeros_like(order_A).at[order_A].set(iota_A, unique_indices=True)


@typechecked
def count(topk_TK: Array, num_experts: int) -> Array:
    """Count the tokens of this device that chose each expert, int32 [E], including those that a plan drops.

    >>> import jax.numpy as jnp
    >>> from dualpipe_jax.parallel import count
    >>> count(jnp.array([[0, 1], [0, 2], [0, 1]]), num_experts=4).tolist()
    [3, 2, 1, 0]
    """
    _num_devices(num_experts, None)
    _check_integers(topk_TK)
    chosen = topk_TK.reshape(-1, 1).astype(jnp.int32) == jnp.arange(num_experts, dtype=jnp.int32)
    return jnp.sum(chosen, axis=0, dtype=jnp.int32)


def _sort_arrivals(received_NL: Array, width: int) -> tuple[Array, Array]:
    """Return the permutation that sorts received rows by expert, and its inverse, each int32 [R].

    The received rows are [N, width]: those of each source device are sorted by expert already.
    """
    N, L = received_NL.shape
    R = N * width
    source_N = jnp.arange(N, dtype=jnp.int32) * width
    ends_NL = jnp.cumsum(received_NL, axis=1)
    from_NL = source_N[:, None] + ends_NL - received_NL
    into_LN = jnp.cumsum(received_NL.T.reshape(-1)).reshape(L, N) - received_NL.T

    row_R = jnp.arange(R, dtype=jnp.int32)
    # A run is the rows of one (expert, source) pair, in expert order. An empty run has the same start as the next
    # one; side="right" passes over it.
    run_R = jnp.searchsorted(into_LN.reshape(-1), row_R, side="right", method="scan_unrolled")
    run_R = run_R.astype(jnp.int32) - 1
    shift_LN = from_NL.T - into_LN
    filled = jnp.sum(received_NL, dtype=jnp.int32)
    arrival_R = jnp.where(row_R < filled, row_R + shift_LN.reshape(-1)[run_R], R)

    place_W = jnp.arange(width, dtype=jnp.int32)
    expert_NW = jnp.sum(place_W[None, :, None] >= ends_NL[:, None, :], axis=-1, dtype=jnp.int32)
    shift_NW = jnp.take_along_axis(shift_LN.T, jnp.minimum(expert_NW, L - 1), axis=1)
    departure_NW = jnp.where(expert_NW < L, source_N[:, None] + place_W - shift_NW, R)
    return arrival_R, departure_NW.reshape(-1)
