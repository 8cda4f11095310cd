"""The engine's contract with a model: a few stage functions, and which stage is of which kind.

The functions are plain JAX. They know nothing of schedules, slots or ranks, and the oracle in ``reference`` calls the
same ones.
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
    """What a stage sees besides its parameters and x. It travels nowhere: every rank makes its own.

    Attributes:
      batch: this device's part of the microbatch, leaves [microbatch size / devices that share it, ...]: tokens,
        targets, positions, segment ids, whatever the batch holds.
      stage: int32 scalar, the stage's number in model order.
      microbatch: int32 scalar, the microbatch's number in the step.
      key: a typed PRNG key of (step, stage, microbatch, part of the batch) for dropout; the same in the forward, in
        what is recomputed of it and in both halves of the backward, whatever the schedule. None where the step was
        given none.
    """

    batch: Tree
    stage: jax.Array
    microbatch: jax.Array
    key: jax.Array | None


class Out(NamedTuple):
    """What a stage returns.

    Attributes:
      x: for the next stage; of the same shapes and dtypes after every stage but the last, whose x only
        ``Pipeline.apply`` gives out. Any tree: floating leaves have gradients, integers and keys are handed on.
      losses: scalars by name that join the objective; each the mean over this device's part of the microbatch. The
        objective is the sum over names and stages of their means over microbatches and parts.
      metrics: by name, outside the objective; summed over microbatches, stages and devices, integers exactly.
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

    ``params = {"stages": ..., "shared": ...}``. Every leaf of "stages" has a leading stage dim, in model order, and a
    stage gets its own part without that dim; "shared" is whatever more than one stage uses, or only one kind of stage
    has (embedding, head, dense layers): every stage gets all of it, there is one copy in params and in the optimizer,
    and its gradient is the sum over the stages that use it. A kind costs nothing for what it does not use: neither
    time nor sums.

    Inside, collectives over the axes "ep" and "dp" may be used (but no ppermute, and nothing over "pp"). What a stage
    needs recomputed in the backward it says with ``jax.checkpoint``, under any policy. Integer leaves of params get
    gradients of dtype float0, as from ``jax.grad(allow_int=True)``.

    Attributes:
      kinds: stage functions by name. Every name that is used more is more to compile.
      kind_of: the kind of each stage, in model order. The first is given x None; of the last x is not needed.
      weights: ``weights(batch) -> {loss name: float32 scalar}``: how much a part of a microbatch counts in the mean of
        that loss, such as its number of valid tokens; a constant. Names left out, and None, count every part alike.
        Their sum over a step must not be zero: a mean over nothing is NaN, as 0/0 is.
    """

    kinds: Mapping[str, StageFunction]
    kind_of: tuple[str, ...]
    weights: Callable[[Tree], Mapping[str, jax.Array]] | None = None

    def __post_init__(self):
        unknown = sorted(set(self.kind_of) - set(self.kinds))
        if unknown or not self.kind_of:
            raise ValueError(
                f"StagedModel: kind_of names {list(self.kind_of)}, but the kinds are {sorted(self.kinds)}; every stage "
                "needs one of these."
            )

    @property
    def num_stages(self) -> int:
        """Stages of the model; of each pipe of a schedule."""
        return len(self.kind_of)


class Report(NamedTuple):
    """What a step says besides the objective.

    Attributes:
      losses: float32 scalars by name; their sum is the objective.
      metrics: by name, summed over microbatches, stages and devices.
      dropped: int32 [], how many assignments of tokens to experts found no slot in a plan of ``parallel`` made by any
        stage, over all layers, stages, microbatches and devices, whether the model reports them or not.
    """

    losses: dict[str, jax.Array]
    metrics: dict[str, Tree]
    dropped: jax.Array


class PipelineModel(NamedTuple):
    """The simplest model: equal stages between an embedding and a head with a loss.

    ``params = {"embed": ..., "stages": ..., "head": ...}``; every leaf of "stages" has a leading stage dim, in model
    order, and a function gets its own part without that dim.

    Attributes:
      embed: ``embed(params["embed"], inputs) -> x``, inputs [microbatch size, ...].
      stage: ``stage(params, x) -> x`` or ``(x, aux)``; x keeps its shape and dtype.
      head_loss: ``head_loss(params["head"], x, targets) -> scalar``, the mean over its examples. Its forward is done
        again in the backward: kept, logits would wait in slots.

    Rules for the functions as in ``StagedModel``, of which this is one: see ``staged``.
    """

    embed: Callable[[Tree, Tree], Tree]
    stage: Callable[[Tree, Tree], Any]
    head_loss: Callable[[Tree, Tree, Tree], Any]


@typechecked
def staged(model: PipelineModel, num_stages: int, *, has_aux: bool = False) -> StagedModel:
    """An embedding, equal stages and a head as kinds of stages.

    Its params are {"stages": ..., "shared": {"embed": ..., "head": ...}}, its batch {"inputs": ..., "targets": ...};
    aux is the metric "aux": outside the objective, with a gradient where ``Pipeline.loss`` is differentiated by it,
    which costs a second step; what always joins the objective is better in ``Out.losses`` of your own ``StagedModel``.
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

    def ends(out: Out, shared: Tree, at: At) -> Out:
        if "targets" not in at.batch:
            return out
        return out._replace(losses={"loss": head_loss(shared["head"], out.x, at.batch["targets"])})

    def last(own: Tree, shared: Tree, x: Tree, at: At) -> Out:
        return ends(middle(own, shared, x, at), shared, at)

    def only(own: Tree, shared: Tree, x: Tree, at: At) -> Out:
        return ends(first(own, shared, x, at), shared, at)

    if num_stages == 1:
        return StagedModel({"only": only}, ("only",))
    kinds = {"first": first, "middle": middle, "last": last}
    return StagedModel(kinds, ("first", *("middle",) * (num_stages - 2), "last"))


def returned(kind: str, value: Any) -> Out:
    """What a stage of a kind returned, if it can be used.

    Raises TypeError, saying what is wanted, for anything but an ``Out`` of floating scalars as losses and of arrays
    that can be summed as metrics.
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
        if jnp.shape(loss) != () or not jnp.issubdtype(jnp.result_type(loss), jnp.floating):
            raise TypeError(
                f"{what} must return each loss as a floating scalar, the mean over its examples; "
                f"losses[{name!r}] is {_kind_of_value(loss)}."
            )
    for name, metric in value.metrics.items():
        for leaf in jax.tree.leaves(metric):
            if jnp.result_type(leaf) == jnp.bool_:
                raise TypeError(
                    f"{what} returned a bool in metrics[{name!r}]: metrics are summed over microbatches and stages. "
                    "For how often it was true return it .astype(jnp.int32)."
                )
    return value


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
    """How much a part of a microbatch counts in the mean of each loss, float32 scalars."""
    given = {} if model.weights is None else model.weights(batch)
    if names and (unknown := sorted(set(given) - set(names))):
        raise ValueError(
            f"StagedModel.weights names {unknown}, but the losses that stages return are {sorted(names)}; each name in "
            "weights must be one of them."
        )
    return {name: jax.lax.stop_gradient(jnp.asarray(given.get(name, 1.0), jnp.float32)) for name in names}
