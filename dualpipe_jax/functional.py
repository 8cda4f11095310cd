"""Turn Flax modules into the plain functions that a pipeline runs.

A pipeline needs three functions of (params, x) and parameters in one tree,
``{"embed": ..., "stages": ..., "head": ...}``, every leaf of "stages" with a leading stage dim. This module
makes both from modules of Flax nnx or linen::

    functions, init = from_nnx(
        embed=lambda rngs: Embed(vocab, dim, rngs=rngs),
        stage=lambda rngs: Layers(dim, rngs=rngs),
        head=lambda rngs: Head(dim, vocab, rngs=rngs),
        num_stages=4,
        loss=cross_entropy,
    )
    params = init(jax.random.key(0))           # or jax.eval_shape(init, key): allocates nothing
    model = PipelineModel(*functions)

Modules are stateless here: what a layer must remember (batch statistics, a random key, routing biases) comes
in as a parameter or an input, and goes out as an output.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from dualpipe_jax.arguments import typechecked
from dualpipe_jax.installing import install_command

try:
    from flax import linen, nnx
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "dualpipe_jax.functional turns Flax modules into functions, and Flax is not installed; run: "
        + install_command("flax>=0.12", extra="flax")
    ) from error

Tree = Any
"""A pytree of arrays."""


class Functions(NamedTuple):
    """The three functions, in the order of the fields of ``PipelineModel``.

    Attributes:
      embed: ``embed(params["embed"], inputs) -> x``.
      stage: ``stage(one stage of params["stages"], x) -> x`` or ``(x, aux)``.
      head_loss: ``head_loss(params["head"], x, targets) -> scalar``.

    """

    embed: Callable[..., Tree]
    stage: Callable[..., Any]
    head_loss: Callable[..., Tree]


class Pure(NamedTuple):
    """A module as two functions.

    Attributes:
      init: ``init(key) -> params``.
      apply: ``apply(params, *args, key=None)``; the key is for dropout, such as a stage's ``At.key``.

    """

    init: Callable[[Array], Tree]
    apply: Callable[..., Any]


@typechecked
def pure_nnx(create: Callable[[nnx.Rngs], nnx.Module], *, evaluate: bool = False) -> Pure:
    """Split a module, once, into a function and its parameters.

    >>> import jax, jax.numpy as jnp
    >>> from flax import nnx
    >>> from dualpipe_jax.functional import pure_nnx
    >>> init, apply = pure_nnx(lambda rngs: nnx.Linear(3, 2, rngs=rngs))
    >>> params = init(jax.random.key(0))
    >>> jax.tree.map(jnp.shape, params), apply(params, jnp.ones((4, 3))).shape
    ({'bias': (2,), 'kernel': (3, 2)}, (4, 2))

    With a key, ``apply`` runs the module as it was made, and starts its random streams from that key. Without
    a key it runs the module after ``module.eval()``, where dropout does nothing. A module with dropout needs
    a key in every call, or ``evaluate=True`` here.

    Args:
      create: makes the module; it is called under ``jax.eval_shape`` here, and again by ``init``.
      evaluate: whether ``apply`` without a key may run a module that has dropout; its dropout then does
        nothing.

    Returns:
      ``init``, whose params are a nested dict with the names of the module's attributes, and ``apply``, which
      calls the module with them.

    Raises:
      ValueError: the module holds variables that are neither ``nnx.Param`` nor random streams; from
        ``apply``, when it is traced: the module has dropout, but there is no key.

    """
    module = nnx.eval_shape(lambda: create(nnx.Rngs(0)))
    graph, *states = nnx.split(module, nnx.Param, nnx.RngState, ...)
    _, streams, rest = states
    extra = [
        f"{'.'.join(map(str, path))}: {type(variable).__name__}" for path, variable in nnx.to_flat_state(rest)
    ]
    if extra:
        raise ValueError(
            "pure_nnx: only nnx.Param can be a parameter, but the module also holds "
            f"{', '.join(extra)}. Pass such values in as inputs, and out as outputs."
        )
    dropouts = [] if evaluate else _live_dropouts(module)
    module.eval()
    eval_graph = nnx.split(module)[0]
    kinds = [(path, isinstance(variable, nnx.RngKey)) for path, variable in nnx.to_flat_state(streams)]

    def init(key: Array) -> Tree:
        return nnx.to_pure_dict(nnx.state(create(nnx.Rngs(key)), nnx.Param))

    def apply(params: Tree, *args: Any, key: Array | None = None) -> Any:
        if key is None and dropouts:
            raise ValueError(
                f"the module has dropout ({', '.join(dropouts)}) but was given no key, so that it would train without. "
                "Use pure_nnx in a stage of a StagedModel and call apply(params, x, key=at.key); or, to evaluate, make "
                "it with evaluate=True."
            )
        started: dict[Any, Any] = {}
        for number, (path, is_key) in enumerate(kinds):
            node = started
            for name in path[:-1]:
                node = node.setdefault(name, {})
            own = jax.random.key(0) if key is None else jax.random.fold_in(key, number)
            node[path[-1]] = own if is_key else jnp.uint32(0)
        return nnx.merge(eval_graph if key is None else graph, params, started)(*args)

    return Pure(init, apply)


def _live_dropouts(module: nnx.Module) -> list[str]:
    """The attributes, as "path.name=rate", that set a dropout rate above zero in a module that is not deterministic."""
    found = []
    for path, part in nnx.iter_modules(module):
        for name in ("rate", "dropout_rate"):
            rate = getattr(part, name, 0)
            if isinstance(rate, int | float) and rate > 0 and not getattr(part, "deterministic", False):
                found.append(".".join([*map(str, path), f"{name}={rate}"]))
    return found


@typechecked
def pure_linen(module: linen.Module, *examples: Tree) -> Pure:
    """Split a module into a function and its parameters.

    >>> import jax, jax.numpy as jnp
    >>> from flax import linen
    >>> from dualpipe_jax.functional import pure_linen
    >>> init, apply = pure_linen(linen.Dense(2), jax.ShapeDtypeStruct((4, 3), jnp.float32))
    >>> params = init(jax.random.key(0))
    >>> jax.tree.map(jnp.shape, params), apply(params, jnp.ones((4, 3))).shape
    ({'bias': (2,), 'kernel': (3, 2)}, (4, 2))

    A key that is given to ``apply`` becomes the module's "dropout" stream; inside the module
    ``self.has_rng("dropout")`` says whether there is one.

    Args:
      module: the module.
      examples: arguments that it takes, or their ``jax.ShapeDtypeStruct``; only shapes and dtypes matter.

    Raises:
      ValueError: (from ``init``) the module has collections other than "params".

    """
    examples = jax.tree.map(lambda a: jax.ShapeDtypeStruct(jnp.shape(a), jnp.result_type(a)), examples)

    def init(key: Array) -> Tree:
        variables = module.init(key, *jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), examples))
        extra = sorted(set(variables) - {"params"})
        if extra:
            raise ValueError(
                f"pure_linen: {type(module).__name__} has collections {extra} beside 'params'. Pass such "
                "values in as inputs, and out as outputs."
            )
        return variables.get("params", {})

    def apply(params: Tree, *args: Any, key: Array | None = None) -> Any:
        return module.apply({"params": params}, *args, rngs=None if key is None else {"dropout": key})

    return Pure(init, apply)


@typechecked
def from_nnx(
    embed: Callable[[nnx.Rngs], nnx.Module],
    stage: Callable[[nnx.Rngs], nnx.Module],
    head: Callable[[nnx.Rngs], nnx.Module],
    num_stages: int,
    loss: Callable[[Any, Any], Array] | None = None,
    *,
    evaluate: bool = False,
) -> tuple[Functions, Callable[[Array], Tree]]:
    """Turn three nnx modules into a pipeline's functions and its parameters' initialiser.

    >>> import jax, jax.numpy as jnp
    >>> from flax import nnx
    >>> from dualpipe_jax import PipelineModel
    >>> from dualpipe_jax.functional import from_nnx
    >>> functions, init = from_nnx(
    ...     embed=lambda rngs: nnx.Embed(5, 3, rngs=rngs),
    ...     stage=lambda rngs: nnx.Linear(3, 3, rngs=rngs),
    ...     head=lambda rngs: nnx.Linear(3, 1, rngs=rngs),
    ...     num_stages=4,
    ...     loss=lambda y, targets: jnp.mean((y - targets) ** 2),
    ... )
    >>> model = PipelineModel(*functions)
    >>> jax.eval_shape(init, jax.random.key(0))["stages"]["kernel"].shape  # a leading dim of stages
    (4, 3, 3)

    Args:
      embed: makes the module called as ``embed(inputs) -> x``.
      stage: makes the module called as ``stage(x) -> x`` or ``(x, aux)``; x keeps shape and dtype.
      head: makes the module called as ``head(x, targets) -> loss``, or ``head(x)`` if ``loss`` is given.
      num_stages: how many stages ``init`` makes, each from its own key.
      loss: ``loss(head's output, targets) -> scalar``.
      evaluate: see ``pure_nnx``. These functions are given no key, so modules with dropout need
        ``evaluate=True``; to train with dropout make a ``StagedModel`` with ``pure_nnx``.

    Returns:
      ``(functions, init)``; ``init(key)`` returns params, ``init`` may be traced.

    Raises:
      ValueError: see ``pure_nnx``.

    """
    pure = functools.partial(pure_nnx, evaluate=evaluate)
    return _assemble(pure(embed), pure(stage), pure(head), num_stages, loss)


@typechecked
def from_linen(
    embed: linen.Module,
    stage: linen.Module,
    head: linen.Module,
    num_stages: int,
    inputs: Tree,
    targets: Tree,
    loss: Callable[[Any, Any], Array] | None = None,
) -> tuple[Functions, Callable[[Array], Tree]]:
    """Turn three linen modules into a pipeline's functions and its parameters' initialiser.

    >>> import jax, jax.numpy as jnp
    >>> from flax import linen
    >>> from dualpipe_jax import PipelineModel
    >>> from dualpipe_jax.functional import from_linen
    >>> functions, init = from_linen(
    ...     linen.Embed(5, 3),
    ...     linen.Dense(3),
    ...     linen.Dense(1),
    ...     num_stages=4,
    ...     inputs=jax.ShapeDtypeStruct((8,), jnp.int32),
    ...     targets=jax.ShapeDtypeStruct((8, 1), jnp.float32),
    ...     loss=lambda y, targets: jnp.mean((y - targets) ** 2),
    ... )
    >>> model = PipelineModel(*functions)
    >>> jax.eval_shape(init, jax.random.key(0))["stages"]["kernel"].shape  # a leading dim of stages
    (4, 3, 3)

    Args:
      embed: called as ``embed(inputs) -> x``.
      stage: called as ``stage(x) -> x`` or ``(x, aux)``; x keeps shape and dtype.
      head: called as ``head(x, targets) -> loss``, or ``head(x)`` if ``loss`` is given.
      num_stages: how many stages ``init`` makes, each from its own key.
      inputs: one microbatch's inputs, or their ``jax.ShapeDtypeStruct``; only shapes and dtypes matter.
      targets: one microbatch's targets, likewise.
      loss: ``loss(head's output, targets) -> scalar``.

    Returns:
      ``(functions, init)``; ``init(key)`` returns params, ``init`` may be traced.

    Raises:
      ValueError: (from ``init``) a module has collections other than "params".

    """
    pure_embed = pure_linen(embed, inputs)
    key = jax.random.key(0)
    x = jax.eval_shape(lambda key, inputs: pure_embed.apply(pure_embed.init(key), inputs), key, inputs)
    pure_head = pure_linen(head, x, targets) if loss is None else pure_linen(head, x)
    return _assemble(pure_embed, pure_linen(stage, x), pure_head, num_stages, loss)


@typechecked
def num_params(params: Tree) -> int:
    """The number of floating-point parameters in a tree of arrays or of the types that ``jax.eval_shape`` returns."""
    leaves = jax.tree.leaves(params)
    return sum(leaf.size for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.floating))


def _assemble(
    embed: Pure, stage: Pure, head: Pure, num_stages: int, loss: Callable[[Any, Any], Array] | None
) -> tuple[Functions, Callable[[Array], Tree]]:
    if num_stages < 1:
        raise ValueError(f"num_stages must be at least 1, got {num_stages}.")

    def head_loss(params: Tree, x: Tree, targets: Tree) -> Array:
        return head.apply(params, x, targets) if loss is None else loss(head.apply(params, x), targets)

    def init(key: Array) -> Tree:
        embed_key, stage_key, head_key = jax.random.split(key, 3)
        return {
            "embed": embed.init(embed_key),
            "stages": jax.vmap(stage.init)(jax.random.split(stage_key, num_stages)),
            "head": head.init(head_key),
        }

    return Functions(embed.apply, stage.apply, head_loss), init
