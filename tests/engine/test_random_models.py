"""Models, schedules, meshes and options drawn at random, in float64, against jax.value_and_grad of plain loops.

``python -m tests.engine.test_random_models MINUTES [SEED]`` goes on for longer, with one seed after the other. In zero
minutes it tries one seed alone, which is how a failure is repeated.
"""

if __name__ == "__main__":
    import tests.conftest  # noqa: F401  before JAX, which finds eight devices then

import collections
import dataclasses
import math
import random
import sys
import time
import traceback
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from dualpipe_jax import At, Out, Pipeline, StagedModel, make_mesh, schedule
from tests.engine.layers import BELOW, LAYERS, OVER_EP, OWN, SHARED, D, T, V, parameters

QUICK = [21, 33, 49, 55, 110, 137, 140, 151, 161, 176, 178, 186, 190, 198, 200, 208, 209, 225, 281, 296]
SLOW = range(500, 530)
"""The quick ones are chosen: a second each, and every schedule, layer and option is in one of them."""

RECIPES = {recipe.__name__: recipe for recipe in schedule.ALL_SCHEDULES}
OPTIONS = {
    "divergence": (0.5, ["loop", "switch", "none"]),
    "fuse_pairs": (0.5, [True, False]),
    "idle_sends": (0.4, [True, False]),
    "input_grads": (0.5, [True]),
    "wide_gradients": (0.3, [True]),
    "check_vma": (0.25, [True]),
    "debug_nans": (0.2, [True]),
}
"""How often an option is given, and as what; what is frozen and where leaves are stored is drawn leaf by leaf."""


@dataclasses.dataclass(frozen=True)
class Case:
    """All that is drawn but the numbers in params and batch."""

    seed: int
    mesh: dict[str, int]
    recipe: str
    num_microbatches: int
    size: int  # of a microbatch on one device
    kinds: dict[str, list[str]]  # the layers of each kind of stage
    kind_of: list[str]
    recomputed: list[str]  # the kinds that stand in jax.checkpoint
    as_list: bool  # the stages' parameters: a list, or stacked
    options: dict[str, Any]

    @property
    def own(self):
        """A stage's parameters, all of which every stage has, and what each is in OWN."""
        return {
            f"{kind}.{place}.{layer}.{leaf}": leaf
            for kind, layers in self.kinds.items()
            for place, layer in enumerate(layers)
            for leaf in parameters(layer)[1]
        }

    @property
    def specs(self):
        own = {name: OVER_EP.get(leaf, P()) for name, leaf in self.own.items()}
        return {"stages": own, "shared": dict.fromkeys(SHARED, P())}


def draw(seed):
    """The case of a seed."""
    r = random.Random(seed)
    pp = r.choice([1, 2, 2, 2, 3, 4, 4])
    ep = r.choice([ep for ep in (1, 2, 4) if ep * pp <= 8])
    dp = r.choice([dp for dp in (1, 1, 2) if dp * ep * pp <= 8])
    num_stages = None
    while num_stages is None:
        recipe, num_microbatches = r.choice([*RECIPES]), r.choice([1, 2, 3, 4, 4, 6, 8])
        try:
            num_stages = RECIPES[recipe](pp, num_microbatches).placement.num_model_stages
        except ValueError:
            continue  # there is none of that size
    kinds = {kind: r.choices([*LAYERS], k=r.randint(1, 4)) for kind in r.choice(["a", "a", "ab", "abc"])}
    first_dims = {
        OWN[leaf][:1] for layers in kinds.values() for layer in layers for leaf in parameters(layer)[1]
    }
    case = Case(
        seed=seed,
        mesh={"pp": pp, "ep": ep, "dp": dp},
        recipe=recipe,
        num_microbatches=num_microbatches,
        size=r.choice([1, 2]),
        kinds=kinds,
        kind_of=r.choices([*kinds], k=num_stages),
        recomputed=[kind for kind in kinds if r.random() < 0.15],
        # A list of as many trees as each of their leaves is long may be meant either way, and is refused.
        as_list=r.random() < 0.3 and first_dims != {(num_stages,)},
        options={name: r.choice(values) for name, (share, values) in OPTIONS.items() if r.random() < share},
    )
    specs = case.specs
    if r.random() < 0.3:
        case.options["frozen"] = jax.tree.map(lambda _: r.random() < 0.3, specs)
    if r.random() < 0.4:
        shapes = {"stages": {name: OWN[leaf] for name, leaf in case.own.items()}, "shared": SHARED}
        axes = {"stages": ["dp", "ep"], "shared": ["dp", "ep", "pp"]}
        case.options["storage_specs"] = {
            part: {
                name: cut_further(r, spec, shapes[part][name], {axis: case.mesh[axis] for axis in axes[part]})
                for name, spec in specs[part].items()
            }
            for part in specs
        }
    return case


def cut_further(r, spec, shape, sizes):
    """A spec that stores a leaf in more parts than it is used in, over axes of these sizes."""
    cut = [(axis,) if axis else () for axis in (*spec, *[None] * (len(shape) - len(spec)))]
    for axis in r.sample([*sizes], r.randint(0, len(sizes))):
        parts = [sizes[axis] * math.prod(sizes[other] for other in axes) for axes in cut]
        fits = [dim for dim, size in enumerate(shape) if size % parts[dim] == 0]
        if fits and axis not in spec:
            cut[r.choice(fits)] += (axis,)
    return P(*cut)


def given(case):
    """Params and a batch, of NumPy's arrays."""
    rng = np.random.default_rng(case.seed)

    def leaf(shape, below=None):
        if below is not None:
            return rng.integers(0, below, shape, np.int32)
        return np.asarray(0.4 * rng.standard_normal(shape))

    stages = [{name: leaf(OWN[of], BELOW.get(of)) for name, of in case.own.items()} for _ in case.kind_of]
    shared = {name: leaf(shape) for name, shape in SHARED.items()}
    if not case.as_list:
        stages = jax.tree.map(lambda *leaves: np.stack(leaves), *stages)
    shape = case.num_microbatches, case.mesh["dp"] * case.mesh["ep"] * case.size, T
    batch = {"ids": leaf(shape, V), "targets": leaf(shape, V), "noise": leaf((*shape, D))}
    return {"stages": stages, "shared": shared}, batch


def model_of(case):
    """A function for each kind of stage, and another for each with the loss at the end."""

    def function(kind, last):
        def stage(own, shared, x, at):
            noise = at.batch["noise"]
            if x is None:
                ids = at.batch["ids"]
                x = {"y": shared["embed"][ids] + noise, "skip": jnp.zeros_like(noise), "ids": ids}
            losses = {}
            for place, layer in enumerate(case.kinds[kind]):
                known = shared | x | {"stage": at.stage, "microbatch": at.microbatch, "noise": noise}
                names, of_own = parameters(layer)
                known |= {name: own[f"{kind}.{place}.{layer}.{name}"] for name in of_own}
                y = LAYERS[layer](x["y"], **{name: known[name] for name in names})
                y, more = y if isinstance(y, tuple) else (y, {})
                x = x | {"y": y, "skip": more.get("skip", x["skip"])}
                if "loss" in more:
                    losses["layers"] = losses.get("layers", 0.0) + more["loss"]
            if last:
                scores = jax.nn.log_softmax(x["y"] @ shared["head"])
                losses["last"] = -jnp.mean(jnp.take_along_axis(scores, at.batch["targets"][..., None], -1))
            return Out(x, losses, {"sum": jnp.sum(x["y"])} if kind == "a" else {})

        return jax.checkpoint(stage) if kind in case.recomputed else stage

    *others, last = case.kind_of
    kinds = {kind: function(kind, last=False) for kind in others}
    return StagedModel(kinds | {"last": function(last, last=True)}, (*others, "last"))


def pipelined(case, params, batch):
    """The engine's step: losses, metrics and gradients."""
    mesh = make_mesh(**case.mesh)
    table = RECIPES[case.recipe](case.mesh["pp"], case.num_microbatches)
    pipeline = Pipeline(model_of(case), table, mesh, param_specs=case.specs, **case.options)
    (loss, report), gradients = pipeline.value_and_grad(params, batch)
    return {"sum": loss, **report.losses}, report.metrics, gradients


def plain(case, params, batch):
    """The same of loops over stages and microbatches, with jax.vmap in place of devices."""
    model, dp, ep = model_of(case), case.mesh["dp"], case.mesh["ep"]
    cut = {name: tuple(OVER_EP[leaf]).index("ep") for name, leaf in case.own.items() if leaf in OVER_EP}

    def one_part(stages, shared, batch, microbatch):
        x, losses, metrics = None, {}, {}
        for number, (kind, own) in enumerate(zip(model.kind_of, stages, strict=True)):
            x, *more = model.kinds[kind](own, shared, x, At(batch, jnp.int32(number), microbatch, None))
            for total, new in zip((losses, metrics), more, strict=True):
                total |= {name: total.get(name, 0.0) + value for name, value in new.items()}
        return losses, metrics

    own_axes = [{name: 0 if name in cut else None for name in case.own}] * len(case.kind_of)
    parts_of_ep = jax.vmap(one_part, in_axes=(own_axes, None, 0, None), axis_name="ep")
    parts_of_dp = jax.vmap(parts_of_ep, in_axes=(None, None, 0, None), axis_name="dp")

    def loss(params, batch):
        stages = params["stages"]
        if not case.as_list:
            stages = [{name: leaf[i] for name, leaf in stages.items()} for i in range(len(case.kind_of))]
        stages = [
            own | {name: jnp.stack(jnp.split(own[name], ep, dim)) for name, dim in cut.items()}
            for own in stages
        ]
        parts = jax.tree.map(lambda a: a.reshape(len(a), dp, ep, case.size, *a.shape[2:]), batch)
        numbered = parts, jnp.arange(case.num_microbatches, dtype=jnp.int32)
        losses, metrics = lax.map(lambda each: parts_of_dp(stages, params["shared"], *each), numbered)
        losses = jax.tree.map(jnp.mean, losses)
        total = sum(losses.values())
        return total, ({"sum": total, **losses}, jax.tree.map(jnp.sum, metrics))

    step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True, allow_int=True))
    (_, (losses, metrics)), (gradients, by_batch) = step(params, batch)
    if frozen := case.options.get("frozen"):
        stages = [frozen["stages"]] * len(case.kind_of) if case.as_list else frozen["stages"]
        gradients = jax.tree.map(
            lambda off, g: None if off and g.dtype != jax.dtypes.float0 else g,
            frozen | {"stages": stages},
            gradients,
        )
    if "input_grads" in case.options:
        gradients["batch"] = by_batch
    return jax.tree.map(jnp.float32, losses), metrics, gradients


def check(seed):
    """Compares a seed's two: losses, which are float32, to 1e-6, metrics and each leaf of the gradients to 1e-8."""
    case = draw(seed)
    params, batch = given(case)
    try:
        with jax.enable_x64(True):
            got, want = (jax.device_get(step(case, params, batch)) for step in (pipelined, plain))
        assert jax.tree.structure(got) == jax.tree.structure(want)
        for (path, g), w in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True):
            name = jax.tree_util.keystr(path)
            assert (g.dtype, g.shape) == (w.dtype, w.shape), name
            if g.dtype != jax.dtypes.float0:
                assert np.isfinite(w).all(), name
                atol = {np.float32: 1e-6, np.float64: 1e-8}[w.dtype.type] * max(np.abs(w).max(), 1e-6)
                np.testing.assert_allclose(g, w, rtol=0, atol=atol, err_msg=name)
    except Exception as error:
        error.add_note(f"{case}\nTo repeat it: python -m tests.engine.test_random_models 0 {seed}")
        raise
    return case


@pytest.mark.parametrize("seed", [*QUICK, *(pytest.param(seed, marks=pytest.mark.slow) for seed in SLOW)])
def test_as_plain_loops(seed):
    check(seed)


def test_no_schedule_layer_or_option_is_left_out():
    cases = [draw(seed) for seed in (*QUICK, *SLOW)]
    assert {case.recipe for case in cases} == {*RECIPES}
    assert {layer for case in cases for kind in case.kind_of for layer in case.kinds[kind]} == {*LAYERS}
    drawn = {(name, str(value)) for case in cases for name, value in case.options.items() if name in OPTIONS}
    assert drawn == {(name, str(value)) for name, (_, values) in OPTIONS.items() for value in values}
    assert {name for case in cases for name in case.options} == {*OPTIONS, "frozen", "storage_specs"}


def main(minutes, seed):
    """Try seeds, print what fails, and at the end how many cases of each schedule passed."""
    jax.config.update("jax_enable_compilation_cache", False)  # no program is met twice
    seen, first, until = collections.Counter(), seed, time.monotonic() + 60 * minutes
    while seed == first or time.monotonic() < until:
        try:
            seen[check(seed).recipe] += 1
        except Exception:
            seen["wrong"] += 1
            traceback.print_exc()
        seed += 1
        if seed % 20 == 0:
            jax.clear_caches()  # the programs would fill the memory
    print(f"seeds {first} to {seed - 1}:", dict(seen))


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]) if sys.argv[2:] else random.randrange(10**9))
