"""JAX's side: the blocks as functions, the plain step, GPipe by autodiff, and this project's engine."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.sides.case import Case, Weights
from dualpipe_jax import Out, Pipeline, StagedModel, make_mesh
from dualpipe_jax.schedule import Schedule, gpipe, one_f_one_b, validate
from dualpipe_jax.schedule.formats.torch_csv import from_torch_csv

Named = dict[str, np.ndarray]
Program = tuple[Callable[[], float], Callable[[], Named]]


def norm(x, scale):
    return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale


def mixture(case: Case, p, x):
    """Experts' outputs for x [tokens, width], combined."""
    gates, chosen = lax.top_k(jax.nn.softmax(x @ p["router"], -1), case.top)
    one_hot = jax.nn.one_hot(chosen.reshape(-1), case.experts, dtype=x.dtype)
    place = jnp.sum((jnp.cumsum(one_hot, 0) - 1) * one_hot, -1)  # [tokens * top], in the expert's queue
    # All zeros where the expert has no place left.
    seats = jax.nn.one_hot(place.astype(int), case.capacity, dtype=x.dtype)
    seated = (one_hot[:, :, None] * seats[:, None]).reshape(-1, case.top, case.experts * case.capacity)
    dispatch = jnp.sum(seated, 1)
    combine = jnp.einsum("tk,tks->ts", gates, seated)
    queues = (dispatch.T @ x).reshape(case.experts, case.capacity, -1)
    outputs = jax.nn.silu(queues @ p["up"]) @ p["down"]
    return combine @ outputs.reshape(case.experts * case.capacity, -1)


def layer(case: Case, p, x):
    """One block; x [size, sequence, width]."""
    h = norm(x, p["norm"])
    if case.block == "mlp":
        return x + jax.nn.silu(h @ p["up"]) @ p["down"]
    return x + mixture(case, p, h.reshape(-1, case.width)).reshape(x.shape)


def layers(case: Case, params, x):
    """All layers of ``params``, whose leaves are [layers, ...]."""
    for number in range(len(params["norm"])):
        x = layer(case, {name: leaf[number] for name, leaf in params.items()}, x)
    return x


def mse(x, targets):
    return jnp.mean((x - targets) ** 2)


def plain(case: Case, weights: Weights) -> Program:
    """Gradient accumulation on one device: the step, and a function that returns its gradients."""

    def loss(params, x, targets):
        return mse(layers(case, params, x), targets) / case.microbatches

    @jax.jit
    def accumulated(params, inputs, targets):
        def one(total, batch):
            return jax.tree.map(jnp.add, total, jax.value_and_grad(loss)(params, *batch)), None

        zero = jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)
        return lax.scan(one, zero, (inputs, targets))[0]

    arguments = jax.device_put((weights, *case.batch()), jax.local_devices()[0])
    return _program(accumulated, arguments, lambda grads: named({0: grads}))


def by_autodiff(case: Case, mesh, *, skip: bool):
    """GPipe as it is most often written in JAX: a scan over ticks, a ppermute in each, jax.grad through all of it.

    In a tick without a microbatch for a rank, the rank computes a result that is not used, or, with ``skip``,
    a ``lax.cond`` skips the computation.
    """
    last, ticks = case.ranks - 1, case.microbatches + case.ranks - 1

    def on_rank(stages, inputs, targets):
        # stages [1, layers, ...]; inputs and targets [microbatches, size, sequence, width], the same everywhere
        own, rank = jax.tree.map(lambda leaf: leaf[0], stages), lax.axis_index("pp")

        def tick(received, t):
            x = jnp.where(rank == 0, inputs[jnp.minimum(t, case.microbatches - 1)], received)
            if skip:
                has_work = (t >= rank) & (t < rank + case.microbatches)
                y = lax.cond(has_work, lambda x: layers(case, own, x), lambda x: x, x)
            else:
                y = layers(case, own, x)
            return lax.ppermute(y, "pp", [(i, i + 1) for i in range(last)]), y

        empty = lax.pcast(jnp.zeros_like(inputs[0]), "pp", to="varying")
        _, outputs = lax.scan(tick, empty, jnp.arange(ticks))
        return lax.psum(jnp.where(rank == last, mse(outputs[last:], targets), 0), "pp")

    loss = jax.shard_map(on_rank, mesh=mesh, in_specs=(P("pp"), P(), P()), out_specs=P())
    return jax.jit(jax.value_and_grad(loss))


def staged(case: Case, num_stages: int) -> StagedModel:
    """The blocks as a model for the engine; every stage has `layers / num_stages` layers."""

    def first(own, shared, x, at):
        del shared, x
        return Out(layers(case, own, at.batch["inputs"]))

    def middle(own, shared, x, at):
        del shared, at
        return Out(layers(case, own, x))

    def last(own, shared, x, at):
        del shared
        return Out(None, {"mse": mse(layers(case, own, x), at.batch["targets"])})

    kinds = {"first": first, "middle": middle, "last": last}
    kind_of = ("first", *("middle",) * (num_stages - 2), "last")
    return StagedModel({name: kinds[name] for name in dict.fromkeys(kind_of)}, kind_of)


def named(parts: dict[int, Any]) -> Named:
    """Gradients by leaf and number of layer; ``parts`` are leaves [layers, ...] by the number of their first layer."""
    return {
        f"{name}.{first + number}": value
        for first, part in parts.items()
        for name, leaf in part.items()
        for number, value in enumerate(np.asarray(leaf))
    }


def _program(step, arguments, names) -> Program:
    """A function that runs a compiled step with these arguments, and one that returns its last gradients."""
    kept: list[Any] = []

    def run():
        loss, grads = jax.block_until_ready(step(*arguments))
        kept[:] = [grads]
        return float(loss)

    return run, lambda: names(kept[0])


class Side:
    """A rank of JAX's pipelines: a process with one device."""

    def __init__(self, case: Case, rank: int, port: int, folder: Path):
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"127.0.0.1:{port}", case.ranks, rank)
        self.case, self.rank, self.folder = case, rank, folder
        self.mesh = make_mesh(case.ranks, 1)

    def barrier(self):
        """Wait for the other ranks."""
        multihost_utils.sync_global_devices("start")

    def program(self, name: str) -> Program:
        """The step of that name, which returns the loss, and a function that returns this rank's gradients."""
        weights = self.case.weights()
        if name == "plain":
            return plain(self.case, weights)
        if name.startswith("autodiff"):
            return self._by_autodiff(weights, skip=name.endswith("skip"))
        return self._engine(self._schedule(name), weights)

    def _schedule(self, name: str) -> Schedule:
        """The schedule of that name: PyTorch's own table where there is one, so that both run the same actions."""
        if name in ("GPipe", "1F1B"):
            return {"GPipe": gpipe, "1F1B": one_f_one_b}[name](self.case.ranks, self.case.microbatches)
        return validate(from_torch_csv((self.folder / f"{name}.csv").read_text()))

    def _cut(self, weights: Weights, num_stages: int) -> Weights:
        return {name: leaf.reshape(num_stages, -1, *leaf.shape[1:]) for name, leaf in weights.items()}

    def _everywhere(self, arrays, *spec):
        def place(array):
            return jax.make_array_from_callback(
                array.shape, NamedSharding(self.mesh, P(*spec)), array.__getitem__
            )

        return jax.tree.map(place, arrays)

    def _by_autodiff(self, weights, *, skip):
        case, each = self.case, self.case.layers // self.case.ranks
        stages = self._everywhere(self._cut(weights, case.ranks), "pp")
        arguments = stages, *self._everywhere(case.batch())
        step = by_autodiff(case, self.mesh, skip=skip)
        return _program(step, arguments, lambda grads: named({self.rank * each: _here(grads)}))

    def _engine(self, schedule, weights):
        case, count = self.case, schedule.placement.num_model_stages
        pipeline = Pipeline(staged(case, count), schedule, self.mesh)
        params = pipeline.place({"stages": self._cut(weights, count), "shared": {}})
        inputs, targets = self._everywhere(case.batch())

        def step(*arguments):
            (loss, _), grads = pipeline.value_and_grad(*arguments)
            return loss, grads

        def names(grads):
            held, each = schedule.placement.stages_on[self.rank], case.layers // count
            local = zip(held, grads["stages"].local, strict=True)
            return named({stage * each: _here(part) for stage, part in local})

        return _program(step, (params, {"inputs": inputs, "targets": targets}), names)


def _here(tree):
    """This rank's part of leaves [ranks, ...]."""
    return jax.tree.map(lambda leaf: np.asarray(leaf.addressable_shards[0].data)[0], tree)
