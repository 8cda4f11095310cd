"""State the cost of Pallas kernels, and in whose memory they write, where kernels do not state it themselves.

Neither compilers' schedulers nor ``split_backward`` look into a kernel. Besides, ``sums_as_additions`` makes additions
of the sums over the blocks that a kernel returns.
"""

import dataclasses
import functools
from collections.abc import Callable, Hashable
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.extend import core as jex

_KERNELS = frozenset({"pallas_call", "mpmd_map"})
"""Pallas' two primitives: that of ``pl.pallas_call`` and that of ``plgpu.kernel``."""


def with_cost_estimate(
    function: Callable[..., Any], cost: pl.CostEstimate, vmem_limit_bytes: int | None = None
) -> Callable[..., Any]:
    """Return the function with ``cost`` stated on its Pallas call; on TPU it may use ``vmem_limit_bytes`` of VMEM."""

    def run(*args: Any) -> Any:
        closed, shape = jax.make_jaxpr(function, return_shape=True)(*args)
        options = {} if vmem_limit_bytes is None else {"vmem_limit_bytes": vmem_limit_bytes}
        with_cost = jex.jaxpr_as_fun(_with_cost(closed, {"cost_estimate": cost}, options))
        return jax.tree.unflatten(jax.tree.structure(shape), with_cost(*jax.tree.leaves(args)))

    return run


def call_traced_once(
    function: Callable[..., Any],
    cost: pl.CostEstimate,
    *args: jax.Array,
    in_place: int | None = None,
    **static: Any,
) -> Any:
    """Call the function with ``cost`` stated on its Pallas call, tracing it once per types of arguments.

    A program that calls a kernel a hundred times then lowers it once; lowering a kernel with many groups takes a
    second.

    Args:
      function: a function of arrays. Traces are found by its equality: pass one defined at a module's top.
      cost: see ``with_cost_estimate``.
      *args: the arrays.
      in_place: the index of the kernel's operand in whose memory its only result is written.
      **static: further arguments of the function, hashable.

    Returns:
      The function's result; a tuple if there are several.
    """
    types = tuple(map(jax.typeof, args))
    traced = _traced(function, tuple(static.items()), cost, types, in_place, jax.sharding.get_abstract_mesh())
    results = jex.jaxpr_as_fun(traced)(*args)
    return results[0] if len(results) == 1 else tuple(results)


@functools.lru_cache(maxsize=1024)
def _traced(
    function: Callable[..., Any],
    static: tuple[tuple[str, Hashable], ...],
    cost: pl.CostEstimate,
    types: tuple[Any, ...],
    in_place: int | None,
    mesh: Any,
) -> Any:
    del mesh  # part of the cache's key, since the function is traced under this mesh
    params: dict[str, Any] = {"cost_estimate": cost}
    if in_place is not None:
        params["input_output_aliases"] = {in_place: 0}
    return _with_cost(jax.make_jaxpr(functools.partial(function, **dict(static)))(*types), params, {})


def sums_as_additions(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with its sums over a leading dim of two to eight made additions; kernels stay unchanged.

    On v5p the TPU's compiler counts five to seven times as many cycles for such a sum as for the additions. For 2, 4
    and 8 blocks of 128 x 4096 x 256 in bfloat16 it counts 8.44, 8.49 and 13.86 million cycles for the sum, and 1.16,
    1.63 and 2.57 million for the additions (libtpu 0.0.42.1).
    """

    def run(*args: Any) -> Any:
        closed, shape = jax.make_jaxpr(function, return_shape=True)(*args)
        added = jex.jaxpr_as_fun(_rewritten(closed, _additions_for))
        return jax.tree.unflatten(jax.tree.structure(shape), added(*jax.tree.leaves(args)))

    return run


_MAX_BLOCKS = 8
"""The largest number of blocks whose sum becomes additions."""


def _additions_for(eqn: Any) -> list[Any] | None:
    """Return the equations that replace a sum over a leading dim by additions; None for any other equation."""
    if eqn.primitive.name != "reduce_sum" or len(eqn.params["axes"]) != 1:
        return None
    (axis,), (blocks,) = eqn.params["axes"], eqn.invars
    length, ndim = blocks.aval.shape[axis], blocks.aval.ndim
    if not (1 < length <= _MAX_BLOCKS and axis < ndim - 2):
        return None

    def add(blocks: jax.Array) -> jax.Array:
        # A split, not slices: in a pair each slice would be work of its own, which barriers may hold back.
        parts = lax.split(blocks, [1] * length, axis)
        return functools.reduce(lax.add, (lax.squeeze(part, (axis,)) for part in parts))

    inner = jax.make_jaxpr(add)(jax.ShapeDtypeStruct(blocks.aval.shape, blocks.aval.dtype)).jaxpr
    names = dict(zip((*inner.invars, *inner.outvars), (*eqn.invars, *eqn.outvars), strict=True))
    return [
        each.replace(
            invars=[names.get(var, var) for var in each.invars],
            outvars=[names.get(var, var) for var in each.outvars],
        )
        for each in inner.eqns
    ]


def _with_cost(jaxpr: Any, params: dict[str, Any], options: dict[str, Any]) -> Any:
    """Return the jaxpr with these parameters on its kernels, and these options for their compiler."""
    return _rewritten(jaxpr, functools.partial(_kernel_with_cost, params=params, options=options))


def _kernel_with_cost(eqn: Any, params: dict[str, Any], options: dict[str, Any]) -> list[Any] | None:
    if eqn.primitive.name not in _KERNELS:
        return None
    if "input_output_aliases" in params:  # converted to the type that JAX keeps it in, which JAX can hash
        aliases = type(eqn.params["input_output_aliases"])(params["input_output_aliases"])
        params = params | {"input_output_aliases": aliases}
    if options:
        params = params | {"compiler_params": dataclasses.replace(eqn.params["compiler_params"], **options)}
    return [eqn.replace(params=eqn.params | params)]


def _rewritten(jaxpr: Any, rewrite: Callable[[Any], list[Any] | None]) -> Any:
    """Return the jaxpr with each equation replaced by what ``rewrite`` returns for it; None leaves it unchanged.

    Equations inside calls are rewritten, too; those inside kernels are not.
    """
    inner = getattr(jaxpr, "jaxpr", jaxpr)
    if inner is not jaxpr:  # from jax 0.12 on a closed jaxpr is a jaxpr itself
        return jaxpr.replace(jaxpr=_rewritten(inner, rewrite))
    return jaxpr.replace(eqns=[new for eqn in jaxpr.eqns for new in _equations(eqn, rewrite)])


def _equations(eqn: Any, rewrite: Callable[[Any], list[Any] | None]) -> list[Any]:
    if (new := rewrite(eqn)) is not None:
        return new
    if eqn.primitive.name in _KERNELS:
        return [eqn]
    inside = {
        key: _rewritten(value, rewrite)
        for key, value in eqn.params.items()
        if key in ("jaxpr", "call_jaxpr", "call")
    }
    return [eqn.replace(params=eqn.params | inside) if inside else eqn]
