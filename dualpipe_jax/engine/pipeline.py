"""The public class ``Pipeline``: a model, a schedule and a mesh become a step."""

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
from dualpipe_jax.engine.differentiable import differentiable, with_report_objective
from dualpipe_jax.engine.guard import Divergence, usual_divergence
from dualpipe_jax.engine.program import Outputs
from dualpipe_jax.engine.spmd import Results
from dualpipe_jax.engine.stages import broadcast, from_placed, to_placed
from dualpipe_jax.engine.state import State
from dualpipe_jax.engine.step import Step
from dualpipe_jax.engine.storage import LeafSharding
from dualpipe_jax.engine.trees import is_key
from dualpipe_jax.schedule import CostModel, Schedule
from dualpipe_jax.schedule.lowering.table import TickTable


class Applied(NamedTuple):
    """What ``Pipeline.apply`` returns.

    Attributes:
      objective: float32 scalar, the sum of the report's losses.
      report: see ``Report``.
      outputs: the output x of the last stage, [num_microbatches, microbatch size, ...], or None; see
        ``Pipeline.apply``.
    """

    objective: jax.Array
    report: Report
    outputs: Tree


@typechecked
@dataclasses.dataclass(frozen=True, eq=False)
class Pipeline:
    """A model, run in the order of a schedule on the ranks of a mesh.

    Its methods compute the same as ``jax.value_and_grad`` of the plain model (``reference_value_and_grad``),
    and are compiled at their first call. Make a Pipeline once: a new one in each iteration is compiled anew
    each time.

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

    params: {"stages", "shared"} as in ``StagedModel``. "stages" has a leading stage dim in model order, or is
      a list of one tree for each stage, or has the form that ``place`` returns. Gradients have the same form:
      float0 for integers and keys, None for other leaves that are frozen (see ``trained``).
    batch: leaves [num_microbatches, microbatch size, ...]; the microbatch size is cut over "dp" and "ep". A
      schedule with two pipes sends the first half of the microbatches into pipe 0.
    key: a typed PRNG key of the step, or None; see ``At.key``.

    Arguments:
      model: see ``StagedModel``. A ``PipelineModel`` is converted by ``staged``, which documents its params
        and batch.
      schedule: any that ``validate`` accepts and all ranks of which hold the same number of stages.
      mesh: with the axes "pp" (the schedule's ranks) and "ep", and optionally "dp" and "node"; see
        ``make_mesh``. Where "ep" is named below, "node" may be named too: experts may be sharded over both.
        Further axes are left to the compiler: shard parameters or activations over them as under ``jax.jit``.
      param_specs: PartitionSpec over "ep" of each leaf of params as a stage function sees it, without the
        stage dim. A prefix of the tree is enough; None (the default) means not sharded. The gradient of a
        leaf that is not sharded is summed over "ep".
      storage_specs: PartitionSpec of each leaf as it is stored between steps, over "dp", "ep" and, for shared
        leaves, "pp"; None: as it is used. A leaf that is stored over more axes than it is used over is
        gathered once a step, and its gradient is reduce-scattered: see ``storage``.
      compute_dtype: dtype in which floating leaves are used, a prefix of params; None keeps each leaf's own.
        They are cast once a step, before they are gathered or sent to the rank of a second pipe; the sums of
        their gradients keep the dtype that they have without it. For bfloat16 on a CPU with JAX 0.11 or later
        turn YNNPACK off, or gradients of matrices are summed in bfloat16:
        ``XLA_FLAGS=--xla_cpu_experimental_ynn_fusion_type=``, see docs/pods.md.
      frozen: whether a leaf has no gradient, a prefix of params; nothing is computed or kept for a frozen
        leaf.
      input_grads: whether gradients have an entry "batch", for the batch's floating leaves, such as the
        output of an encoder before the pipeline.
      costs: relative costs by which actions are placed on ticks; they change the speed, not the result. None:
        all actions cost the same, and a fused pair costs as much as two.
      accumulate_dtype: dtype in which gradients are summed over microbatches and devices, and returned. None:
        they are summed in the parameter's own dtype but at least float32, and rounded to the parameter's
        dtype once, at the end.
      fuse_pairs: whether an overlapped pair is one computation, in which the compiler can hide the
        all-to-alls of one direction behind the work of the other, or an F and then a B; the result is the
        same. If it is true, a full backward that is in no pair hides its all-to-alls behind its own weight
        gradients in the same way. None: true except on CPU, which overlaps nothing and would copy every slot
        pool once for each pair.
      idle_sends: whether ranks exchange even at ticks at which no rank awaits anything. None: they do, except
        on CPU, where an exchange takes time of its own. Elsewhere it runs while the rank works, and needs no
        conditional.
      wide_gradients: whether matrix products output gradients in the dtype of their sums where that is wider,
        instead of rounding them to the parameter's dtype; on GPU they then add to the sum in the same kernel.
        None: they do, except on CPU, where such products are slow and may wait for each other's threads for
        ever (YNNPACK's; see docs/pods.md).
      divergence: how ranks run different units in one tick. "loop": each unit is a loop of zero or one trips.
        "switch": all units are branches of one conditional. On GPU it costs a single round trip to the host,
        where each loop costs one, but before JAX 0.11 all slot pools and sums are copied there at every tick.
        "none": every rank runs each unit that some rank has in that tick, and masks the results; for machines
        on which all devices must run the same operations. The results of all three are equal. Gradients can be
        differentiated once more: by ``jax.jvp`` with all three, by ``jax.grad`` with "switch" alone, since JAX
        reverses no loop whose number of trips is not known. None: "switch" on GPUs with JAX 0.11 or later, else
        "loop".
      check_vma: whether ``shard_map`` checks over which axes values vary.
      debug_nans: whether to raise FloatingPointError when a loss or a gradient is not finite; it names the
        microbatch and the stage where that began.

    Raises ValueError, which lists all that is wrong, for a mesh or arguments that do not fit.
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
        checks.check_dtypes(compute_dtype=self.compute_dtype, accumulate_dtype=self.accumulate_dtype)
        checks.check_frozen(self.frozen)
        for name in ("param_specs", "storage_specs", "compute_dtype", "frozen"):
            given = getattr(self, name)
            # A single dtype is that of all leaves.
            if given is not None and (name != "compute_dtype" or isinstance(given, dict)):
                checks.check_prefix_keys(name, given)

    @functools.cached_property
    def value_and_grad(self) -> Callable[..., tuple[tuple[jax.Array, Report], Tree]]:
        """``value_and_grad(params, batch, key=None) -> ((objective, Report), grads)``, compiled."""
        return jax.jit(self._step)

    @functools.cached_property
    def apply(self) -> Callable[..., Applied]:
        """``apply(params, batch, key=None, outputs="none") -> Applied``, compiled: forward only.

        It keeps no residuals and computes no gradients. The batch may lack targets if no stage reads them.

        outputs: what to return of the last stage's x, [num_microbatches, microbatch size, ...]: "none";
          "everywhere", sent to all ranks; or "last_rank", left on its rank, with a further leading dim of
          ranks. In that dim only the entries of ranks with a last stage have meaning. DualPipe has two such
          ranks: rank 0 has the second half of the microbatches.
        """
        return jax.jit(self._apply, static_argnames="outputs")

    @functools.cached_property
    def loss(self) -> Callable[..., tuple[jax.Array, Report]]:
        """``loss(params, batch, key=None) -> (objective, Report)``, for ``jax.grad``, also as a term of a larger loss.

        Without differentiation it runs forward only. Under differentiation its forward runs the whole
        pipelined step and keeps the gradients, which the backward scales. The report's losses and floating
        metrics are differentiable too; where they have a cotangent, the backward runs a second step for them.

        params are differentiable, and with ``input_grads`` so are the batch's floating leaves; without it,
        differentiating by the batch raises ValueError.
        """
        return differentiable(
            self._apply, self._step, self._gradients_by_report, input_grads=self.input_grads
        )

    def units(self, ops: Collection[str] = ("FB",), *, every_kind: bool = False) -> Callable[..., Any]:
        """``value_and_grad`` with only some of its units in it, to be compiled and inspected, not to be run.

        Each unit is there once, exactly as in the whole step: inside its guard, with the same slot pools, and
        with the sends of every tick. The default is one overlapped pair, F of one microbatch and B of
        another: a step spends most of its time on such pairs, and one pair compiles in a fraction of the time
        of a step. In compiled programs the units are found by the scopes "pair/KIND-KIND", "forward/KIND",
        "backward/KIND", "backward_input/KIND" and "backward_weight/KIND".

        Lower and compile it for arrays or for ShapeDtypeStructs with shardings:
        ``pipeline.units().lower(params, batch).compile()``.

        Arguments:
          ops: some of "FB", "F", "B", "I", "W"; see ``units_alone``.
          every_kind: whether each op is there for every kind of stage, not only for the most frequent one.
            Kinds that are alike (``StagedModel.alike``) count as one.

        Raises ValueError for ops that the schedule runs nowhere.
        """
        return jax.jit(functools.partial(self._step, units=tuple(ops), every_kind=every_kind))

    def state(self, params: Tree, batch: Tree, key: jax.Array | None = None) -> State:
        """The engine's state on one device while a step runs, as ShapeDtypeStructs; computes and compiles nothing.

        Its arguments are those of ``value_and_grad``, or their ShapeDtypeStructs.
        """
        return self.sketch(params, batch, key).state

    @functools.cached_property
    def rehearse(self) -> Callable[..., tuple[jax.Array, Tree, State]]:
        """``rehearse(params, batch, state, ticks, times) -> (objective, gradients, state)``, compiled.

        It runs the given ticks in place of the schedule's. It measures the time of single units, each exactly
        as in the whole step: it continues from a state in which earlier ticks have filled the slots that the
        units read. Gradients are those of placed leaves, in lists.

        state: arrays of the types of ``state_everywhere``, or the state that the last call returned; it is
          donated.
        ticks: int32 [ticks, ranks, columns], as ``table.array`` is; see ``unit_everywhere``.
        times: int32 [ticks], how often each tick is run before the next.
        """

        def rehearse(params: Tree, batch: Tree, *more: Any) -> tuple[jax.Array, Tree, State]:
            placed = self.placed(params)
            return spmd.rehearse(self._make_step(placed), placed, batch, *more)

        return jax.jit(rehearse, donate_argnums=2)

    def state_everywhere(self, params: Tree, batch: Tree) -> State:
        """``state`` of all devices, as ShapeDtypeStructs with shardings: each leaf has a leading dim of devices."""
        axes = self._make_step(jax.eval_shape(self.placed, params)).axes
        devices = math.prod(self.mesh.shape[axis] for axis in axes)
        sharding = NamedSharding(self.mesh, PartitionSpec(axes))

        def everywhere(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((devices, *leaf.shape), leaf.dtype, sharding=sharding)

        return jax.tree.map(everywhere, self.state(params, batch))

    def table(self, params: Tree, batch: Tree, key: jax.Array | None = None) -> TickTable:
        """The lowered schedule as ``value_and_grad`` of these arguments runs it; nothing is computed or compiled."""
        return self.sketch(params, batch, key).table

    def sketch(self, params: Tree, batch: Tree, key: jax.Array | None = None) -> spmd.Sketch:
        """``state``, ``table`` and the FLOPs of each unit, from one trace: tracing takes seconds if stages are deep."""
        placed = jax.eval_shape(self.placed, params)
        return spmd.sketch(self._make_step(placed), placed, batch, key)

    # ------------------------------------------------------------------- placing

    def shardings(self, params: Tree) -> Tree:
        """A NamedSharding for every leaf of the result of ``place``; ``params`` may be ShapeDtypeStructs.

        Use it in ``jax.jit(init, out_shardings=...)``, which makes every array on the devices where it belongs.
        """
        placed = jax.eval_shape(self.placed, params)
        specs = self._make_step(placed).param_specs(len(placed["stages"].local))
        return jax.tree.map(lambda _, spec: NamedSharding(self.mesh, spec), placed, specs)

    def placed(self, params: Tree) -> Tree:
        """Params in the form of ``place``, for use inside ``jax.jit`` with ``shardings`` as its ``out_shardings``."""
        checks.check_param_keys(params)
        return params | {"stages": to_placed(params["stages"], self.schedule.placement)}

    def place(self, params: Tree) -> Tree:
        """Put params on the devices where a step needs them, stages on their ranks: once, before a training loop.

        They may be on any devices: arrays on other devices than the mesh's are copied through the host.

        >>> import jax.numpy as jnp
        >>> from dualpipe_jax import Out, Pipeline, StagedModel, make_mesh
        >>> from dualpipe_jax.schedule import one_f_one_b
        >>> model = StagedModel({"all": lambda own, shared, x, at: Out(at.batch * own)}, ("all", "all"))
        >>> pipeline = Pipeline(model, one_f_one_b(2, 4), make_mesh(pp=2))
        >>> placed = pipeline.place({"stages": jnp.array([1.0, 2.0]), "shared": {}})  # one stage on each device
        >>> pipeline.unplace(placed)["stages"].tolist()
        [1.0, 2.0]
        """
        # JAX finds the compiled program of an earlier call by the function: a new one would be compiled anew.
        place = jax.jit(self._placed, out_shardings=self.shardings(params))
        return place(jax.tree.map(self._reachable, params))

    def unplace(self, params: Tree) -> Tree:
        """The inverse of ``place``, for gradients too: leaves [num_stages, ...] in model order.

        Raises ValueError for params that were not placed, or were placed for another schedule.
        """
        return self._unplace(params)

    # ------------------------------------------------------------- what is trained

    def trained(self, tree: Tree) -> Tree:
        """Params, or gradients of them, with None for every leaf that is frozen or not floating.

        Optimizers of optax map over params and gradients together and need the same tree for both, without
        gradients that are None or float0. Use them so::

            optimizer_state = optimizer.init(pipeline.trained(params))
            _, gradients = pipeline.value_and_grad(params, batch)
            updates, optimizer_state = optimizer.update(
                pipeline.trained(gradients), optimizer_state, pipeline.trained(params)
            )
            params = pipeline.with_trained(params, optax.apply_updates(pipeline.trained(params), updates))
        """
        return forms.trained(tree, self.frozen, self.schedule.placement.num_model_stages)

    def with_trained(self, params: Tree, trained: Tree) -> Tree:
        """Params with the leaves of ``trained`` in place of their own where those are not None.

        It is the inverse of the method ``trained``.
        """
        return forms.with_trained(params, trained)

    @property
    def placing_costs(self) -> CostModel:
        """The costs by which actions are placed on ticks."""
        if self.costs is not None:
            return self.costs
        return CostModel(FB=2.0) if self._fuses else CostModel()

    # ------------------------------------------------------------------ internals

    @functools.cached_property
    def _placed(self) -> Callable[[Tree], Tree]:
        return self.placed

    @functools.cached_property
    def _unplace(self) -> Callable[[Tree], Tree]:
        placement = self.schedule.placement
        return jax.jit(lambda params: params | {"stages": from_placed(params["stages"], placement)})

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
        """The leaf, copied to the host if it lies on devices from which a program of this mesh cannot take it."""
        if not isinstance(leaf, jax.Array) or isinstance(leaf, jax.core.Tracer) or not leaf.committed:
            return leaf
        devices = [*self.mesh.devices.flat]
        # In another order they are other devices to a program.
        in_order = [*leaf.sharding.devices_indices_map(leaf.shape)] == devices
        if leaf.sharding.device_set == set(devices) and (in_order or not leaf.is_fully_addressable):
            return leaf
        if is_key(leaf):
            data = jax.device_get(jax.random.key_data(leaf))
            return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
        return jax.device_get(leaf)

    @property
    def _fuses(self) -> bool:
        return not self._on_cpu if self.fuse_pairs is None else self.fuse_pairs

    def _make_step(self, params: Tree, units: tuple[str, ...] = (), every_kind: bool = False) -> Step:
        """The step for placed params of these shapes."""
        one = {"stages": params["stages"].local[0], "shared": params["shared"]}

        def per_leaf(name: str, default: Any) -> Tree:
            given = getattr(self, name)
            # None, or a single dtype, is that of all leaves.
            given = given if isinstance(given, dict) else dict.fromkeys(one, given)
            return {part: broadcast(given.get(part), one[part], default, name) for part in one}

        used = per_leaf("param_specs", PartitionSpec())
        stored = per_leaf("storage_specs", _AS_USED)
        # A dtype is a leaf for tree.map, but None is not.
        dtypes = per_leaf("compute_dtype", _OWN)

        def leaf(use: PartitionSpec, store: Any, dtype: Any) -> LeafSharding:
            return LeafSharding(use, use if store is _AS_USED else store, None if dtype is _OWN else dtype)

        shardings = jax.tree.map(leaf, used, stored, dtypes)
        checks.check_shardings(self.mesh, one, shardings)
        return Step(
            model=self._model,
            schedule=self.schedule,
            mesh=self.mesh,
            shardings=shardings,
            frozen=per_leaf("frozen", False),
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
        results = spmd.value_and_grad(self._make_step(placed, units, every_kind), placed, batch, key)
        self._raise_if_bad(results)
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
        results = spmd.forward(self._make_step(placed), placed, batch, key, outputs)
        self._raise_if_bad(results)
        return Applied(results.objective, results.report, results.outputs)

    def _gradients_by_report(
        self, params: Tree, batch: Tree, key: jax.Array | None, cotangents: Report
    ) -> Tree:
        """The gradients of <cotangents, report>: a step of the same stages with another objective.

        The cotangents are frozen shared parameters of that step.
        """
        parts = self.schedule.num_microbatches * self._make_step(self.placed(params)).num_parts

        def wrapped(prefix: Tree, value: Any) -> Tree:
            given = {} if prefix is None else prefix
            return {**given, "shared": {"given": given.get("shared"), "cotangents": value}}

        changes = {name: wrapped(getattr(self, name), None) for name in ("param_specs", "storage_specs")}
        if self.compute_dtype is not None:
            given = self.compute_dtype
            by_part = given if isinstance(given, dict) else {"stages": given, "shared": given}
            changes["compute_dtype"] = wrapped(by_part, None)  # cotangents keep their own
        model = with_report_objective(self._model, cotangents, parts)
        other = dataclasses.replace(self, model=model, frozen=wrapped(self.frozen, True), **changes)
        shared = {"given": params["shared"], "cotangents": (cotangents.losses, cotangents.metrics)}
        _, gradients = other._step(params | {"shared": shared}, batch, key)
        return gradients | {"shared": gradients["shared"]["given"]}

    def _raise_if_bad(self, results: Results) -> None:
        if results.first_bad is not None:
            # Sharded, it would be moved to the callback's device, with a warning of XLA.
            everywhere = NamedSharding(self.mesh, PartitionSpec())
            first_bad = jax.lax.with_sharding_constraint(results.first_bad, everywhere)
            nans.raise_if_bad(results.objective, first_bad, self.schedule)


_AS_USED = "as used"
_OWN = "own"
