"""Operations that declare the two parts of their backward themselves.

``split_backward`` needs no such help: it finds the weight part of any function in its jaxpr. But it cannot
cut a kernel in two. An operation with a hand-written backward declares both parts with ``split_vjp``.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import jax

from dualpipe_jax.arguments import typechecked
from dualpipe_jax.split.jaxprs import WEIGHT_PART
from dualpipe_jax.varying import vary_alike

Tree: TypeAlias = Any


class split_vjp:
    """A ``custom_vjp`` of ``function(x, weights)`` with a backward in two parts.

    ``defsplit`` takes three functions:

    - ``forward(x, weights) -> (y, residuals)``;
    - ``backward_input(residuals, dy) -> (dx, stash)``, where ``stash`` is whatever the other part needs, usually
      dy itself;
    - ``backward_weight(residuals, stash) -> dweights``.

    Under ``jax.grad`` both backward parts run together. Under ``split_backward`` the second function belongs to I and
    the third to W. No equation of the third is moved into I, however cheap, except collectives and all they need: so
    keep collectives in ``backward_input``. Each part may be one fused kernel. A kernel that computes dx and dweights
    in one call cannot be cut; it belongs to I as a whole.

    >>> @split_vjp
    ... def scale(x, weight):
    ...     return x * weight
    >>> scale.defsplit(
    ...     lambda x, weight: (x * weight, (x, weight)),
    ...     lambda residuals, dy: (dy * residuals[1], dy),
    ...     lambda residuals, dy: (dy * residuals[0]).sum(0),
    ... )
    >>> import jax, jax.numpy as jnp
    >>> jax.grad(lambda x, weight: scale(x, weight).sum(), argnums=1)(jnp.ones((2, 3)), jnp.ones(3)).tolist()
    [2.0, 2.0, 2.0]
    """

    def __init__(self, function: Callable[[Tree, Tree], Tree]):
        self._function = jax.custom_vjp(function)
        functools.update_wrapper(self, function)

    def defsplit(
        self,
        forward: Callable[[Tree, Tree], tuple[Tree, Tree]],
        backward_input: Callable[[Tree, Tree], tuple[Tree, Tree]],
        backward_weight: Callable[[Tree, Tree], Tree],
    ) -> None:
        """Set how the function is differentiated."""
        marked = weight_part(backward_weight)

        def backward(residuals: Tree, dy: Tree) -> tuple[Tree, Tree]:
            dx, stash = backward_input(residuals, dy)
            return dx, marked(residuals, stash)

        self._function.defvjp(forward, backward)

    def __call__(self, x: Tree, weights: Tree) -> Tree:
        """Apply the function. In a shard_map, both arguments are first made to vary over the union of their axes."""
        return self._function(*vary_alike((x, weights)))


@typechecked
def weight_part(function: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a function as part of a weight gradient: ``split_backward`` leaves it to W, however cheap it is.

    The function takes positional arguments and is compiled. Call the returned function in the backward of a
    ``custom_vjp``:

    >>> import jax.numpy as jnp
    >>> from dualpipe_jax.split import weight_part
    >>> @weight_part
    ... def weight_gradient(x, dy):
    ...     return x.T @ dy
    ...
    >>> weight_gradient(jnp.ones((2, 3)), jnp.ones((2, 4))).shape
    (3, 4)
    """

    def marked(*args: Any) -> Any:
        return function(*args)

    marked.__name__ = WEIGHT_PART
    return jax.jit(marked)
