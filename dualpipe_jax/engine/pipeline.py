"""What users call: a model, a schedule and a mesh become a step."""

import dataclasses
import functools
import math
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from dualpipe_jax.arguments import typechecked
from dualpipe_jax.contract import PipelineModel, Report, StagedModel, Tree, staged
from dualpipe_jax.engine import checks, forms, nans, spmd
from dualpipe_jax.engine.differentiable import differentiable, for_figures
from dualpipe_jax.engine.guard import Divergence, usual_divergence
from dualpipe_jax.engine.program import Outputs
from dualpipe_jax.engine.spmd import Results
from dualpipe_jax.engine.stages import broadcast, from_placed, to_placed
from dualpipe_jax.engine.state import State
from dualpipe_jax.engine.step import Step
from dualpipe_jax.engine.storage import Leaf
from dualpipe_jax.engine.trees import is_key
from dualpipe_jax.schedule import CostModel, Schedule
from dualpipe_jax.schedule.lowering.table import TickTable


class Applied(NamedTuple):
    """What ``Pipeline.apply`` returns.

    Attributes:
      objective: float32 scalar, the sum of the report's losses.
      report: see ``Report``.
      outputs: the x of the last stage, [num_microbatches, microbatch size, ...], or None; see ``Pipeline.apply``.
    """

    objective: jax.Array
    report: Report
    outputs: Tree


@typechecked
@dataclasses.dataclass(frozen=True, eq=False)
class Pipeline:
    """A model, run in the order of a schedule on the ranks of a mesh.

    Its methods compute what ``jax.value_and_grad`` of the plain model does (``reference_value_and_grad``), and are
    compiled at their first call. Make a Pipeline once: a new one in each iteration is compiled anew each time.

    >>> import jax.numpy as jnp
    >>> from dualpipe_jax import Out, Pipeline, StagedModel, make_mesh
    >>> from dualpipe_jax.schedule import one_f_one_b
    >>> def stage(own, shared, x, at):
    ...     y = at.batch["x"] @ own
    ...     return Out(y, losses={"error": jnp.mean((y - shared) ** 2)})
    ...
    >>> pipeline = Pipeline(StagedModel({"only": stage}, ("only",)), one_f_one_b(1, 2), make_mesh(1))
    >>> params = {"stages": jnp.ones((1, 2, 2)), "shared": jnp.ones(2)}
    >>> (loss, report), grads = pipeline.value_and_grad(params, {"x": jnp.ones((2, 4, 2))})
    >>> float(loss), grads["stages"].tolist()
    (1.0, [[[1.0, 1.0], [1.0, 1.0]]])

    params: {"stages", "shared"} as in ``StagedModel``; "stages" with a leading stage dim in model order, a list of one
      tree for each stage, or as ``place`` gives it. Gradients have the same form: float0 for integers and keys, None
      for other leaves that are frozen (see ``trained``).
    batch: leaves [num_microbatches, microbatch size, ...]; the microbatch size is cut over "dp" and "ep". A schedule
      with two pipes sends the first half of the microbatches into pipe 0.
    key: a typed PRNG key of the step, or None; see ``At.key``.

    Arguments:
      model: see ``StagedModel``; a ``PipelineModel`` becomes one by ``staged``, which says what params and batch are.
      schedule: any that ``validate`` accepts and whose ranks hold equally many stages.
      mesh: with the axes "pp" (the schedule's ranks) and "ep", and "dp" and "node" if wanted; see ``make_mesh``. What
        is said of "ep" below is said of "node", too: experts may lie over both. Further axes are left to the compiler:
        shard parameters or activations over them as under ``jax.jit``.
      param_specs: PartitionSpec over "ep" of each leaf of params as a stage's function sees it, without the stage dim;
        a prefix of the tree will do, None (the default) means whole. The gradient of a leaf that is whole on every
        device is summed over "ep".
      storage_specs: PartitionSpec of each leaf as it is stored between steps, over "dp", "ep" and, of shared leaves,
        "pp"; None: as it is used. What is stored cut further than it is used is gathered once a step, and its gradient
        comes back reduce-scattered: see ``storage``.
      compute_dtype: dtype in which floating leaves are used, a prefix of params; None keeps each leaf's own. They are
        cast once a step, before they are gathered or sent to the rank of a second pipe; sums of their gradients are not
        narrower for it. For bfloat16 on a CPU with JAX 0.11 or later turn YNNPACK off, or gradients of matrices are
        summed in bfloat16: ``XLA_FLAGS=--xla_cpu_experimental_ynn_fusion_type=``, see docs/pods.md.
      frozen: whether a leaf has no gradient, a prefix of params; nothing is computed or kept for it.
      input_grads: whether gradients have an entry "batch", for the batch's floating leaves (an encoder in front).
      costs: relative costs by which actions are placed on ticks; changes the speed, not the result. None: equal ones,
        and a pair that is fused takes as long as two actions.
      accumulate_dtype: dtype in which gradients are summed over microbatches and devices, and returned. None: summed in
        the parameter's own dtype but float32 at least, and rounded to the parameter's once, at the end.
      fuse_pairs: run an overlapped pair as one computation, in which the compiler can hide the all-to-alls of
        one direction behind the other's work, or as F and B after each other, with the same result. So it is with a
        backward that is in no pair, and with its own work. None: fuse except on CPU, which overlaps nothing and would
        copy every slot pool once a pair.
      idle_sends: whether ranks exchange even at ticks at which no rank awaits anything. None: they do, except on CPU,
        where an exchange takes time of its own. Elsewhere it runs while the rank works, and needs no conditional.
      wide_gradients: whether matrix products make gradients in the dtype of their sums where that is wider, not rounded
        to the parameter's; on GPU they then add to the sum at once. None: they do, except on CPU, where such products
        are slow and may wait for each other's threads for ever (YNNPACK's; see docs/how_it_works.md).
      divergence: how ranks part ways in a tick: "loop", each unit a loop of zero or one trips; "switch", one
        conditional: a single round trip to the host on GPU, where each loop is one, but before JAX 0.11 all slot pools
        and sums are copied at every tick there; "none", every rank runs each unit that some rank has in that tick,
        results masked, for machines on which groups of devices may not part ways. The results are equal. None: "switch"
        on GPUs with JAX 0.11 or later, else "loop".
      check_vma: let ``shard_map`` check over which axes values vary.
      debug_nans: raise when a loss or a gradient is not finite, naming the microbatch and stage where that began.

    Raises ValueError, with all that is wrong at once, for a mesh or arguments that do not fit.
    """

    model: StagedModel | PipelineModel
    schedule: Schedule
    mesh: Mesh | AbstractMesh
    param_specs: Tree = None
    storage_specs: Tree = None
    compute_dtype: Tree = None
    frozen: Tree = None
    input_grads: bool = False
    costs: CostModel | None = None
    accumulate_dtype: Any = None
    fuse_pairs: bool | None = None
    idle_sends: bool | None = None
    wide_gradients: bool | None = None
    divergence: Divergence | None = None
    check_vma: bool = False
    debug_nans: bool = False

    def __post_init__(self):
        checks.check_mesh(self.schedule, self.mesh)
        checks.check_model(self._model, self.schedule)
        if self.divergence is not None:
            checks.check_choice("divergence", self.divergence, Divergence)
        checks.check_dtypes(compute_dtype=self.compute_dtype, accumulate_dtype=self.accumulate_dtype)
        checks.check_frozen(self.frozen)

    @functools.cached_property
    def value_and_grad(self) -> Callable[..., tuple[tuple[jax.Array, Report], Tree]]:
        """``value_and_grad(params, batch, key=None) -> ((objective, Report), grads)``, compiled."""
        return jax.jit(self._step)

    @functools.cached_property
    def apply(self) -> Callable[..., Applied]:
        """``apply(params, batch, key=None, outputs="none") -> Applied``, compiled: forward only.

        Keeps no residuals and computes no gradients. A batch without targets will do if no stage asks for them.

        outputs: the x of the last stage, [num_microbatches, microbatch size, ...]: "none"; "everywhere", sent to all
          ranks; or "last_rank", left where it is, behind a leading dim of ranks of which only the entry of a last
          stage's rank has meaning (DualPipe has two: rank 0 for the second half of the microbatches).
        """
        return jax.jit(self._apply, static_argnames="outputs")

    @functools.cached_property
    def loss(self) -> Callable[..., tuple[jax.Array, Report]]:
        """``loss(params, batch, key=None) -> (objective, Report)``, for ``jax.grad``, also as a term of a larger loss.

        Not differentiated it runs forward only; differentiated, its forward does the whole pipelined step and keeps the
        gradients, which the backward scales. The report's losses and floating metrics are differentiable too; where
        they have a cotangent the backward runs a second step for them.

        params are differentiable, and with ``input_grads`` the batch's floating leaves; else differentiating by the
        batch raises ValueError.
        """
        return differentiable(self._apply, self._step, self._by_report, input_grads=self.input_grads)

    def units(self, ops: Collection[str] = ("FB",), *, every_kind: bool = False) -> Callable[..., Any]:
        """``value_and_grad`` with only some of its units in it, to be compiled and inspected, not to be run.

        Each unit is there once, exactly as in the whole step: behind its guard, with the same slot pools, and with
        the sends of every tick. By default that is one overlapped pair, F of one microbatch and B of another: what a
        step spends most of its time on, in a fraction of the time that a step takes to compile. In compiled programs
        the units are found by the scopes "pair/KIND-KIND", "forward/KIND", "backward/KIND", "backward_input/KIND" and
        "backward_weight/KIND".

        Lower and compile it, of arrays or of ShapeDtypeStructs with shardings:
        ``pipeline.units().lower(params, batch).compile()``.

        Arguments:
          ops: of "FB", "F", "B", "I", "W"; see ``units_alone``.
          every_kind: each op for every kind of stage, not only for the most frequent one; of kinds that are alike
            (``StagedModel.alike``) for one.

        Raises ValueError for ops that the schedule runs nowhere.
        """
        return jax.jit(functools.partial(self._step, units=tuple(ops), every_kind=every_kind))

    def state(self, params: Tree, batch: Tree, key: jax.Array | None = None) -> State:
        """What the engine keeps on each device while a step runs, as shapes; nothing is computed or compiled.

        Its arguments are those of ``value_and_grad``, or their ShapeDtypeStructs. It returns the ShapeDtypeStructs of
        one device.
        """
        return self.sketch(params, batch, key).state

    @functools.cached_property
    def rehearse(self) -> Callable[..., tuple[jax.Array, Tree, State]]:
        """``rehearse(params, batch, state, ticks, times) -> (objective, gradients, state)``, compiled, of other ticks.

        For measuring what single units take, each exactly as in the whole step: it goes on from a state, in whose
        slots earlier ticks left what units read. Gradients are those of placed leaves, in lists.

        state: arrays of the types of ``state_everywhere``, or what the last call returned; it is donated.
        ticks: int32 [ticks, ranks, columns], as ``table.array`` is; see ``unit_everywhere``.
        times: int32 [ticks], how often each is run before the next.
        """

        def rehearse(params: Tree, batch: Tree, *more: Any) -> tuple[jax.Array, Tree, State]:
            placed = self.placed(params)
            return spmd.rehearse(self._bound(placed), placed, batch, *more)

        return jax.jit(rehearse, donate_argnums=2)

    def state_everywhere(self, params: Tree, batch: Tree) -> State:
        """``state`` of all devices, as ShapeDtypeStructs with shardings: each leaf has a leading dim, the devices."""
        axes = self._bound(jax.eval_shape(self.placed, params)).axes
        devices = math.prod(self.mesh.shape[axis] for axis in axes)
        lies = NamedSharding(self.mesh, PartitionSpec(axes))

        def everywhere(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((devices, *leaf.shape), leaf.dtype, sharding=lies)

        return jax.tree.map(everywhere, self.state(params, batch))

    def table(self, params: Tree, batch: Tree, key: jax.Array | None = None) -> TickTable:
        """The lowered schedule as ``value_and_grad`` of these arguments runs it; nothing is computed or compiled."""
        return self.sketch(params, batch, key).table

    def sketch(self, params: Tree, batch: Tree, key: jax.Array | None = None) -> spmd.Sketch:
        """``state``, ``table`` and the FLOPs of each unit, of one trace: that takes seconds where stages are deep."""
        placed = jax.eval_shape(self.placed, params)
        return spmd.sketch(self._bound(placed), placed, batch, key)

    # ------------------------------------------------------------------- placing

    def shardings(self, params: Tree) -> Tree:
        """A NamedSharding for every leaf of ``place``'s result; ``params`` may be ShapeDtypeStructs.

        For ``jax.jit(init, out_shardings=...)``, which makes every array where it belongs.
        """
        placed = jax.eval_shape(self.placed, params)
        specs = self._bound(placed).param_specs(len(placed["stages"].local))
        return jax.tree.map(lambda _, spec: NamedSharding(self.mesh, spec), placed, specs)

    def placed(self, params: Tree) -> Tree:
        """Params in the form of ``place``, for use inside ``jax.jit`` with ``shardings`` as its ``out_shardings``."""
        checks.check_parts(params)
        return params | {"stages": to_placed(params["stages"], self.schedule.placement)}

    def place(self, params: Tree) -> Tree:
        """Put params where a step wants them, stages on their ranks: once, before a training loop.

        They may be on any devices: what is on other devices than the mesh's is copied by way of the host.

        >>> import jax.numpy as jnp
        >>> from dualpipe_jax import Out, Pipeline, StagedModel, make_mesh
        >>> from dualpipe_jax.schedule import one_f_one_b
        >>> model = StagedModel({"all": lambda own, shared, x, at: Out(at.batch * own)}, ("all", "all"))
        >>> pipeline = Pipeline(model, one_f_one_b(2, 4), make_mesh(pp=2))
        >>> placed = pipeline.place({"stages": jnp.array([1.0, 2.0]), "shared": {}})  # one stage on each device
        >>> pipeline.unplace(placed)["stages"].tolist()
        [1.0, 2.0]
        """
        return jax.jit(self.placed, out_shardings=self.shardings(params))(
            jax.tree.map(self._reachable, params)
        )

    def unplace(self, params: Tree) -> Tree:
        """The inverse of ``place``, for gradients too: leaves [num_stages, ...] in model order.

        Raises ValueError for what was not placed, or for another schedule.
        """
        placement = self.schedule.placement
        return jax.jit(lambda p: p | {"stages": from_placed(p["stages"], placement)})(params)

    # ------------------------------------------------------------- what is trained

    def trained(self, tree: Tree) -> Tree:
        """Params, or gradients of them, with None for every leaf that is frozen or not floating.

        Optimizers of optax map over leaves and want one form of both; a gradient of None, or float0, is not one::

            optimizer_state = optimizer.init(pipeline.trained(params))
            _, gradients = pipeline.value_and_grad(params, batch)
            updates, optimizer_state = optimizer.update(
                pipeline.trained(gradients), optimizer_state, pipeline.trained(params)
            )
            params = pipeline.with_trained(params, optax.apply_updates(pipeline.trained(params), updates))
        """
        return forms.trained(tree, self.frozen, self.schedule.placement.num_model_stages)

    def with_trained(self, params: Tree, trained: Tree) -> Tree:
        """Params with the leaves of ``trained`` where it has any: the inverse of ``trained``."""
        return forms.with_trained(params, trained)

    @property
    def placing_costs(self) -> CostModel:
        """The costs by which actions are placed on ticks."""
        if self.costs is not None:
            return self.costs
        return CostModel(FB=2.0) if self._fuses else CostModel()

    # ------------------------------------------------------------------ internals

    @functools.cached_property
    def _model(self) -> StagedModel:
        if isinstance(self.model, StagedModel):
            return self.model
        return staged(self.model, self.schedule.placement.num_model_stages)

    @property
    def _platform(self) -> str | None:
        return self.mesh.devices.flat[0].platform if isinstance(self.mesh, Mesh) else None

    @property
    def _on_cpu(self) -> bool:
        return self._platform == "cpu"

    def _reachable(self, leaf: Any) -> Any:
        """The leaf where a program of this mesh takes it."""
        if not isinstance(leaf, jax.Array) or isinstance(leaf, jax.core.Tracer) or not leaf.committed:
            return leaf
        if leaf.sharding.device_set == set(self.mesh.devices.flat):
            return leaf
        if is_key(leaf):
            data = jax.device_get(jax.random.key_data(leaf))
            return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
        return jax.device_get(leaf)

    @property
    def _fuses(self) -> bool:
        return not self._on_cpu if self.fuse_pairs is None else self.fuse_pairs

    def _bound(self, params: Tree, units: tuple[str, ...] = (), every_kind: bool = False) -> Step:
        """The step for placed params of these shapes."""
        one = {"stages": params["stages"].local[0], "shared": params["shared"]}

        def every(name: str, default: Any) -> Tree:
            given = getattr(self, name)
            given = {} if given is None else given
            checks.check_keys(name, given)
            return {part: broadcast(given.get(part), one[part], default, name) for part in one}

        used = every("param_specs", PartitionSpec())
        stored = every("storage_specs", _AS_USED)
        # A dtype is a leaf for tree.map, but None is not.
        dtypes = every("compute_dtype", _OWN) if isinstance(self.compute_dtype, dict) else None

        def leaf(use: PartitionSpec, store: Any, dtype: Any) -> Leaf:
            return Leaf(use, use if store is _AS_USED else store, None if dtype is _OWN else dtype)

        single = _OWN if self.compute_dtype is None else self.compute_dtype
        dtypes = jax.tree.map(lambda _: single, used) if dtypes is None else dtypes
        layout = jax.tree.map(leaf, used, stored, dtypes)
        checks.check_layout(self.mesh, one, layout)
        return Step(
            model=self._model,
            schedule=self.schedule,
            mesh=self.mesh,
            layout=layout,
            frozen=every("frozen", False),
            costs=self.placing_costs,
            accumulate_dtype=self.accumulate_dtype,
            fuse_pairs=self._fuses,
            idle_sends=not self._on_cpu if self.idle_sends is None else self.idle_sends,
            wide_gradients=not self._on_cpu if self.wide_gradients is None else self.wide_gradients,
            divergence=self.divergence or usual_divergence(self._platform),
            input_grads=self.input_grads,
            check_vma=self.check_vma,
            debug_nans=self.debug_nans,
            units=units,
            every_kind=every_kind,
        )

    def _step(
        self,
        params: Tree,
        batch: Tree,
        key: jax.Array | None = None,
        *,
        units: tuple[str, ...] = (),
        every_kind: bool = False,
    ) -> tuple[tuple[jax.Array, Report], Tree]:
        checks.check_arguments(self.schedule, self.mesh, params, batch, key)
        placed = self.placed(params)
        results = spmd.value_and_grad(self._bound(placed, units, every_kind), placed, batch, key)
        self._watch(results)
        gradients = forms.gradients_like(params, placed, results.gradients, self.schedule)
        if self.input_grads:
            gradients |= {"batch": forms.as_tree(batch, results.gradients["batch"])}
        return (results.objective, results.report), gradients

    def _apply(
        self, params: Tree, batch: Tree, key: jax.Array | None = None, outputs: Outputs = "none"
    ) -> Applied:
        checks.check_arguments(self.schedule, self.mesh, params, batch, key)
        checks.check_choice("outputs", outputs, Outputs)
        placed = self.placed(params)
        results = spmd.forward(self._bound(placed), placed, batch, key, outputs)
        self._watch(results)
        return Applied(results.objective, results.report, results.outputs)

    def _by_report(self, params: Tree, batch: Tree, key: jax.Array | None, cotangents: Report) -> Tree:
        """The gradients of <cotangents, report>: a step of the same stages with another objective.

        The cotangents are shared parameters, frozen.
        """
        parts = self.schedule.num_microbatches * self._bound(self.placed(params)).num_parts

        def wrapped(prefix: Tree, value: Any) -> Tree:
            given = {} if prefix is None else prefix
            return {**given, "shared": {"given": given.get("shared"), "cotangents": value}}

        changes = {name: wrapped(getattr(self, name), None) for name in ("param_specs", "storage_specs")}
        if isinstance(self.compute_dtype, dict):
            changes["compute_dtype"] = wrapped(self.compute_dtype, None)
        model = for_figures(self._model, cotangents, parts)
        other = dataclasses.replace(self, model=model, frozen=wrapped(self.frozen, True), **changes)
        shared = {"given": params["shared"], "cotangents": (cotangents.losses, cotangents.metrics)}
        _, gradients = other._step(params | {"shared": shared}, batch, key)
        return gradients | {"shared": gradients["shared"]["given"]}

    def _watch(self, results: Results) -> None:
        if results.first_bad is not None:
            # Left in parts, it is brought to the callback's device with a warning of XLA's.
            everywhere = NamedSharding(self.mesh, PartitionSpec())
            first_bad = jax.lax.with_sharding_constraint(results.first_bad, everywhere)
            nans.raise_first(results.objective, first_bad, self.schedule)


_AS_USED = "as used"
_OWN = "own"
