"""The engine with only some of its units: what stands in the program that is compiled to be looked at."""

import functools
import re
from collections import Counter

import jax
import jax.numpy as jnp
import pytest

from dualpipe_jax import Out, Pipeline, StagedModel, make_mesh, staged
from dualpipe_jax.inspect import read
from dualpipe_jax.schedule import dualpipe, one_f_one_b
from tests.engine import models
from tests.jaxprs import equations

SCOPES = ("pair", "forward", "backward", "backward_input", "backward_weight")


@functools.cache
def lowered(make, units, kind="mlp", fuse_pairs=None, every_kind=False):
    schedule = make(2, 8)
    params, batch = models.given(kind, schedule.placement.num_model_stages, 8)
    pipeline = made(kind, schedule, fuse_pairs=fuse_pairs)
    step = pipeline.value_and_grad if units is None else pipeline.units(units, every_kind=every_kind)
    return step.lower(params, batch)


def made(kind, schedule, **options):
    stages = schedule.placement.num_model_stages
    model, specs = staged(models.model(kind), stages, has_aux=True), models.init(kind, stages)[1]
    return Pipeline(model, schedule, make_mesh(2, 2), param_specs=specs, **options)


def guards(lowered):
    """Scopes of the loops in a compiled program."""
    module = read(lowered.compile())
    names = [loop.op_name.split("/") for _, loop in module.loops.values()]
    return {f"{s}/{name[name.index(s) + 1]}" for s in SCOPES for name in names if s in name}


def test_a_pair_alone_holds_its_all_to_alls():
    text = lowered(dualpipe, ("FB",), "moe", fuse_pairs=True).as_text()
    whole = lowered(dualpipe, None, "moe", fuse_pairs=True).as_text()
    assert text.count("stablehlo.all_to_all") == 4 < whole.count("stablehlo.all_to_all")
    assert text.count("stablehlo.collective_permute") == whole.count("stablehlo.collective_permute")


def test_units_are_found_by_their_scopes():
    assert len(guards(lowered(dualpipe, ("FB",), fuse_pairs=True))) == 1
    every = guards(lowered(dualpipe, ("FB",), fuse_pairs=True, every_kind=True))
    assert every == {"pair/first-last", "pair/last-first"}
    both = guards(lowered(one_f_one_b, ("F", "B"), every_kind=True))
    assert both == {"forward/first", "forward/last", "backward/first", "backward/last"}
    whole = guards(lowered(dualpipe, None, fuse_pairs=True))
    assert {scope.split("/")[0] for scope in whole} == set(SCOPES) and every < whole


def test_of_kinds_alike_one_is_compiled():
    """Stages 1 and 2 multiply by their own leaf of "shared"; the ends may be called what they like."""

    def stage(number):
        return lambda own, shared, x, at: Out((at.batch if x is None else x) @ shared[number])

    def last(own, shared, x, at):
        return Out(losses={"size": jnp.mean((x @ own) ** 2)})

    def units(alike):
        kinds = {"a": stage(0), "b": stage(1), "c": stage(2), "d": last}
        model = StagedModel(kinds, tuple(kinds), alike=alike)
        params = {"stages": jnp.ones((4, 8, 8)), "shared": [jnp.ones((8, 8))] * 3}
        pipeline = Pipeline(model, one_f_one_b(4, 8), make_mesh(4))
        return guards(pipeline.units(("F", "B"), every_kind=True).lower(params, jnp.ones((8, 2, 8))))

    every = {f"{op}/{kind}" for op in ("forward", "backward") for kind in "abcd"}
    assert units({}) == every == units({"b": "a", "d": "a"}), "a stage at an end hands on or is handed less"
    assert units({"c": "b"}) == every - {"forward/c", "backward/c"}


def test_pools_are_those_of_the_whole_step():
    """Slot pools are what the scan carries."""

    def carried(lowered):
        loops = [line for line in lowered.as_text().splitlines() if "stablehlo.while" in line]
        return Counter(re.findall(r"tensor<\w*xf32>", max(loops, key=len)))

    part, whole = lowered(dualpipe, ("FB",), fuse_pairs=True), lowered(dualpipe, None, fuse_pairs=True)
    assert carried(part).total() > 10
    assert carried(part) <= carried(whole), "less, for what nobody uses is gone"


def test_a_schedule_that_pairs_nothing_says_so():
    with pytest.raises(ValueError, match="units_alone: one_f_one_b with 8 microbatches never runs FB"):
        lowered(one_f_one_b, ("FB",))


def test_the_state_that_is_foretold_is_what_the_scan_carries():
    schedule = dualpipe(2, 8)
    given, pipeline = models.given("moe", schedule.placement.num_model_stages, 8), made("moe", schedule)
    state, step = pipeline.state(*given), pipeline.value_and_grad
    walks = [eqn for _, eqn in equations(jax.make_jaxpr(step)(*given).jaxpr) if eqn.primitive.name == "scan"]
    walk = max(walks, key=lambda eqn: len(eqn.outvars))
    foretold = [f"{leaf.dtype}{list(leaf.shape)}" for leaf in jax.tree.leaves(state) if leaf.size]
    old = "num_carry" in walk.params  # a number in jax 0.10, a tree in 0.12
    num_carried = walk.params["num_carry"] if old else len(walk.params["ft_in"].unpack()[1])
    carried = [f"{v.aval.dtype}{list(v.aval.shape)}" for v in walk.outvars[:num_carried]]
    floats = [sorted(name for name in names if name.startswith("float")) for names in (foretold, carried)]
    assert floats[0] == floats[1]
    pools = state.family("residual").values()
    assert all(len({pool.shape[0] for pool in group}) == 1 for group in pools)
    assert max(group[0].shape[0] for group in pools) > 1
