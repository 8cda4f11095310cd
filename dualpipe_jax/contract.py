"""The engine's contract with a model: a few stage functions, and the kind of each stage.

The functions are plain JAX. They know nothing of schedules, slots or ranks, and the plain model in
``reference`` calls the same functions.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dualpipe_jax.arguments import typechecked

Tree = Any
"""A pytree of arrays."""


class At(NamedTuple):
    """What a stage sees besides its parameters and x. It is never sent between ranks: every rank makes its own.

    The engine makes it. To try a stage function by itself, make one:

    >>> import jax.numpy as jnp
    >>> from dualpipe_jax import At, Out
    >>> def stage(own, shared, x, at):
    ...     return Out(at.batch["x"] * own)
    ...
    >>> at = At({"x": jnp.ones(3)}, stage=jnp.int32(0), microbatch=jnp.int32(0), key=None)
    >>> stage(5.0, None, None, at).x.tolist()
    [5.0, 5.0, 5.0]

    Attributes:
      batch: this device's part of the microbatch, leaves [microbatch size / devices that share it, ...]: tokens,
        targets, positions, segment ids, whatever the batch holds.
      stage: int32 scalar, the stage's number in model order.
      microbatch: int32 scalar, the microbatch's number in the step.
      key: a typed PRNG key of (step, stage, microbatch, part of the batch) for dropout. The forward, its
        recomputation and both halves of the backward get the same key under every schedule. None if the step
        was given no key.
    """

    batch: Tree
    stage: jax.Array
    microbatch: jax.Array
    key: jax.Array | None


class Out(NamedTuple):
    """What a stage returns.

    >>> import jax.numpy as jnp
    >>> from dualpipe_jax import Out
    >>> def stage(own, shared, x, at):
    ...     y = jnp.tanh(x @ own)
    ...     return Out(y, losses={"size": jnp.mean(y**2)}, metrics={"large": jnp.sum(y > 0.5)})
    ...
    >>> stage(jnp.eye(2), None, jnp.array([[0.0, 1.0]]), None).metrics["large"].tolist()
    1

    Attributes:
      x: the input of the next stage, any tree. Shapes and dtypes are the same after every stage except the
        last; the x of the last stage is returned by ``Pipeline.apply`` alone. Floating leaves have gradients;
        integers and keys are handed on.
      losses: scalars by name that join the objective; each is the mean over this device's part of the
        microbatch. The objective is the sum over names and stages of their means over microbatches and parts.
      metrics: arrays by name, outside the objective. They are summed over microbatches, stages and devices,
        integers exactly. Narrower floats, such as bfloat16, are summed in float32, narrower integers, such as
        int8, in int32, all others in their own dtype.
    """

    x: Tree = None
    losses: Mapping[str, jax.Array] = {}
    metrics: Mapping[str, Tree] = {}


StageFunction = Callable[[Tree, Tree, Tree, At], Out]
"""``stage(own, shared, x, at) -> Out``; x is None at the first stage."""


@typechecked
@dataclasses.dataclass(frozen=True)
class StagedModel:
    """A model as the engine sees it.

    >>> import jax, jax.numpy as jnp
    >>> from dualpipe_jax import Out, StagedModel, reference_loss
    >>> def first(own, shared, x, at):
    ...     return Out(shared["embed"][at.batch["tokens"]] @ own)
    ...
    >>> def last(own, shared, x, at):
    ...     return Out(losses={"error": jnp.mean((x @ own - at.batch["targets"]) ** 2)})
    ...
    >>> model = StagedModel(kinds={"first": first, "last": last}, kind_of=("first", "last"))
    >>> params = {"stages": jnp.ones((2, 3, 3)), "shared": {"embed": jnp.ones((5, 3))}}
    >>> batch = {"tokens": jnp.zeros((2, 4), int), "targets": jnp.ones((2, 4, 3))}  # two microbatches of four
    >>> loss, report = jax.jit(reference_loss(model))(params, batch)
    >>> float(loss)
    64.0

    ``params = {"stages": ..., "shared": ...}``. Every leaf of "stages" has a leading stage dim, in model
    order, and a stage gets its own part without that dim. "shared" holds the parameters that several stages
    use or that only one kind of stage has (embedding, head, dense layers): every stage gets all of it, there
    is one copy in params and in the optimizer, and its gradient is the sum over the stages that use it.
    Parameters that a kind does not use cost it nothing: no time, and no memory for sums.

    A stage function may use collectives over the axes "ep" and "dp" (but no ppermute, and nothing over "pp").
    It marks what the backward is to recompute with ``jax.checkpoint``, under any policy. Integer leaves of
    params get gradients of dtype float0, as from ``jax.grad(allow_int=True)``. The backward of a ``custom_vjp``
    must be linear in its cotangent: each part's losses have the cotangent 1, and the mean is taken of the sums of
    gradients. One that clips its cotangent meets larger numbers than under ``jax.grad`` of the mean.

    Attributes:
      kinds: stage functions by name. Each further name in use takes more time to compile.
      kind_of: the kind of each stage, in model order. The first stage is given None as x; the last need not
        return x.
      weights: ``weights(batch) -> {loss name: float32 scalar}``, a constant: how much a part of a microbatch
        counts in the mean of that loss, such as its number of valid tokens. For a name that is left out, or
        None, all parts count alike. The sum of a loss's weights over a step must not be zero: the mean would
        be 0/0, which is NaN.
      alike: for a kind that computes the same as another kind, from other leaves of "shared", the name of
        that other kind. A step does not depend on it; where single units are compiled for inspection
        (``Pipeline.units``), the units of one kind stand for those of all kinds alike.
    """

    kinds: Mapping[str, StageFunction]
    kind_of: tuple[str, ...]
    weights: Callable[[Tree], Mapping[str, jax.Array]] | None = None
    alike: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        unknown = sorted(set(self.kind_of) - set(self.kinds))
        if unknown or not self.kind_of:
            raise ValueError(
                f"StagedModel: kind_of names {list(self.kind_of)}, but the kinds are {sorted(self.kinds)}; every stage "
                "needs one of these."
            )
        if wrong := sorted(
            k for k, like in self.alike.items() if {k, like} - set(self.kinds) or like in self.alike
        ):
            raise ValueError(
                f"StagedModel: alike says {', '.join(f'{k!r}: {self.alike[k]!r}' for k in wrong)}; both must be among "
                f"the kinds, {sorted(self.kinds)}, and the second be like no other itself."
            )

    @property
    def num_stages(self) -> int:
        """The number of stages of the model, which is that of each pipe of a schedule."""
        return len(self.kind_of)


class Report(NamedTuple):
    """What a step returns besides the objective.

    Attributes:
      losses: float32 scalars by name; their sum is the objective.
      metrics: arrays by name, of at least 32 bits, summed over microbatches, stages and devices: see ``Out``.
      dropped: int32 [], the number of assignments of tokens to experts that found no slot in a plan of
        ``parallel``, over all layers, stages, microbatches and devices, whether the model reports them or
        not. Beyond 2^31 - 1 a step it wraps.
    """

    losses: dict[str, jax.Array]
    metrics: dict[str, Tree]
    dropped: jax.Array


class PipelineModel(NamedTuple):
    """The simplest model: equal stages between an embedding and a head with a loss.

    >>> import jax, jax.numpy as jnp
    >>> from dualpipe_jax import PipelineModel, sequential_loss
    >>> model = PipelineModel(
    ...     embed=lambda w, x: x * w,
    ...     stage=lambda w, x: x * w,
    ...     head_loss=lambda w, x, targets: jnp.mean((x * w - targets) ** 2),
    ... )
    >>> params = {"embed": jnp.array(1.0), "stages": jnp.array([2.0]), "head": jnp.array(3.0)}
    >>> float(jax.jit(sequential_loss(model))(params, jnp.ones((2, 4)), jnp.full((2, 4), 5.0)))
    1.0

    ``params = {"embed": ..., "stages": ..., "head": ...}``; every leaf of "stages" has a leading stage dim, in model
    order, and a function gets its own part without that dim.

    Attributes:
      embed: ``embed(params["embed"], inputs) -> x``, inputs [microbatch size, ...].
      stage: ``stage(params, x) -> x`` or ``(x, aux)``; x keeps its shape and dtype.
      head_loss: ``head_loss(params["head"], x, targets) -> scalar``, the mean over its examples. The backward
        computes its forward again, so that logits take no slots.

    ``staged`` turns this into a ``StagedModel``, whose rules for stage functions apply to these functions too.
    """

    embed: Callable[[Tree, Tree], Tree]
    stage: Callable[[Tree, Tree], Any]
    head_loss: Callable[[Tree, Tree, Tree], Any]


@typechecked
def staged(model: PipelineModel, num_stages: int, *, has_aux: bool = False) -> StagedModel:
    """Turn a ``PipelineModel`` into a ``StagedModel`` of ``num_stages`` stages.

    Its params are {"stages": ..., "shared": {"embed": ..., "head": ...}}, its batch {"inputs": ...,
    "targets": ...}. aux becomes the metric "aux", outside the objective. It has a gradient where ``jax.grad``
    differentiates a function of it through ``Pipeline.loss``, which costs a second step; a term that always
    belongs to the objective is better in ``Out.losses`` of your own ``StagedModel``.

    >>> import jax.numpy as jnp
    >>> from dualpipe_jax import PipelineModel, staged
    >>> model = PipelineModel(lambda w, x: x * w, lambda w, x: x * w, lambda w, x, y: jnp.mean((x * w - y) ** 2))
    >>> staged(model, num_stages=4).kind_of
    ('first', 'middle', 'middle', 'last')

    Raises TypeError, when a step is traced, if a stage returns a pair without ``has_aux``, or none with it.
    """
    head_loss = jax.checkpoint(model.head_loss)

    def middle(own: Tree, shared: Tree, x: Tree, at: At) -> Out:
        del shared, at
        out = model.stage(own, x)
        if has_aux and not (isinstance(out, tuple) and len(out) == 2):
            raise TypeError(
                f"has_aux=True needs a stage that returns (x, aux); it returned {jax.typeof(out)}."
            )
        forms: list[Any] = [jax.tree.structure(tree) for tree in (out, x)]
        if not has_aux and isinstance(out, tuple) and len(out) == 2 and forms[0] != forms[1]:
            raise TypeError(
                "stage returned a pair where x was expected. If it returns (x, aux), pass has_aux=True."
            )
        y, aux = out if has_aux else (out, None)
        return Out(y, metrics={} if aux is None else {"aux": aux})

    def first(own: Tree, shared: Tree, x: Tree, at: At) -> Out:
        del x
        return middle(own, shared, model.embed(shared["embed"], at.batch["inputs"]), at)

    def with_loss(out: Out, shared: Tree, at: At) -> Out:
        if "targets" not in at.batch:
            return out
        return out._replace(losses={"loss": head_loss(shared["head"], out.x, at.batch["targets"])})

    def last(own: Tree, shared: Tree, x: Tree, at: At) -> Out:
        return with_loss(middle(own, shared, x, at), shared, at)

    def only(own: Tree, shared: Tree, x: Tree, at: At) -> Out:
        return with_loss(first(own, shared, x, at), shared, at)

    if num_stages == 1:
        return StagedModel({"only": only}, ("only",))
    kinds = {"first": first, "middle": middle, "last": last}
    return StagedModel(kinds, ("first", *("middle",) * (num_stages - 2), "last"))


def checked_output(kind: str, value: Any) -> Out:
    """The value that a stage of a kind returned, checked.

    Raises TypeError, which says what is needed, for anything but an ``Out`` whose losses are floating scalars
    and whose metrics are numbers.
    """
    what = f"a stage of kind {kind!r}"
    if not isinstance(value, Out):
        raise TypeError(
            f"{what} must return a dualpipe_jax.Out: Out(x), or Out(x, losses={{'loss': ...}}, metrics={{...}}); it "
            f"returned {_kind_of_value(value)}."
        )
    for name in ("losses", "metrics"):
        if not isinstance(getattr(value, name), Mapping):
            raise TypeError(
                f"{what} must return {name} by name, such as Out(x, {name}={{'name': ...}}); Out.{name} is "
                f"{_kind_of_value(getattr(value, name))}."
            )
    for name, loss in value.losses.items():
        if not _has_dtype(loss, jnp.floating) or jnp.shape(loss) != ():
            raise TypeError(
                f"{what} must return each loss as a floating scalar, the mean over its examples; "
                f"losses[{name!r}] is {_kind_of_value(loss)}."
            )
    for name, metric in value.metrics.items():
        for leaf in jax.tree.leaves(metric):
            if not _has_dtype(leaf, jnp.number):
                raise TypeError(
                    f"{what} returned {_kind_of_value(leaf)} in metrics[{name!r}]: metrics are numbers, summed over "
                    "microbatches and stages. For how often a bool was true return it .astype(jnp.int32)."
                )
    return value


def _has_dtype(value: Any, dtypes: Any) -> bool:
    number = hasattr(value, "dtype") or isinstance(value, complex | float | int)
    return number and jnp.issubdtype(jnp.result_type(value), dtypes)


def _kind_of_value(value: Any) -> str:
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"an array {value.dtype}{list(value.shape)}"
    return f"a {type(value).__name__}"


def key_at(key: jax.Array | None, stage: Any, microbatch: Any, part: Any) -> jax.Array | None:
    """The key of a stage's work on a part of a microbatch; see ``At.key``."""
    if key is None:
        return None
    for number in (stage, microbatch, part):
        key = jax.random.fold_in(key, number)
    return key


def loss_weights(model: StagedModel, batch: Tree, names: Any) -> dict[str, jax.Array]:
    """How much a part of a microbatch counts in the mean of each loss: a float32 scalar for each of ``names``."""
    given = {} if model.weights is None else model.weights(batch)
    if not isinstance(given, Mapping):
        raise TypeError(
            f"StagedModel.weights returns {type(given).__name__}; it must return a dict of scalars by the names of "
            'losses, such as {"loss": jnp.sum(mask)}.'
        )
    if names and (unknown := sorted(set(given) - set(names))):
        raise ValueError(
            f"StagedModel.weights names {unknown}, but the losses that stages return are {sorted(names)}; each name in "
            "weights must be one of them."
        )
    if long := [name for name, weight in given.items() if jnp.shape(weight) != ()]:
        raise ValueError(
            f"StagedModel.weights gives {long[0]!r} an array of shape {jnp.shape(given[long[0]])}; each weight is a "
            "scalar of the whole part, such as its number of valid tokens, jnp.sum(mask)."
        )
    return {name: jax.lax.stop_gradient(jnp.asarray(given.get(name, 1.0), jnp.float32)) for name in names}
