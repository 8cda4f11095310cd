"""From cycles of units to a step's time: by hand, and on a program of our own compiled for CPU."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import pytest

import models
from dualpipe_jax.engine import Pipeline, staged
from dualpipe_jax.inspect import overlap, read
from dualpipe_jax.inspect.rates import Rates
from dualpipe_jax.parallel import make_mesh
from dualpipe_jax.pods import ahead, predict
from dualpipe_jax.pods.costs import rank_costs, stage_costs, unit_costs
from dualpipe_jax.pods.program import Blueprint
from dualpipe_jax.pods.results import Unit
from dualpipe_jax.pods.stage_memory import StageMemory
from dualpipe_jax.pods.units import (
    bodies_of,
    cycles_of,
    kinds_of,
    overheads,
    scan_body,
    unit_of,
    units_in,
    units_of_program,
    with_alike,
    with_usual,
)
from dualpipe_jax.schedule import (
    ALL_SCHEDULES,
    Action,
    CostModel,
    MemoryModel,
    Op,
    dualpipe,
    dualpipe_v,
    gpipe,
    interleaved_1f1b,
    lower,
    one_f_one_b,
    simulate,
)
from dualpipe_jax.schedule.lowering.unit_key import UnitKey
from tests.engine import models as small
from train.model import count_parameters, model_flops, named_config
from train.pods.training import optimizer_of, step_program
from train.state.layout import Layout


def unit(cycles, communication=0.0, exposed=0.0):
    return Unit(cycles, cycles - exposed, communication, exposed, 0)


def keyed(named):
    return {UnitKey.parse(name): each for name, each in named.items()}


def test_keys_are_read_as_they_are_written():
    for key in (UnitKey("F"), UnitKey("W", ("first",)), UnitKey("FB", ("a-b/c%", "middle_2"))):
        assert UnitKey.parse(str(key)) == key
        assert not key.kinds or UnitKey.of_scope(key.scope) == key
    assert str(UnitKey("FB", ("first", "last"))) == "FB/first-last"
    assert UnitKey("I", ("last",)).scope == "backward_input/last"


def test_a_unit_that_hides_all_and_one_that_hides_nothing():
    best, worst = unit(10.0, communication=10.0), unit(20.0, communication=10.0, exposed=10.0)
    assert best.over_limit == 1 and best.over_sum == 0.5
    assert worst.over_limit == 2 and worst.over_sum == 1
    assert unit(0.0).over_limit is None


def test_costs_of_units():
    units = keyed({"F": unit(3.0), "B": unit(7.0), "I": unit(4.0), "W": unit(2.0), "FB": unit(8.0)})
    assert stage_costs(units, 0.5) == CostModel(3, 4, 2, FB=8, send=0.5)
    ends = {"F/first": unit(4.0), "I/first": unit(4.5), "W/first": unit(3.0), "F/last": unit(9.0)}
    ends = units | keyed(ends | {"B/last": unit(15.0)})
    assert stage_costs(ends, 0).extra == {0: (1, 0.5, 1), -1: (6, 6, 3)}
    whole = stage_costs(keyed({"F": unit(3.0), "B": unit(6.0)}), 0)
    assert (whole.B, whole.FB) == (6, 9)
    unsplit = stage_costs(units, 0, split=False)
    assert math.isclose(unsplit.B, 7)
    with pytest.raises(ValueError, match="costs: needs F and either B or I and W; measured were FB, W"):
        stage_costs(keyed({"FB": unit(1.0), "W": unit(1.0)}), 0)


def test_a_step_in_ticks_takes_no_less_than_in_the_ideal_order():
    costs = CostModel(1, 1, 1, send=0.1)
    for schedule in (dualpipe(4, 16), one_f_one_b(4, 16)):
        ticks, ideal = predict.step_cycles(schedule, costs), predict.ideal_cycles(schedule, costs)
        assert ideal <= ticks < 1.3 * ideal


@pytest.mark.parametrize(("at_once", "takes"), [(None, 27), (2, 27), (1, 48)])
def test_of_ranks_that_share_processors_the_work_adds_up(at_once, takes):
    """Eight times three on each of two ranks, and beside them a bubble of three."""
    assert predict.ideal_cycles(one_f_one_b(2, 8), CostModel(), at_once) == takes


def test_schedules_are_ranked_and_those_that_do_not_fit_say_so():
    costs, unsplit = CostModel(1, 1, 1, FB=2.2), CostModel(1, 1.2, 0.6, FB=2.2)
    sizes = MemoryModel(parameters=1 << 30, fixed=2 << 30)
    kept = StageMemory((0,) * 4, ("F",), (("FI",),), (1 << 30,), 0, CostModel())

    def ranks(num_ranks, microbatches, limit):
        def price(schedule, costs):
            return predict.step_cycles(schedule, costs), 0.5

        return predict.rank_schedules(num_ranks, microbatches, costs, unsplit, sizes, kept, limit, price)

    ranked = ranks(4, 16, 8 * 2**30)
    assert sorted(p.name for p in ranked) == sorted(recipe.__name__ for recipe in ALL_SCHEDULES)
    fitting = [p for p in ranked if not p.refused]
    assert fitting == sorted(fitting, key=lambda p: p.seconds) and ranked[: len(fitting)] == tuple(fitting)
    by_name = {p.name: p for p in ranked}
    own = one_f_one_b(4, 16)
    assert by_name["one_f_one_b"].seconds == lower(own, unsplit).makespan(unsplit), "it splits nothing"
    assert by_name["one_f_one_b"].memory == (4 + 1 + 2) * 2**30
    assert by_name["gpipe"].refused == "needs 19.0 GiB of 8.0"
    odd = {p.name: p for p in ranks(3, 7, 2**40)}
    assert odd["chimera"].seconds is None and odd["chimera"].refused


def test_costs_of_a_ranks_share():
    stage = CostModel(1, 2, 3, FB=5, send=7, extra={0: (1, 0, 0)})
    of_line, of_v = (rank_costs(stage, recipe(4, 8)) for recipe in (dualpipe, dualpipe_v))
    assert (of_line.F, of_line.I, of_line.W, of_line.FB, of_line.send) == (1, 2, 3, 5, 7)
    assert (of_v.F, of_v.I, of_v.W, of_v.FB, of_v.send) == (2, 4, 6, 10, 7)
    assert of_line.extra == of_v.extra == {0: (1, 0, 0)}
    assert of_line.for_schedule(dualpipe(4, 8)) is stage and of_v.for_schedule(dualpipe_v(4, 8)) is stage
    deeper = of_v.for_schedule(dualpipe(4, 8))
    assert (deeper.F, deeper.I, deeper.W, deeper.FB) == (2, 4, 6, 10)


def test_model_flops_of_v3_by_hand():
    numbers = models.v3()
    total, active = count_parameters(numbers)
    assert total > 671e9
    attention = 61 * 128 * (192 + 128) * 4096  # a half of QK and PV, 2 each
    assert model_flops(numbers, active, 4096) == pytest.approx(6 * (active - 129280 * 7168) + 3 * attention)
    assert 2.2e11 < model_flops(numbers, active, 4096) < 2.6e11, "250 GFLOP a token, as published"


def _products(jaxpr):
    """The operations of all matrix products of a program, those of a scan as often as it turns."""
    found = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (summed, _), _ = equation.params["dimension_numbers"]
            lengths = [equation.invars[0].aval.shape[dim] for dim in summed]
            found += 2 * equation.outvars[0].aval.size * math.prod(lengths)
        inner = [getattr(leaf, "jaxpr", leaf) for leaf in jax.tree.leaves(equation.params)]
        turns = equation.params.get("length", 1)
        found += turns * sum(_products(one) for one in inner if hasattr(one, "eqns"))
    return found


@pytest.mark.parametrize("modules", [0, 1, 2])
def test_model_flops_are_three_times_the_products_of_the_forward(modules):
    """Modules of multi-token prediction attend, and multiply by the head, as the model does."""
    numbers = models.byte(num_layers=2, num_dense_layers=1, num_experts=2, num_mtp_layers=modules)
    model = models.deepseek(numbers, 1, dispatch="capacity", capacity_factor=1.0)
    pipeline = Pipeline(model.staged, gpipe(1, 1), make_mesh(1, 1), param_specs=model.param_specs)
    params = jax.eval_shape(model.init, jax.random.key(0))
    batch = dict.fromkeys(("inputs", "targets"), jax.ShapeDtypeStruct((1, 1, 32), jnp.int32))
    counted = _products(jax.make_jaxpr(pipeline.loss)(params, batch).jaxpr) / 32
    # Attention computes the half that a causal mask leaves out, too; norms and biases are parameters without products.
    unmasked = numbers.num_heads * (24 + 8 + 32) * 32 * (2 + modules)
    _, active = count_parameters(numbers)
    assert model_flops(numbers, active, 32) == pytest.approx(3 * (counted - unmasked), rel=0.006)


def test_units_are_found_and_priced_in_a_compiled_program():
    schedule = dualpipe(2, 6)
    numbers = models.byte(num_layers=2, num_dense_layers=0)
    model = models.deepseek(numbers, 2, ep_axis="ep", dispatch="capacity", capacity_factor=1.0)
    mesh = make_mesh(2, 2)
    program = step_program(Layout(model, schedule, mesh, optimizer_of()), (6, 2, 8))
    program = dataclasses.replace(program, pipeline={**program.pipeline, "idle_sends": True})  # as on pods
    module = read(ahead.lower_units(Blueprint(program, schedule, mesh), ("FB", "W")).compile())
    assert len(bodies_of(module, "FB")) == len(bodies_of(module, "W")) == 1
    assert not bodies_of(module, "F")
    report = overlap(module, Rates(link=8.0, memory=64.0, flops=1024.0))
    units = units_of_program(report, module)
    own = {key.op: key for key in units_in(module)}
    assert own["FB"].kinds in (("first", "last"), ("last", "first"))
    pair, weights = UnitKey("FB"), UnitKey("W")
    assert units.keys() == {pair, own["FB"], weights, own["W"]}
    assert units[pair].cycles > units[pair].communication > 0 == units[weights].communication
    assert unit_of(report, module, *bodies_of(module, "FB")) == units[pair]
    tick, step = overheads(report, module)
    walked, entry = (report.computations[name].cycles for name in (scan_body(module), module.entry))
    assert 0 < tick == pytest.approx(walked - units[pair].cycles - units[weights].cycles, abs=1)
    asks = overlap(module, Rates(link=8.0, memory=64.0, flops=1024.0, host=1000.0))
    assert overheads(asks, module)[0] - tick == pytest.approx(3000), (
        "two guards ask, and the one taken once more"
    )
    trips = module.loops[scan_body(module)][1].trips
    assert 0 < step == pytest.approx(entry - trips * walked)
    # The newer compiler takes sends out of a loop that has these units alone.
    if jax.__version_info__ < (0, 11):
        sends = [c for c in report.select("collective-permute") if c.computation == scan_body(module)]
        assert len(sends) == 2, "outputs and gradients; on two ranks both pipes send the same way"


@pytest.mark.slow
def test_units_that_are_branches_of_one_conditional():
    """As engines for GPUs have it: the same units, of the same work, as where each is a loop."""
    params, _ = small.init("mlp", 2)
    params = {"stages": params["stages"], "shared": {name: params[name] for name in ("embed", "head")}}
    batch = dict(zip(("inputs", "targets"), small.data(6, 2), strict=True))
    model, mesh, units = staged(small.model("mlp"), 2, has_aux=True), make_mesh(2, 1), {}
    names = {"first": "the/first", "last": "the-last"}  # what parts the names of units in them
    kinds = {names.get(kind, kind): function for kind, function in model.kinds.items()}
    model = dataclasses.replace(model, kinds=kinds, kind_of=tuple(names[kind] for kind in model.kind_of))
    for form in ("loop", "switch"):
        pipeline = Pipeline(model, dualpipe(2, 6), mesh, divergence=form, fuse_pairs=True, idle_sends=True)
        step = pipeline.units(("FB", "F", "W"), every_kind=True)
        # An option of its own: JAX's compilation cache gives a like program whose kinds have other names.
        compiled = step.lower(params, batch, None).compile({"xla_backend_optimization_level": 1})
        module = read(compiled)
        report = overlap(module, Rates(link=8.0, memory=64.0, flops=1024.0))
        assert scan_body(module) is not None and len(module.branches) == (0 if form == "loop" else 6)
        units[form] = {
            key: [len([i for i in module.inside(body) if i.opcode == "dot"]) for body in found]
            for key, found in units_in(module).items()
        }
        assert all(beside > 0 for beside in overheads(report, module))
        assert set(map(UnitKey, ("FB", "F", "W"))) <= units_of_program(report, module).keys()
    assert units["loop"] == units["switch"] and len(units["loop"]) == 5, "W is alone in one kind"
    assert {kind for key in units["loop"] for kind in key.kinds} == {"the/first", "the-last"}


def test_a_program_without_ticks_has_no_overheads():
    module = read(jax.jit(lambda x: x + 1).lower(jax.numpy.ones(8)).compile())
    report = overlap(module, Rates(memory=1.0))
    assert overheads(report, module) is None
    assert cycles_of(report, module, {}, 0) == report.computations[module.entry].cycles > 0
    with pytest.raises(
        ValueError, match=r"cycles_of: the program has the units \[\], and runs names \['F'\]"
    ):
        cycles_of(report, module, {UnitKey("F"): 1}, 1)


def test_a_loop_of_ones_own_in_scopes_named_like_a_units_is_no_tick():
    def model(x):
        with jax.named_scope("forward"), jax.named_scope("layers"):
            return jax.lax.fori_loop(0, jax.numpy.int32(x[0, 0]), lambda _, x: jax.numpy.sin(x @ x), x)

    module = read(jax.jit(model).lower(jax.numpy.ones((8, 8))).compile())
    assert list(units_in(module)) == [UnitKey("F", ("layers",))]
    report = overlap(module, Rates(memory=1.0, flops=1.0))
    assert scan_body(module) is None and overheads(report, module) is None


def test_models_by_name():
    assert count_parameters(named_config("67b-a2b"))[0] == pytest.approx(67e9, rel=0.02)
    assert 1.8e9 < count_parameters(named_config("67b-a2b"))[1] < 2.6e9
    assert named_config("v3") == models.v3()
    changed = named_config("v2-lite", num_layers=4, changes={"dim": 512, "top_k": 2})
    assert (changed.num_moe_layers, changed.num_dense_layers, changed.dim, changed.top_k) == (4, 1, 512, 2)
    assert named_config("v3", 4, {"num_dense_layers": 0}).num_layers == 4
    assert {name for name in models.MODELS} >= {"v3", "v2", "v2-lite", "67b-a2b", "tiny"}


def test_models_that_there_are_not():
    message = r"model 'v33': did you mean v3\? there are v3, v2, v2-lite, 67b-a2b"
    with pytest.raises(ValueError, match=message):
        named_config("v33")
    with pytest.raises(ValueError, match=r"model v3: no number dims, score; there are .*dim, expert_hidden"):
        named_config("v3", changes={"dims": 3, "score": 1})


def test_ends_that_take_less_are_usual_stages_where_there_are_pairs():
    """Of F = 10, 6 of them an exchange that a pair hides: an end's F of 4 does not make a pair of 12 one of 6."""

    def units(**cycles):
        return keyed({n.replace("_", "/"): Unit(float(c), float(c), 0.0, 0.0, 0) for n, c in cycles.items()})

    measured = {"F": 10, "I": 9, "W": 3, "F_first": 4, "I_first": 5, "W_first": 5, "F_last": 11, "I_last": 9}
    measured |= {"W_last": 2}
    alone, paired = stage_costs(units(**measured), 0.0), stage_costs(units(**measured, FB=12), 0.0)
    assert alone.extra == {0: (-6, -4, 2), -1: (1, 0, -1)}
    assert paired.extra == {0: (0, 0, 2), -1: (1, 0, 0)} and paired.FB == 12


def test_a_step_of_units_by_kind_costs_what_each_took():
    """Every slot of DualPipe on 4 ranks, against a table of prices written out."""
    prices = {"F": 10, "B": 19, "I": 9, "W": 12, "FB": 12}  # a full backward takes less than its halves
    prices |= {"F/first": 4, "B/first": 8, "I/first": 5, "W/first": 5}
    prices |= {"F/last": 11, "B/last": 21, "W/last": 2}
    prices |= {"FB/first-last": 17, "FB/last-first": 9}
    units = keyed({name: unit(float(cycles)) for name, cycles in prices.items()})
    costs = unit_costs(units, 0.0)
    schedule = dualpipe(4, 12)
    usual_i = 9  # I of the last stage was not measured: no less than a usual one
    ends = {0: "first", 3: "last", 4: "first", 7: "last"}  # of both pipes
    seen = set()
    for order in schedule.orders:
        for slot in order:
            op = "FB" if len(slot) == 2 else slot[0].op.name
            kinds = [ends.get(action.stage) for action in slot]
            name = f"{op}/{'-'.join(kinds)}" if all(kinds) else op
            seen.add(name)
            expected = usual_i if name == "I/last" else prices[name]
            assert costs.of(slot, schedule.placement) == expected, name
    assert seen >= {"FB", "FB/first-last", "FB/last-first", "B", "B/last", "I/last", "W/last"}
    met = Action(0, Op.F, 0), Action(0, Op.B, 1)
    assert costs.of(met, schedule.placement) == 12, "never measured: no less than a usual pair"
    busy = [sum(costs.of(slot, schedule.placement) for slot in order) for order in schedule.orders]
    cycles, ideal = predict.step_cycles(schedule, costs), predict.ideal_cycles(schedule, costs)
    assert max(busy) <= ideal <= cycles


def test_stages_between_the_ends_cost_by_kind_what_each_took():
    """DualPipeV on 4 ranks, whose second stage of eight is deeper than most; a pair of it, as B, was never met."""
    kind_of = ("first", "deep", *["shallow"] * 5, "last")
    prices = {  # by op and kinds
        "F": {"first": 3, "deep": 9, "shallow": 4, "last": 5},
        "B": {"shallow": 9, "deep": 18, "last": 10},
        "I": {"first": 4, "deep": 11, "shallow": 5, "last": 6},
        "W": {"first": 5, "deep": 12, "shallow": 6, "last": 7},
        "FB": {"first-last": 13, "last-first": 12, "deep-shallow": 21, "shallow-shallow": 14},
    }
    units = {f"{op}/{kind}": unit(float(c)) for op, kinds in prices.items() for kind, c in kinds.items()}
    named = with_usual(keyed(units), kind_of)
    some = UnitKey("F"), UnitKey("F", ("deep",)), UnitKey("FB", ("deep", "middle"))
    assert [named[key].cycles for key in some] == [4, 9, 21]
    assert kinds_of(named)[1] == "deep" and named[UnitKey("F")].stages == (2, 3, 4, 5, 6)
    costs, schedule = unit_costs(named, 0.0), dualpipe_v(4, 12)
    # A usual pair, and what a deep backward takes more; and no less than the halves of a usual backward.
    missing = {("FB", "shallow-deep"): 14 + (11 - 5) + (12 - 6), ("B", "first"): 5 + 6}
    seen = set()
    for order in schedule.orders:
        for slot in order:
            op = "FB" if len(slot) == 2 else slot[0].op.name
            kinds = "-".join(kind_of[action.stage] for action in slot)
            seen.add((op, kinds))
            expected = prices[op].get(kinds) or missing[op, kinds]
            assert costs.of(slot, schedule.placement) == expected, (op, kinds)
    assert seen >= {("FB", "shallow-deep"), ("FB", "deep-shallow"), ("F", "deep"), ("W", "deep")}
    assert set(rank_costs(costs, schedule).extra) <= {0, -1}, "no other schedule has that stage"
    whole = keyed({"F/block": unit(2.0), "B/block": unit(4.0)})
    whole = with_usual(whole, ("block",) * 4)
    assert whole.keys() == {UnitKey("F"), UnitKey("B")} and whole[UnitKey("F")].stages == (0, 1, 2, 3)


@pytest.mark.parametrize("names", [("first", "middle", "last"), ("embed", "block", "head")])
def test_the_ends_cost_what_they_took_in_any_schedule_whatever_they_are_called(names):
    """The other schedule cuts the model into twice as many stages: its ends take as much beyond the others' half."""
    first, middle, last = names
    took = {first: 12.0, middle: 10.0, last: 30.0}
    found = {
        UnitKey(op, (k,)): Unit(c * n, c * n, None, 0.0, 0)
        for k, c in took.items()
        for op, n in (("F", 1), ("B", 2))
    }
    costs = unit_costs(with_usual(found, (first, middle, middle, last)), 0.0, split=False)
    of_rank = rank_costs(costs, one_f_one_b(4, 8))
    other = interleaved_1f1b(4, 8)
    by_hand = CostModel(5, 20 / 3, 10 / 3, extra={0: (2, 8 / 3, 4 / 3), -1: (20, 80 / 3, 40 / 3)})
    wanted = simulate(other, by_hand).makespan
    assert simulate(other, of_rank.for_schedule(other)).makespan == pytest.approx(wanted)


def test_kinds_alike_cost_what_one_of_them_took():
    """Each op may have been found of another one of them; what was found of a kind itself stays."""
    prices = {
        "F/two": 4.0,
        "F/four": 6.0,
        "W/three": 5.0,
        "FB/three-four": 7.0,
        "FB/two-two": 8.0,
        "FB/four-four": 9,
    }
    units = with_alike(keyed({key: unit(c) for key, c in prices.items()}), {"two": "one", "three": "one"})
    named = {str(key): found.cycles for key, found in units.items()}
    alike = {f"{op}/{kind}": c for op, c in (("F", 4.0), ("W", 5.0)) for kind in ("one", "two", "three")}
    pairs = {f"FB/{kind}-four": 7.0 for kind in ("one", "two", "three")}
    both = {f"FB/{f}-{b}": 8.0 for f in ("one", "two", "three") for b in ("one", "two", "three")}
    assert named == prices | alike | pairs | both


def test_stages_between_the_ends_are_not_priced_as_an_end():
    """Where nobody knows which kind most are of the dearest of them stands for all; without one, the dearest end."""

    def named(**cycles):
        keys = {kind: UnitKey("F", tuple(kind.split("_to_"))) for kind in cycles}
        units = with_usual({keys[kind]: unit(each) for kind, each in cycles.items()})
        return {str(key): unit.cycles for key, unit in units.items() if "middle_" not in str(key)}

    between = {"middle_2": 3.0, "middle_3": 4.0}
    assert named(first=5.0, last=9.0, **between) == {"F": 4.0, "F/first": 5.0, "F/last": 9.0}
    assert named(first=5.0, last=9.0) == {"F": 9.0, "F/first": 5.0, "F/last": 9.0}
    assert named(middle=3.0, last=9.0, only=7.0)["F"] == 3.0
    assert named(first_to_last=5.0, middle_2_to_middle_3=4.0) == {"F": 4.0, "F/first-last": 5.0}
