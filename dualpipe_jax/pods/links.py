"""Bytes that dispatch sends over each kind of link, and the share of tokens without room, under random routing."""

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence

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


def count_links(plan: Plan, dispatch: Dispatch, target: Target, tokens: int) -> Links | None:
    """Count copies of a token and bytes of a device in one dispatch of a layer, with ``tokens`` tokens per device.

    The number of nodes is the plan's ``ep_nodes``, else what a CUDA target's shape says. None where all
    experts of a layer are on one node, or where their devices do not fill whole nodes.
    """
    size = target.shape[-1] if target.platform == "cuda" else plan.ep
    nodes = plan.ep_nodes if plan.ep_nodes > 1 else plan.ep // size
    if nodes < 2 or (plan.ep_nodes == 1 and plan.ep % size):
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
    lost = 0.0
    for of_groups, number in _rooms(dispatch, held).items():
        arrivals = _arrivals(tokens, _visits(dispatch, of_groups))
        beyond = np.maximum(np.arange(len(arrivals)) - math.ceil(plan.room * even), 0)
        lost += number * float(arrivals @ beyond)
    return lost / (tokens * chosen)


def _rooms(dispatch: Dispatch, held: int) -> Counter[tuple[int, ...]]:
    """The rooms that ``held`` consecutive experts share, counted by the numbers of these experts in each group."""
    size = dispatch.num_experts // dispatch.num_groups
    return Counter(
        tuple(sorted(Counter(expert // size for expert in range(first, first + held)).values()))
        for first in range(0, dispatch.num_experts, held)
    )


def _visits(dispatch: Dispatch, of_groups: Sequence[int]) -> np.ndarray:
    """The probabilities that a token chooses 0, 1, ... of the experts that share a room.

    ``of_groups`` has the number of these experts in each group that has any.
    """
    groups, kept = dispatch.num_groups, dispatch.top_groups
    among = dispatch.num_experts // groups * kept
    # In how many ways a token's groups can be chosen, by their number and by the experts of the room in them.
    ways = Counter({(0, 0): 1})
    for own in (*of_groups, *(0,) * (groups - len(of_groups))):
        ways += Counter({(count + 1, there + own): number for (count, there), number in ways.items()})
    visits = np.zeros(min(sum(of_groups), dispatch.top_k) + 1)
    for (count, there), number in ways.items():
        if count == kept:
            for n in range(min(there, dispatch.top_k) + 1):
                chosen = math.comb(there, n) * math.comb(among - there, dispatch.top_k - n)
                visits[n] += number * chosen / (math.comb(groups, kept) * math.comb(among, dispatch.top_k))
    return visits


def _arrivals(tokens: int, visits: np.ndarray) -> np.ndarray:
    """The distribution of the number of arrivals from ``tokens`` tokens: ``visits`` convolved with itself."""
    length = tokens * (len(visits) - 1) + 1
    return np.clip(np.fft.irfft(np.fft.rfft(visits, length) ** tokens, length), 0, 1)
