"""Bytes that dispatch sends over each kind of link, and the share of tokens without room, under random routing."""

import dataclasses
import math

import numpy as np

from dualpipe_jax.balance import Layout, random_traffic
from dualpipe_jax.inspect.target import Target
from dualpipe_jax.pods.plan import Plan
from dualpipe_jax.pods.results import Links, LinkTraffic


@dataclasses.dataclass(frozen=True)
class Dispatch:
    """How a layer's tokens choose their experts.

    Attributes:
      num_experts: number of experts of a layer.
      top_k: number of experts that a token chooses.
      token_bytes: bytes of a token as it is sent.
      num_groups: number of groups of experts of which a token chooses some; 1 if routing is not limited.
      top_groups: number of groups that a token's experts may come from.
    """

    num_experts: int
    top_k: int
    token_bytes: int
    num_groups: int = 1
    top_groups: int = 1


def count_links(plan: Plan, dispatch: Dispatch, target: Target | None, tokens: int) -> Links | None:
    """Count copies of a token and bytes of a device in one dispatch of a layer, with ``tokens`` tokens per device.

    The number of nodes is the plan's ``ep_nodes``, else what a CUDA target's shape says. None where all
    experts of a layer are on one node, or where the nodes do not divide ``ep``.
    """
    size = target.shape[-1] if target is not None and target.platform == "cuda" else plan.ep
    nodes = plan.ep_nodes if plan.ep_nodes > 1 else -(-plan.ep // size)
    if nodes < 2 or plan.ep % nodes:
        return None
    # Where groups lie across nodes, limited routing does not limit a token's nodes.
    groups, kept = (None, None) if dispatch.num_groups % nodes else (dispatch.num_groups, dispatch.top_groups)
    layout = Layout(plan.ep, dispatch.num_experts // plan.ep, nodes, groups)
    found = random_traffic(layout, dispatch.num_experts, dispatch.top_k, kept)
    ways = {
        way: LinkTraffic(copies.across, copies.inside, *copies.bytes(tokens, dispatch.token_bytes))
        for way, copies in (
            ("one hop", found.by_expert),
            ("two hops", found.two_hops_by_expert),
            ("two hops, a copy a device", found.two_hops),
        )
    }
    return Links(nodes, tokens, "two hops" if plan.ep_nodes > 1 else "one hop", ways)


def share_dropped(plan: Plan, dispatch: Dispatch, tokens: int) -> float | None:
    """The expected share of the assignments of a device's ``tokens`` in a layer that find no room.

    Tokens choose independently, and all experts and groups of experts are equally likely. 0 where room is
    never short, None for dispatch in two hops.
    """
    if plan.room is None:
        return 0.0
    if plan.ep_nodes > 1:
        return None
    experts, chosen = dispatch.num_experts, dispatch.top_k
    held = 1 if plan.dispatch == "capacity" else experts // plan.ep
    even = tokens * chosen * held / experts
    arrivals = _arrivals(tokens, _visits(dispatch, held))
    beyond = np.maximum(np.arange(len(arrivals)) - math.ceil(plan.room * even), 0)
    return float(arrivals @ beyond) / even


def _visits(dispatch: Dispatch, held: int) -> np.ndarray:
    """The probabilities that a token chooses 0, 1, ... of ``held`` experts that share their room."""
    kept = dispatch.num_experts * dispatch.top_groups // dispatch.num_groups
    among = kept if held <= dispatch.num_experts // dispatch.num_groups else dispatch.num_experts
    most, rest = min(held, dispatch.top_k), among - held
    ways = [math.comb(held, n) * math.comb(rest, dispatch.top_k - n) for n in range(most + 1)]
    visits = np.array(ways, float) / math.comb(among, dispatch.top_k) * (among / dispatch.num_experts)
    visits[0] += 1 - among / dispatch.num_experts
    return visits


def _arrivals(tokens: int, visits: np.ndarray) -> np.ndarray:
    """The distribution of the number of arrivals from ``tokens`` tokens: ``visits`` convolved with itself."""
    length = tokens * (len(visits) - 1) + 1
    return np.clip(np.fft.irfft(np.fft.rfft(visits, length) ** tokens, length), 0, 1)
