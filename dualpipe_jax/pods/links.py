"""What dispatch sends over which links: of a dry run, by random routing."""

import dataclasses

from dualpipe_jax.balance import Layout, random_traffic
from dualpipe_jax.inspect import Target
from dualpipe_jax.pods.plan import Plan
from dualpipe_jax.pods.results import Links, Way


@dataclasses.dataclass(frozen=True)
class Dispatch:
    """How a layer's tokens choose their experts.

    Attributes:
      num_experts, top_k: of a layer, and those that a token chooses.
      token_bytes: of a token on its way.
      num_groups, top_groups: routing limited to some groups of experts; one group where it is not.
    """

    num_experts: int
    top_k: int
    token_bytes: int
    num_groups: int = 1
    top_groups: int = 1


def count_links(plan: Plan, dispatch: Dispatch, target: Target | None, tokens: int) -> Links | None:
    """Copies of a token and bytes of a device in one dispatch of a layer, of ``tokens`` a device.

    Nodes are those that were asked for, else those of a target that has some. None where experts lie on one node.
    """
    size = target.shape[-1] if target is not None and target.platform == "cuda" else plan.ep
    nodes = plan.ep_nodes if plan.ep_nodes > 1 else -(-plan.ep // size)
    if nodes < 2 or plan.ep % nodes:
        return None
    # Groups that lie across nodes keep a token from none.
    groups, kept = (None, None) if dispatch.num_groups % nodes else (dispatch.num_groups, dispatch.top_groups)
    layout = Layout(plan.ep, dispatch.num_experts // plan.ep, nodes, groups)
    found = random_traffic(layout, dispatch.num_experts, dispatch.top_k, kept)
    ways = {
        way: Way(copies.across, copies.inside, *copies.bytes(tokens, dispatch.token_bytes))
        for way, copies in (
            ("one hop", found.by_expert),
            ("two hops", found.two_hops_by_expert),
            ("two hops, a copy a device", found.two_hops),
        )
    }
    return Links(nodes, tokens, "two hops" if plan.ep_nodes > 1 else "one hop", ways)
