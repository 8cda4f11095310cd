"""The traffic of dispatch: copies of a token that are sent inside a node and across nodes."""

import dataclasses

import numpy as np
from numpy.typing import ArrayLike

from dualpipe_jax.arguments import typechecked
from dualpipe_jax.balance.placement import Layout


@dataclasses.dataclass(frozen=True)
class Copies:
    """The number of copies of a token that cross each kind of link, on average over tokens.

    >>> from dualpipe_jax.balance import Layout, count_traffic
    >>> layout = Layout(num_devices=4, num_slots=1, num_nodes=2)
    >>> copies = count_traffic([0, 0], [[1, 2], [2, 3]], layout).by_expert
    >>> copies.bytes(num_tokens=1000, token_bytes=7168)  # between nodes, and inside them
    (10752000.0, 3584000.0)

    Attributes:
      across: copies from one node to another.
      inside: copies from one device to another of the same node.
    """

    across: float
    inside: float

    def bytes(self, num_tokens: int, token_bytes: float) -> tuple[float, float]:
        """The bytes that ``num_tokens`` tokens of ``token_bytes`` each send across nodes and inside them."""
        return self.across * num_tokens * token_bytes, self.inside * num_tokens * token_bytes


@dataclasses.dataclass(frozen=True)
class Traffic:
    """The traffic of one routing, sent in each of four ways.

    Attributes:
      by_expert: a copy for each chosen expert, as one all-to-all over experts sends.
      by_device: a copy for each device that has chosen experts.
      two_hops: a copy for each other node that has chosen experts, to the device there with the sender's
        number within its node. From that device (in its own node, from the sender) a copy to each other
        device of the node that has chosen experts. This is DeepEP's way.
      two_hops_by_expert: the same first hop; in the second hop a copy for each chosen expert on another
        device of the node. This is ``parallel.plan_two_hops``, whose second hop is a dispatch by experts.
    """

    by_expert: Copies
    by_device: Copies
    two_hops: Copies
    two_hops_by_expert: Copies


@typechecked
def count_traffic(source: ArrayLike, target: ArrayLike, layout: Layout) -> Traffic:
    """Count the copies that a routing sends.

    >>> from dualpipe_jax.balance import Layout, count_traffic
    >>> layout = Layout(num_devices=4, num_slots=1, num_nodes=2)
    >>> count_traffic([0, 0], [[1, 2], [2, 3]], layout).by_expert
    Copies(across=1.5, inside=0.5)

    Args:
      source: int [tokens], the device of each token.
      target: int [tokens, k], for each expert that the token chose, the device with the copy that it uses.
      layout: num_devices devices in num_nodes nodes of equal size.

    Raises:
      ValueError: a device is not in the layout, shapes differ, or nodes are of unequal size; says which.
    """
    sources, targets = np.asarray(source), np.asarray(target)
    if sources.ndim != 1 or targets.ndim != 2 or len(sources) != len(targets) or not targets.size:
        raise ValueError(
            f"count_traffic: source {list(sources.shape)} and target {list(targets.shape)}; give [tokens] and "
            "[tokens, k]"
        )
    for name, devices in (("source", sources), ("target", targets)):
        if devices.dtype.kind not in "iu" or devices.min() < 0 or devices.max() >= layout.num_devices:
            raise ValueError(f"count_traffic: {name} must be devices, integers 0 to {layout.num_devices - 1}")
    # In fewer bits than the size of a node has, NumPy divides by no such number.
    sources, targets = sources.astype(np.int64), targets.astype(np.int64)
    if layout.num_devices % layout.num_nodes:
        raise ValueError(
            f"count_traffic: {layout.num_devices} devices on {layout.num_nodes} nodes of unequal size"
        )
    tokens, size = len(sources), layout.num_devices // layout.num_nodes
    token, own_node = np.arange(tokens), sources // size
    other_node = targets // size != own_node[:, None]
    same_node = ~other_node & (targets != sources[:, None])
    by_expert = Copies(float(other_node.sum() / tokens), float(same_node.sum() / tokens))

    hit = np.zeros((tokens, layout.num_nodes, size), bool)
    hit.reshape(tokens, -1)[token[:, None], targets] = True
    inside = hit[token, own_node].sum() - hit[token, own_node, sources % size].sum()
    across = hit.sum() - hit[token, own_node].sum()
    by_device = Copies(float(across / tokens), float(inside / tokens))

    nodes: np.ndarray = np.any(hit, axis=-1)
    # In each node the device with the sender's number has the token already
    spread = hit.sum() - hit[token, :, sources % size].sum()
    others = nodes.sum() - nodes[token, own_node].sum()
    two_hops = Copies(float(others / tokens), float(spread / tokens))
    spread = (targets % size != sources[:, None] % size).sum()
    return Traffic(by_expert, by_device, two_hops, Copies(two_hops.across, float(spread / tokens)))


@typechecked
def random_traffic(
    layout: Layout,
    num_experts: int,
    num_chosen: int,
    num_limited: int | None = None,
    num_tokens: int = 20_000,
    seed: int = 0,
) -> Traffic:
    """Estimate the traffic of tokens that choose experts at random, with experts in order over the devices.

    >>> from dualpipe_jax.balance import Layout, random_traffic
    >>> found = random_traffic(Layout(num_devices=64, num_slots=4, num_nodes=8), num_experts=256, num_chosen=8)
    >>> round(found.by_expert.across, 1), round(found.two_hops.across, 1)  # copies of a token between nodes
    (7.0, 4.6)

    Args:
      layout: devices, nodes, and the groups of experts that routing is limited to.
      num_experts: number of experts of a layer.
      num_chosen: number of experts of a token, those with the highest scores.
      num_limited: number of groups from which a token's experts come: those with the highest sums of their
        two best scores, as in DeepSeek-V3; None for all groups.
      num_tokens: number of random tokens.
      seed: seed of the random scores.

    Raises:
      ValueError: counts do not divide or fit each other; says which.
    """
    groups = layout.num_groups or 1
    limited = groups if num_limited is None else num_limited
    if num_experts % layout.num_devices or num_experts % groups:
        raise ValueError(
            f"random_traffic: {num_experts} experts on {layout.num_devices} devices in {groups} groups; give experts "
            "that both divide"
        )
    if not 1 <= limited <= groups or not 1 <= num_chosen <= limited * (num_experts // groups):
        raise ValueError(
            f"random_traffic: num_chosen {num_chosen} of num_limited {limited} of {groups} groups of "
            f"{num_experts // groups} experts; give fewer experts, or 1 to all groups"
        )
    if num_tokens < 1 or seed < 0:
        raise ValueError(
            f"random_traffic: num_tokens {num_tokens} must be at least 1, seed {seed} at least 0"
        )
    random = np.random.default_rng(seed)
    scores = random.random((num_tokens, groups, num_experts // groups), np.float32)
    if limited < groups:
        best = -np.partition(-scores, min(1, scores.shape[-1] - 1), -1)[..., :2].sum(-1)
        dropped = np.argpartition(best, groups - limited, -1)[:, : groups - limited]
        scores[np.arange(num_tokens)[:, None], dropped] = -1
    flat = scores.reshape(num_tokens, num_experts)
    chosen = np.argpartition(-flat, num_chosen - 1, -1)[:, :num_chosen]
    source = np.arange(num_tokens) % layout.num_devices
    return count_traffic(source, chosen // (num_experts // layout.num_devices), layout)
