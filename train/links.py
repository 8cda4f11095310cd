"""What dispatch sends over which links: of a dry run, by random routing."""

import dataclasses
from typing import Any

import jax.numpy as jnp

import models
from dualpipe_jax import inspect
from dualpipe_jax.balance import Layout, random_traffic
from dualpipe_jax.command.program import Program


def count_links(
    program: Program, numbers: models.Config, target: inspect.Target | None, tokens: int
) -> dict[str, Any] | None:
    """Copies of a token and bytes of a device in one dispatch of a layer, of ``tokens`` a device; for JSON.

    Nodes are those that were asked for, else those of a target that has some. None where experts lie on one node.
    """
    size = target.shape[-1] if target is not None and target.platform == "cuda" else program.ep
    nodes = program.ep_nodes if program.ep_nodes > 1 else -(-program.ep // size)
    if nodes < 2 or program.ep % nodes:
        return None
    # Groups that lie across nodes keep a token from none.
    groups, kept = (None, None) if numbers.num_groups % nodes else (numbers.num_groups, numbers.top_groups)
    layout = Layout(program.ep, numbers.num_experts // program.ep, nodes, groups)
    found = random_traffic(layout, numbers.num_experts, numbers.top_k, kept)
    token_bytes = numbers.dim * jnp.dtype(numbers.compute_dtype).itemsize
    ways = {
        way: dict(zip(("bytes_across", "bytes_inside"), copies.bytes(tokens, token_bytes), strict=True))
        | dataclasses.asdict(copies)
        for way, copies in (
            ("one hop", found.by_expert),
            ("two hops", found.two_hops_by_expert),
            ("two hops, a copy a device", found.two_hops),
        )
    }
    return {
        "nodes": nodes,
        "tokens": tokens,
        "used": "two hops" if program.ep_nodes > 1 else "one hop",
        "ways": ways,
    }
