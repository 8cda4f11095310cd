"""Dispatch in two hops: over the slow links a token goes to a node once, however many of its experts are there.

::

    one hop:    device (0, 1) --+--> (1, 0)      two hops:   device (0, 1) ---> (1, 1) --+--> (1, 0)
    a copy for                  +--> (1, 2)      across: one copy,    then inside:      +--> (1, 2)
    each expert                 +--> (1, 3)      to its own number                       +--> (1, 3)

    back, one hop: three vectors                 back: the node sums its three, and sends one

This is the way of DeepSeek's DeepEP library. The expert axis is two mesh axes, (nodes, devices of a node), and every
collective is an ``all_to_all`` over one of them: first over nodes between devices of the same number, then inside each
node. The second hop is any plan of ``expert_plan``; its tokens are the rows that have arrived by the first hop. So
``dispatch``, ``expert_matmul`` and ``combine`` take the handle as they take any other. The second hop needs the experts
of each row: the plan sends them. Their weights are sent by ``combine``.

Shape suffixes: as in ``expert``; M nodes, H hop capacity, R = M * H rows that arrive at a device.
"""

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from dualpipe_jax.parallel.expert import dispatch, flatten_arrivals
from dualpipe_jax.parallel.expert_plan import DROPPED, Handle, known_experts, plan_capacity


def plan_two_hops(
    topk_TK: Array,
    num_experts: int,
    axis_names: tuple[str, str],
    plan: Callable[[Array, int], Handle],
    node_capacity: int | None = None,
) -> Handle:
    """Plan a dispatch to nodes and from there to experts.

    A device may send each node at most ``node_capacity`` tokens; beyond that, later tokens are dropped first. With
    capacity T nothing can be dropped, for a token goes to a node once. ``handle.dropped`` counts the assignments of
    each token copy that is dropped, and those of arrived rows that the second plan drops. Summed over all devices it is
    the number of assignments that found no expert; on one device it is the number that this device had no slot for,
    whichever device's tokens they belong to.

    On two nodes of two devices, each with one of four experts and two tokens:

    >>> import jax, jax.numpy as jnp
    >>> from dualpipe_jax import make_mesh
    >>> from dualpipe_jax.parallel import combine, dispatch, plan_dropless, plan_two_hops
    >>> def there_and_back(tokens, chosen):
    ...     handle = plan_two_hops(chosen, 4, ("node", "ep"), lambda topk, n: plan_dropless(topk, n, "ep"))
    ...     return combine(dispatch(tokens, handle), jnp.ones(chosen.shape), handle)
    ...
    >>> spec = jax.P(("node", "ep"))
    >>> mapped = jax.shard_map(there_and_back, mesh=make_mesh(pp=1, ep=(2, 2)), in_specs=spec, out_specs=spec)
    >>> jax.jit(mapped)(jnp.arange(8.0)[:, None], jnp.array([[0, 3], [1, 2]] * 4))[:, 0].tolist()
    [0.0, 2.0, 4.0, 6.0, 8.0, 10.0, 12.0, 14.0]

    Args:
      topk_TK: int32, each token's chosen experts, distinct within a token; E, or any number outside 0..E-1, for none.
      num_experts: E; node m holds experts m * E / M to (m + 1) * E / M - 1, and its devices equal parts of them.
      axis_names: the mesh axes (nodes, devices of a node).
      plan: ``plan(topk_RK, experts_of_a_node)``, which plans the second hop over the second axis by ``plan_capacity``
        or ``plan_dropless``. Each row of topk_RK has the choices of one arrived row; an entry is
        ``experts_of_a_node`` where the row is empty or the expert belongs to another node.
      node_capacity: H; None for T.

    Returns:
      A handle with which ``dispatch`` returns rows in the layout that the second plan gives.

    Raises:
      ValueError: there are not two axes, experts do not divide over nodes, or node_capacity is below 1.

    """
    if isinstance(axis_names, str) or len(axis_names) != 2:
        raise ValueError(
            f"plan_two_hops: axis_names must be two mesh axes, (nodes, devices of a node), got {axis_names!r}."
        )
    across = axis_names[0]
    num_nodes = lax.axis_size(across)
    if num_experts % num_nodes:
        raise ValueError(
            f"plan_two_hops: {num_experts} experts do not divide over the {num_nodes} nodes of axis {across!r}: "
            f"{num_experts} % {num_nodes} = {num_experts % num_nodes}."
        )
    if node_capacity is not None and node_capacity < 1:
        raise ValueError(f"plan_two_hops: node_capacity must be at least 1, got {node_capacity}.")
    topk_TK, here = known_experts(topk_TK, num_experts), num_experts // num_nodes
    nodes_M = jnp.arange(num_nodes, dtype=jnp.int32)
    wanted_TM = jnp.sum(topk_TK[..., None] // here == nodes_M, axis=1, dtype=jnp.int32)
    outer = plan_capacity(jnp.where(wanted_TM > 0, nodes_M, num_nodes), num_nodes, node_capacity, across)

    # Empty rows arrive as zeros, so experts are sent as numbers from one on.
    number_RK = flatten_arrivals(dispatch(topk_TK + 1, outer)) - 1
    local_RK = number_RK - here * lax.axis_index(across)
    inner = plan(jnp.where((local_RK >= 0) & (local_RK < here), local_RK, here), here)

    kept_TM = outer.slot_TK < outer.assignment_S.shape[0]
    lost = jnp.sum(jnp.where(kept_TM, 0, wanted_TM), dtype=jnp.int32)
    # The outer plan marked the number of copies that it dropped; add to it, up to the number of their assignments.
    checkpoint_name(lost - outer.dropped, DROPPED)
    outer = dataclasses.replace(outer, payload=inner.payload)
    return dataclasses.replace(inner, dropped=inner.dropped + lost, outer=outer)
