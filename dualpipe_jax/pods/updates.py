"""The update of programs with any of optax's optimizers."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from dualpipe_jax.pods.program import Tree, Update


def optimized_by(optimizer: Any) -> Callable[[Tree], Update]:
    """Make ``Program.update`` of an ``optax.GradientTransformation``: other than floating or frozen parameters stay.

    Trees in the optimizer's state with the structure and shapes of the parameters are sharded like the
    parameters; all other leaves are replicated.

    >>> import jax, jax.numpy as jnp, optax
    >>> from dualpipe_jax import make_mesh
    >>> from dualpipe_jax.pods import optimized_by
    >>> everywhere = jax.NamedSharding(make_mesh(1), jax.P())
    >>> params = {"w": jax.ShapeDtypeStruct((4, 3), jnp.float32, sharding=everywhere)}
    >>> update = optimized_by(optax.adam(1e-3))(params)
    >>> [leaf.shape for leaf in jax.tree.leaves(update.state)]  # a count of steps, and two averages
    [(), (4, 3), (4, 3)]
    """

    def update(params: Tree, trained: Callable[[Tree], Tree] = _floating) -> Update:
        state = _with_shardings(jax.eval_shape(optimizer.init, trained(params)), trained(params))

        def step(params: Tree, state: Tree, batch: Tree, value_and_grad: Callable[..., Any]) -> Any:
            (objective, _), grads = value_and_grad(params, batch)
            # optax raises floats to the power of an integer count.
            with jax.numpy_dtype_promotion("standard"):
                updates, state = optimizer.update(trained(grads), state, trained(params))
            return (
                jax.tree.map(_add_update, params, updates, is_leaf=lambda node: node is None),
                state,
                objective,
            )

        def lower(value_and_grad: Callable[..., Any], batch: Tree) -> Any:
            shardings = (*jax.tree.map(lambda leaf: leaf.sharding, (params, state)), None)
            whole: Any = jax.jit(step, static_argnums=3, donate_argnums=(0, 1), out_shardings=shardings)
            return whole.lower(params, state, batch, value_and_grad)

        return Update(state, lower)

    return update


def _floating(tree: Tree) -> Tree:
    """The tree with None in the place of leaves that are not floating-point."""
    return jax.tree.map(lambda leaf: leaf if jnp.issubdtype(leaf.dtype, jnp.floating) else None, tree)


def _add_update(param: Any, update: Any) -> Any:
    return param if update is None else param + update.astype(param.dtype)


def _with_shardings(state: Tree, params: Tree) -> Tree:
    """The optimizer's state as ShapeDtypeStructs with shardings."""
    like, form = jax.tree.leaves(params), jax.tree.structure(params)
    everywhere = NamedSharding(like[0].sharding.mesh, PartitionSpec())

    def is_like(node: Any) -> bool:
        leaves, here = jax.tree.flatten(node)
        same: bool = here == form  # type: ignore[operator]
        return same and all(a.shape == b.shape for a, b in zip(leaves, like, strict=True))

    def lay(leaf: Any, sharding: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    def of(node: Any) -> Any:
        if is_like(node):
            return jax.tree.map(lambda leaf, p: lay(leaf, p.sharding), node, params)
        return lay(node, everywhere)

    return jax.tree.map(of, state, is_leaf=is_like)
