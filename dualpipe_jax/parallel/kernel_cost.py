"""What a kernel costs that does not say so itself: compilers' schedulers and ``split_backward`` see into none."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.extend import core as jex

_KERNELS = frozenset({"pallas_call", "mpmd_map"})
"""Pallas' two primitives: ``pl.pallas_call``, and what ``plgpu.kernel`` makes."""


def priced(
    function: Callable[..., Any], cost: pl.CostEstimate, vmem_limit_bytes: int | None = None
) -> Callable[..., Any]:
    """The function, whose one Pallas call now says what it costs, and on TPU may take so much of VMEM."""

    def run(*args: Any) -> Any:
        closed, shape = jax.make_jaxpr(function, return_shape=True)(*args)
        with_cost = jex.jaxpr_as_fun(_with_cost(closed, cost, vmem_limit_bytes))
        return jax.tree.unflatten(jax.tree.structure(shape), with_cost(*jax.tree.leaves(args)))

    return run


def once(function: Callable[..., Any], cost: pl.CostEstimate, *args: jax.Array) -> Any:
    """As ``priced``, for a function of arrays that is equal to others, as those at a module's top are: it is traced
    once for arguments of a type. A program that calls a kernel a hundred times then holds it lowered once, which of
    one with many groups takes a second.
    """
    types = tuple(map(jax.typeof, args))
    results = jex.jaxpr_as_fun(_traced(function, cost, types, jax.sharding.get_abstract_mesh()))(*args)
    return results[0] if len(results) == 1 else tuple(results)


@functools.lru_cache(maxsize=1024)
def _traced(function: Callable[..., Any], cost: pl.CostEstimate, types: tuple[Any, ...], mesh: Any) -> Any:
    del mesh  # the one that is traced under
    return _with_cost(jax.make_jaxpr(function)(*types), cost, None)


def _with_cost(jaxpr: Any, cost: pl.CostEstimate, vmem: int | None) -> Any:
    inner = getattr(jaxpr, "jaxpr", jaxpr)
    if inner is not jaxpr:  # from jax 0.12 on a closed jaxpr is a jaxpr itself
        return jaxpr.replace(jaxpr=_with_cost(inner, cost, vmem))
    return jaxpr.replace(eqns=[_equation_with_cost(eqn, cost, vmem) for eqn in jaxpr.eqns])


def _equation_with_cost(eqn: Any, cost: pl.CostEstimate, vmem: int | None) -> Any:
    if eqn.primitive.name in _KERNELS:
        params: dict[str, Any] = {"cost_estimate": cost}
        if vmem is not None:
            options = eqn.params["compiler_params"]
            params["compiler_params"] = dataclasses.replace(options, vmem_limit_bytes=vmem)
        return eqn.replace(params=eqn.params | params)
    inside = {
        key: _with_cost(value, cost, vmem)
        for key, value in eqn.params.items()
        if key in ("jaxpr", "call_jaxpr", "call")
    }
    return eqn.replace(params=eqn.params | inside) if inside else eqn
