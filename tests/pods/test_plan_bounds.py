"""Cases that are not compiled: bounds by hand, what is counted, and the best of all found all the same."""

import dataclasses
import json
import math
import random
import re
import threading

import pytest

from dualpipe_jax.command import answers, cpu_budget
from dualpipe_jax.command import plan as plan_command
from dualpipe_jax.command.options import ChildDied, CommandError
from dualpipe_jax.pods import planner
from dualpipe_jax.pods.bounds import MARGIN, Bounds, Cut, StepBound
from dualpipe_jax.pods.results import Unit
from dualpipe_jax.schedule import CostModel, Op, dualpipe, simulate
from tests.pods.test_planner import (
    BASE,
    CYCLES,
    GIB,
    PRODUCTS,
    SIZES,
    TARGET,
    answer,
    asking,
    explored,
    keyed,
    layered,
    wanted,
)

CLOCK = 1.5e9


def plan(schedule, pp=4, microbatches=8, **more):
    chosen = {"ep": 8 // pp, "microbatch_size": 8 // pp, "microbatches": microbatches}
    return dataclasses.replace(BASE, schedule=schedule, pp=pp, **(chosen | more))


def counted(schedule="one_f_one_b", **more):
    return answer(plan(schedule), "nothing", **more)


def units(cycles):
    return keyed({name: Unit(each, each, None, 0.0, 0) for name, each in cycles.items()})


def products(work):
    """Those of a stage that has so many times as much to multiply."""
    return units({op: work * cycles for op, cycles in PRODUCTS.items()})


def test_the_least_step_by_hand():
    """1F1B on p ranks with m microbatches: (m + p - 1)(F + B) where all stages take as long."""
    least, f, b = StepBound(plan("one_f_one_b"), counted()), PRODUCTS["F"], PRODUCTS["B"]
    assert least.seconds(plan("one_f_one_b"), {}) == pytest.approx(11 * (f + b) / CLOCK)
    assert least.seconds(plan("one_f_one_b"), {"F": 2.0}) == pytest.approx(11 * (2 * f + b) / CLOCK)
    halves = least.seconds(plan("zb_h1"), {})
    assert 8 * (f + b) / CLOCK < halves < 11 * (f + b) / CLOCK


def test_stages_that_were_not_counted_have_an_even_share():
    """Four stages whose last takes thrice as long: twelve F of a step's work, of which each of eight has an eighth."""
    f = 1e6
    products = {"F": f, "I": f, "W": f, "B": 2 * f}
    last = {f"{op}/last": 3 * cycles for op, cycles in products.items()}
    found = dataclasses.replace(counted(), products=units(products | last))
    least = StepBound(plan("one_f_one_b"), found)
    same = least.seconds(plan("one_f_one_b"), {})
    assert same * CLOCK > 8 * 9 * f, "the last rank alone"
    even = 6 / 4 * f  # a stage's F
    long = least.seconds(plan("zb_v", microbatches=64), {})
    assert long * CLOCK == pytest.approx(64 * 3 * even, rel=0.1) and long * CLOCK > 64 * 3 * even


def test_a_stage_of_a_v_counts_half_of_a_stage_in_line():
    least = StepBound(plan("v_half"), counted("v_half"))
    both = 2 * (PRODUCTS["F"] + PRODUCTS["B"])
    assert least.seconds(plan("one_f_one_b"), {}) == pytest.approx(11 * both / CLOCK)


def test_a_cut_that_was_not_counted_has_the_work_of_another():
    """Half the ranks have twice the layers; a microbatch of as many sequences has half of them on each device."""
    least, both = StepBound(plan("one_f_one_b"), counted()), PRODUCTS["F"] + PRODUCTS["B"]
    two_ranks = plan("one_f_one_b", pp=2, microbatch_size=2)
    assert least.seconds(two_ranks, {}) == pytest.approx(9 * 2 * both / 2 / CLOCK)
    two_each = plan("one_f_one_b", pp=2, microbatch_size=8)
    assert least.seconds(two_each, {}) == pytest.approx(9 * 2 * both * 2 / CLOCK)
    replicas = plan("one_f_one_b", dp=2, ep=1)  # share a microbatch as devices of one replica do
    assert least.seconds(replicas, {}) == pytest.approx(11 * both / CLOCK)


class LastStageHalfAsMuchAgain(CostModel):
    """Alone a unit takes thrice its products, in a pair once."""

    def of(self, slot, placement):
        last = placement.num_model_stages - 1
        each = [
            PRODUCTS[action.op.name] * (1.5 if placement.model_stage(action.stage) == last else 1.0)
            for action in slot
        ]
        return sum(each) if len(each) == 2 else 3 * each[0]


def test_what_an_end_takes_more_may_be_hidden_in_its_pairs():
    last = {f"{op}/last": 1.5 * cycles for op, cycles in PRODUCTS.items()}
    found = dataclasses.replace(counted("dualpipe"), products=units(PRODUCTS | last))
    alone = dict.fromkeys(("F", "B", "I", "W"), 3.0)
    least = StepBound(plan("dualpipe"), found).seconds(plan("dualpipe"), alone)
    by_hand = simulate(dualpipe(4, 8), LastStageHalfAsMuchAgain(1.0, 1.0, 1.0)).makespan
    assert least * CLOCK == pytest.approx(by_hand)


class FirstStageThreeFourthsLess(CostModel):
    """Alone a forward takes twenty times its products, in a pair both take half as much again.

    What the first stage's B takes less in a pair is what its I and W do.
    """

    def of(self, slot, placement):
        usual = [PRODUCTS[action.op.name] for action in slot]
        first = [placement.model_stage(action.stage) == 0 for action in slot]
        if len(slot) == 1:
            return usual[0] * (0.25 if first[0] else 1.0) * (20 if slot[0].op is Op.F else 1)
        less = 0.75 * first[0] * PRODUCTS["F"] + 0.75 * first[1] * (PRODUCTS["I"] + PRODUCTS["W"])
        return 1.5 * (sum(usual) - less)


@pytest.mark.parametrize("same_cut", [True, False])
def test_what_an_end_takes_less_is_as_much_nearer_to_its_products_as_the_pair(same_cut):
    """As F alone it would take away more than a pair has: V3 on 8 ranks of 128 devices showed it."""
    first = {f"{op}/first": 0.25 * cycles for op, cycles in PRODUCTS.items()}
    found = dataclasses.replace(counted("dualpipe"), products=units(PRODUCTS | first))
    far = {"F": 20.0, "FB": 1.5}
    least = StepBound(plan("dualpipe"), found)
    if same_cut:
        by_hand = simulate(dualpipe(4, 8), FirstStageThreeFourthsLess(1.0, 1.0, 1.0)).makespan
        assert least.seconds(plan("dualpipe"), far) * CLOCK == pytest.approx(by_hand)
    else:  # four stages of which one takes a fourth: 13/16 of a stage each, on two ranks twice that
        share = 13 / 16 * 2 / 2
        f, i, w, b = (share * PRODUCTS[op] for op in "FIWB")
        costs = CostModel(20 * f, i, w, FB=1.5 * (f + b))
        by_hand = simulate(dualpipe(2, 8), costs).makespan
        two_ranks = plan("dualpipe", pp=2, microbatch_size=2)
        assert least.seconds(two_ranks, far) * CLOCK == pytest.approx(by_hand)


def test_units_come_no_nearer_to_their_products_than_those_that_were_compiled():
    (case,), _ = planner.cases(wanted(schedules=("zb_h1",)), 8)
    bounds = Bounds([case])
    (cut,) = bounds.cuts()
    assert not bounds.add_counts(cut, answer(case.plan, "nothing"))
    before = bounds.seconds(case)
    bounds.add_prices(planner.Prices(case, "nothing", answer(case.plan, "units")))
    ops = {"F", "I", "W", "B"}
    factors = bounds.factors(case.plan)
    assert factors == pytest.approx({op: MARGIN * CYCLES[op] / PRODUCTS[op] for op in ops})
    assert bounds.seconds(case) > before and "FB" not in factors, "no pair was compiled"
    fewer, more = (dataclasses.replace(case.plan, microbatch_size=size) for size in (2, 8))
    assert bounds.factors(fewer) == factors, "small units come no nearer"
    assert bounds.factors(more) == dict.fromkeys(ops, 1.0), "larger ones may, but do not take less time"
    slower = answer(case.plan, "units", cycles={op: 9 * CYCLES[op] for op in ops})
    now = bounds.seconds(case)
    bounds.add_prices(planner.Prices(case, "nothing", slower))
    assert bounds.seconds(case) == now, "the nearest counts"


def test_what_units_tell_of_larger_ones_of_longer_stages_and_of_another_remat():
    """Nine times as long as products: one twice as large takes no less time, so 4.5 times as long as its own."""
    (case,), _ = planner.cases(wanted(schedules=("zb_h1",), pp=(4,), tokens=16384), 8)
    bounds = Bounds([case])
    assert not bounds.add_counts(Cut.of(case.plan), answer(case.plan, "nothing"))
    bounds.add_prices(
        planner.Prices(
            case, "nothing", answer(case.plan, "units", cycles={op: 9 * PRODUCTS[op] for op in "FBIW"})
        )
    )
    known = dict.fromkeys("FBIW", 9 * MARGIN)
    assert bounds.factors(case.plan) == pytest.approx(known)
    half = {op: factor / 2 for op, factor in known.items()}
    two_each = dataclasses.replace(case.plan, microbatch_size=2 * case.plan.microbatch_size)
    two_ranks = dataclasses.replace(case.plan, pp=2, ep=4, microbatch_size=2 * case.plan.microbatch_size)
    assert bounds.factors(two_each) == bounds.factors(two_ranks) == pytest.approx(half)
    replicas = dataclasses.replace(case.plan, dp=2, ep=case.plan.ep // 2)
    assert bounds.factors(replicas) == pytest.approx(known), "as many sequences on a device"
    assert not bounds.factors(dataclasses.replace(case.plan, remat="none")), (
        "what is kept is written and read"
    )
    assert not bounds.factors(dataclasses.replace(case.plan, dispatch="dropless"))


def test_what_keeps_no_less_than_what_does_not_fit_is_not_counted():
    asked = []

    def ask(plan, compile, title):
        asked.append((plan.microbatch_size, plan.remat, plan.shard, compile))
        huge = plan.remat != "all" or plan.microbatch_size > 4
        return answer(plan, compile, fixed=(99 if huge else 2) * GIB)

    search = explored(ask, remats=planner.REMATS, per_device=(1, 2), schedules=("1f1b",))
    count = [
        (size, remat)
        for size, remat, shard, compile in asked
        if (shard, compile) == ("parameters", "nothing")
    ]
    assert list(dict.fromkeys(count)) == [(4, "all"), (4, "wide"), (8, "all")], "the others keep more"
    why = {(c.plan.microbatch_size, c.plan.remat): c.refused for c in search.choices if c.refused}
    assert "not counted" not in why[4, "wide"]
    assert why[8, "none"].startswith("not counted: remat wide of 4 sequences needs 102.0 GiB of 16.0")


def test_cuts_that_keep_more():
    least = Cut(1, 2, 4, "capacity", "wide")
    for other, more in (
        (least._replace(remat="none"), True),
        (least._replace(microbatch_size=8), True),
        (least._replace(remat="all"), False),
        (least._replace(microbatch_size=8, remat="all"), False),
        (least._replace(pp=4), False),
        (least._replace(dp=2), False),
        (least._replace(microbatch_size=2, remat="none"), False),
        (least._replace(dispatch="dropless"), False),
    ):
        assert other.needs_no_less(least) == more, other


def test_of_bounds_that_are_nearly_equal_what_keeps_least_goes_first():
    """Computing all again takes 4 % more products here, 40 % there; less than the margin tells nothing."""
    for more, first in ((1.04, "all"), (1.4, "none")):
        compiled = []

        def ask(plan, compile, title, more=more, compiled=compiled):
            if compile == "units":
                compiled.append(plan.remat)
            work = more if plan.remat == "all" else 1.0
            return dataclasses.replace(answer(plan, compile), products=products(work))

        explored(ask, schedules=("1f1b",), remats=("none", "all"))
        assert compiled[0] == first


@pytest.mark.parametrize("refused", [0.0, 2.0])
def test_what_has_room_to_spare_goes_first_until_something_was_compiled(refused):
    """Without remat 14 GiB of 16 are counted and a step is shorter; compiled, it may need more than there is."""
    compiled = []

    def ask(plan, compile, title, **_):
        if compile == "units":
            compiled.append(plan.remat)
        again = plan.remat == "all"
        work = 1.2 if again else 1.0
        products = {op: work * cycles for op, cycles in PRODUCTS.items()}
        sizes = {"fixed": (2.0 if again else 12.0) * GIB, "beyond": 0 if again else int(refused * GIB)}
        cycles = {op: 1.3 * products.get(op, 1.6e6 * work) for op in ("F", "B", "I", "W", "FB")}
        found = answer(
            plan, compile, cycles={op: cycles[op] for op in planner.units_of(plan.make_schedule())}, **sizes
        )
        return dataclasses.replace(found, products=units(products))

    search = explored(ask, schedules=("zb_h1",), remats=("none", "all"), stashes=(1,))
    assert compiled[:2] == ["all", "none"]
    assert planner.ranked(search.choices)[0].plan.remat == ("all" if refused else "none")


@pytest.mark.parametrize("beyond, order", [(3.0, ["local", "all", "wide"]), (1.0, ["local", "wide", "all"])])
def test_what_a_program_needed_beyond_what_was_counted_is_expected_of_others(beyond, order):
    """Of 16 GiB 14.5 are counted for the shortest, which goes last if the others need more than 1.5 besides."""
    counted = {"wide": 14.5, "local": 12.0, "all": 4.0}
    compiled = []

    def ask(plan, compile, title):
        if compile == "units":
            compiled.append(plan.remat)
        work = {"wide": 1.0, "local": 1.2, "all": 1.6}[plan.remat]
        products = {op: work * cycles for op, cycles in PRODUCTS.items()}
        sizes = {"fixed": (counted[plan.remat] - 3.5) * GIB, "beyond": int(beyond * GIB)}
        cycles = {op: 2.0 * products[op] for op in planner.units_of(planner.schedule_of(plan))}
        return dataclasses.replace(answer(plan, compile, cycles=cycles, **sizes), products=units(products))

    explored(ask, schedules=("zb_h1",), remats=tuple(counted), stashes=(1,), shards=("nothing",))
    assert compiled == order


def test_what_the_compiler_has_no_memory_for_needs_at_least_what_there_is():
    (case,), _ = planner.cases(wanted(schedules=("zb_h1",)), 8)
    found = answer(case.plan, "units")
    assert planner.Prices(case, "nothing", found).beyond == 0
    refused = dataclasses.replace(found, compiled=dataclasses.replace(found.compiled, out_of_memory="no"))
    assert planner.Prices(case, "nothing", refused).beyond == pytest.approx(10.5 * GIB), "5.5 are counted"


def test_of_cases_that_keep_as_much_the_one_of_shortest_stages_goes_first():
    compiled = []

    def ask(plan, compile, title):
        if compile == "units":
            compiled.append((plan.pp, plan.schedule))
        work = {2: 1.0, 4: 0.5}[plan.pp]
        return dataclasses.replace(answer(plan, compile), products=products(work))

    explored(ask, schedules=("zb_h1",), pp=(2, 4), tokens=16384)
    assert compiled[0] == (4, "zb_h1"), "two ranks have a smaller bubble, by a hundredth"


@pytest.mark.parametrize("half, first", [(0.6, 4), (0.7, 2)])
def test_the_shortest_stages_go_first_if_their_bound_is_nearly_as_good(half, first):
    """Two ranks' bound is shorter by 17 or by 29 %, both more than the margin that holds later on."""
    cases, _ = planner.cases(wanted(schedules=("1f1b",), pp=(2, 4), tokens=16384), 8)
    bounds = Bounds(cases)
    for cut in bounds.cuts():
        work = {2: 1.0, 4: half}[cut.pp]
        found = answer(bounds.representative(cut), "nothing")
        bounds.add_counts(cut, dataclasses.replace(found, products=products(work)))
    assert bounds.choose_next(bounds.open_cases()).plan.pp == first


def found_by(seed, *, whole):
    """A search over units that take from once to three times their products' time, alike in a remat but for 4 %."""
    rng = random.Random(seed)
    factors = {
        remat: {op: rng.uniform(1, 3) for op in ("F", "B", "I", "W", "FB")} for remat in ("none", "all")
    }
    again = {"none": 1.0, "all": rng.uniform(1.0, 1.4)}
    compiled = []

    def ask(plan, compile, title):
        own = random.Random(f"{seed} {plan.remat} {plan.microbatch_size} {plan.schedule}")
        work = plan.microbatch_size / 4 * again[plan.remat]
        products = {op: work * cycles for op, cycles in PRODUCTS.items()} | {"FB": work * 1.6e6}
        cycles = {
            op: factors[plan.remat][op] * own.uniform(1, 1.04) * least for op, least in products.items()
        }
        if compile == "units":
            compiled.append(plan)
        ops = planner.units_of(planner.schedule_of(plan))
        found = answer(plan, compile, cycles={op: cycles[op] for op in ops})
        del products["FB"]
        return dataclasses.replace(found, products=units(products))

    search = asking(ask)
    schedules = planner.SCHEDULES
    search.explore(
        wanted(schedules=schedules, remats=("none", "all"), per_device=(1, 2), pp=(2, 4)), whole=whole
    )
    return planner.ranked(search.choices)[0], compiled, search


def test_the_best_of_all_is_found_with_few_compiled_and_each_best_so_far_is_named_once(capsys):
    few = many = 0
    for seed in range(5):
        best_of_all, all_compiled, _ = found_by(seed, whole=True)
        capsys.readouterr()
        best, compiled, search = found_by(seed, whole=False)
        assert best == best_of_all, seed
        assert len(compiled) + len(search.excluded) == len(all_compiled)
        assert all(found.seconds >= best.seconds for found in search.excluded), "each bound excludes its case"
        few, many = few + len(compiled), many + len(all_compiled)
        said = re.findall(r"the best so far takes (\S+) s", capsys.readouterr().err)
        assert said == sorted(set(said), key=float, reverse=True) and len(said) < len(compiled), seed
        assert said[-1] == f"{best.seconds:.4g}"
    assert few < many / 2


@pytest.mark.parametrize("minutes, compiled", [(None, 2), (28.0, 2), (27.0, 1), (1.0, 1)])
def test_cpu_minutes(monkeypatch, minutes, compiled):
    """Units take ten, a count two: the first case ends after 18. It is begun in any event, the next if its units will
    end in time, should they take as long."""
    used, priced = [0.0], []
    monkeypatch.setattr(cpu_budget, "_minutes", lambda: used[0])

    def ask(plan, compile, title):
        used[0] += {"nothing": 2.0, "usual": 0.0, "units": 10.0}[compile]
        if compile == "units":
            priced.append(plan.schedule)
        return answer(plan, compile, cycles={op: CYCLES[op] for op in planner.units_of(plan.make_schedule())})

    search = asking(ask, minutes)
    monkeypatch.setitem(CYCLES, "FB", 9e6)  # so that no bound excludes the other case
    search.explore(wanted())
    assert len(priced) == compiled
    assert [found.why for found in search.excluded] == ["no CPU minutes left"] * (2 - compiled)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("minutes, timed", [(None, 2), (21.0, 2), (20.0, 1), (1.0, 1)])
def test_cpu_minutes_where_units_are_timed(monkeypatch, capsys, minutes, timed, whole):
    """Units take nine, a count one: minutes end the search as where units are compiled, unless all are asked for."""
    used, priced = [0.0], []
    monkeypatch.setattr(cpu_budget, "_minutes", lambda: used[0])

    def ask(plan, compile, title):
        used[0] += {"nothing": 1.0, "units": 9.0}[compile]
        if compile == "units":
            priced.append(plan.schedule)
        return dataclasses.replace(answer(plan, compile), products={})

    search = asking(ask, minutes, target="cpu:8")
    search.explore(wanted(), whole=whole)
    left = 0 if whole else 2 - timed
    assert len(priced) == 2 - left and "the best so far takes" in capsys.readouterr().err
    assert [(found.seconds, found.why) for found in search.excluded] == [(None, "no CPU minutes left")] * left
    assert plan_command.Plan(target="cpu:8").tell(search) == 0
    assert ("\nnot timed: 1 no CPU minutes left\n" in capsys.readouterr().out) == bool(left)


@pytest.mark.parametrize("minutes, compiled", [(30.0, [4, 2]), (29.0, [4, 4])])
def test_stages_that_are_twice_as_long_are_expected_to_take_twice_as_many_minutes(
    monkeypatch, minutes, compiled
):
    """The first takes ten on four ranks, so one on two twenty: with 29 another on four ranks goes before it."""
    used, priced = [0.0], []
    monkeypatch.setattr(cpu_budget, "_minutes", lambda: used[0])

    def ask(plan, compile, title):
        if compile == "units":
            used[0] += 10.0
            priced.append(plan.pp)
        work = {2: 1.0, 4: 0.5}[plan.pp]
        cycles = {op: 3 * work * PRODUCTS[op] for op in planner.units_of(planner.schedule_of(plan))}
        return dataclasses.replace(answer(plan, compile, cycles=cycles), products=products(work))

    explored(ask, minutes=minutes, schedules=("1f1b",), pp=(2, 4), remats=("none", "all"), tokens=256)
    assert priced[:2] == compiled


@pytest.mark.parametrize("minutes", [40.0, 39.0])
def test_shorter_stages_are_not_expected_to_take_fewer_minutes(monkeypatch, minutes):
    used = [0.0]
    monkeypatch.setattr(cpu_budget, "_minutes", lambda: used[0])
    (two, four), _ = planner.cases(wanted(schedules=("1f1b",), pp=(2, 4), tokens=16384), 8)
    budget = cpu_budget.CpuBudget(minutes)
    with budget.recording(two):
        used[0] += 20.0
    assert budget.allows(four) == budget.allows(two) == (minutes == 40.0)


def test_the_page_shows_what_nearly_fits_and_each_other_reason_and_programs_get_all(capsys):
    search = asking()
    sizes = {("dualpipe", "all"): 9, ("dualpipe", "none"): 99, ("zb_v", "all"): 10, ("zb_v", "none"): 98}
    search.choices = [
        planner.Choice(
            plan(name, remat=remat), memory=size * GIB, refused=f"needs {size}.0 GiB of 8.0, counted"
        )
        for (name, remat), size in sizes.items()
    ]
    search.choices += [
        planner.Choice(plan(name, remat="wide"), refused="--ep 2: must divide the 5 experts")
        for name in ("gpipe", "1f1b")
    ]
    assert plan_command.Plan(target=str(TARGET), best=2).tell(search) == 1
    out = capsys.readouterr().out
    assert "needs least; 3 of 6, --json has all\n" in out
    assert re.findall(r"needs (\d+)", out) == ["9", "10"] and out.count("must divide") == 1
    assert plan_command.Plan(target=str(TARGET), best=2, json=True).tell(search) == 1
    assert len(json.loads(capsys.readouterr().out)["refused"]) == 6


def test_the_page_says_what_room_experts_have_and_which_dispatch_cannot_be_had(capsys):
    """Without a bound dropless needs room for all tokens at each device, which on many is what does not fit."""
    search = asking()
    search.answers.dispatches = True
    search.choices = [
        planner.Choice(plan("dualpipe", dispatch=way), refused=f"needs {size}.0 GiB of 8.0, counted")
        for way, size in (("dropless", 562), ("capacity", 9))
    ]
    assert plan_command.Plan(target=str(TARGET)).tell(search) == 1
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "room at the experts, in even loads (--capacity-factor): dropless for all, capacity 2" in lines
    assert "schedule pp x ep microbatches remat dispatch why" in lines
    for way, size in (("dropless", 562), ("capacity", 9)):
        assert f"dualpipe 4 x 2 8 of 2 {BASE.remat} {way} needs {size}.0 GiB of 8.0, counted" in lines
    assert plan_command.rooms(["dropless"], 1.25).endswith(": dropless 1.25")
    search.answers.dispatches = False
    plan_command.Plan(target=str(TARGET)).tell(search)
    assert "room at the experts" not in capsys.readouterr().out


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize(
    "given, fits, longer, factor",
    [(None, True, 1.9, None), (None, True, 2.1, 1.25), (None, False, 1.0, 1.25), (1.5, False, 1.0, 1.5)],
    ids=["room for all", "far longer", "does not fit", "given"],
)
def test_dropless_is_bounded_only_where_room_for_all_tokens_is_out_of_reach(
    capsys, given, fits, longer, factor, whole
):
    def ask(plan, compile, title):
        search.answers.dispatches = True
        unbounded = plan.dispatch == "dropless" and plan.capacity_factor is None
        times = longer if unbounded else 1.0
        found = answer(plan, compile, fixed=99 * GIB if unbounded and not fits else None)
        return dataclasses.replace(found, products=products(times))

    search = asking(ask)
    asked = wanted(schedules=("1f1b",), dispatches=planner.DISPATCHES)
    asked = dataclasses.replace(asked, base=dataclasses.replace(BASE, capacity_factor=given))
    search.explore(asked, whole=whole)
    assert {choice.plan.capacity_factor for choice in search.choices} == {factor}
    told = "room for all tokens" in capsys.readouterr().err
    assert plan_command.Plan(target=str(TARGET), cpu_minutes=0).tell(search) == 0
    out = capsys.readouterr().out
    assert told == ("without a bound dropless " in out) == (factor == 1.25)
    rooms = {None: "dropless for all, capacity 2", 1.25: "dropless 1.25, capacity 1.25"}
    assert rooms.get(factor, "dropless 1.5, capacity 1.5") in out


@pytest.mark.parametrize("fits, factor", [(True, None), (False, 1.25)])
def test_where_units_are_timed_dropless_is_bounded_only_if_all_tokens_do_not_fit(fits, factor):
    """Before they are timed nothing says how long they take: there are no products."""

    def ask(plan, compile, title):
        search.answers.dispatches = True
        found = answer(plan, compile, fixed=None if fits or plan.capacity_factor else 99 * GIB)
        return dataclasses.replace(found, products={})

    search = asking(ask, target="cpu:8")
    search.explore(wanted(schedules=("1f1b",), dispatches=("dropless",)))
    assert {choice.plan.capacity_factor for choice in search.choices} == {factor}


def test_the_memory_of_this_machine_that_units_need_is_told_before_they_run(capsys):
    """Each of eight devices needs what was counted of one; the machine has as much as all eight."""

    def ask(plan, compile, title):
        if compile == "units":
            told.append(capsys.readouterr().err)
        return dataclasses.replace(answer(plan, compile, memory=16 * GIB), products={})

    told = []
    asking(ask, target="cpu:8").explore(wanted(schedules=("1f1b",)))
    own = answer(plan("one_f_one_b", pp=2), "nothing").memory.needed / GIB
    assert len(told) == 1 and told[0].endswith(
        f"case 1 of 1: its units run here, in about {8 * own:.2f} GiB of this machine's 128.00, and what they compute "
        "with: one_f_one_b, 2 x 4, remat all, capacity; less with a smaller --sequence or --per-device, or "
        "--remat all\n"
    )
    explored(schedules=("1f1b",))
    assert "run here" not in capsys.readouterr().err


def test_what_is_told_meanwhile(capsys):
    search = explored()
    cut, first, *bounds, estimate, last = capsys.readouterr().err.splitlines()
    assert re.fullmatch(
        r"2 x 4, 4 sequences, remat all, capacity: 2 cases may fit, at least \d.\d+ s, 3.0 GiB", cut
    )
    assert first == "2 cases left; by products and bubbles alone a step takes at least"
    assert [line.split(": ")[1].split(",")[0] for line in bounds] == ["dualpipe", "zb_h1"]
    sizes = [float(line.split(" s, ")[1].split(" GiB")[0]) for line in bounds]
    assert sizes[0] > sizes[1] == 3.0, "DualPipe keeps each stage twice"
    best = planner.ranked(search.choices)[0]
    time = f"{best.seconds:.4g} s, {100 * best.mfu:.1f} % MFU"
    assert last == f"the best so far takes {time}: {best.plan.schedule}, 2 x 4, remat all, capacity"
    step = answer(best.plan, "usual").step
    assert estimate == (
        f"were all stages like most of them, a step took {step.seconds:.4g} s, {100 * step.mfu:.1f} % MFU: "
        "dualpipe, 2 x 4, remat all, capacity; compiling the others"
    )
    search.answers.ask = lambda plan, compile, title: answer(plan, compile, memory=GIB)
    search.explore(wanted())
    (cut, none) = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"2 x 4, 4 sequences, remat all, capacity: needs \d+.\d GiB of 1.0, counted", cut)
    assert none == "no case fits"


@pytest.mark.parametrize("error", [None, CommandError("no"), ChildDied("killed", "compiling", {})])
def test_an_estimate_is_asked_for_once_and_decides_nothing(monkeypatch, capsys, error):
    """Of the first case, before its units; one that cannot be had is not told."""
    asked = []

    def ask(plan, compile, title):
        asked.append(compile)
        found = answer(plan, compile)
        if compile == "usual" and error is not None:
            raise error
        return dataclasses.replace(found, step=None) if compile == "usual" else found

    search = asking(ask)
    monkeypatch.setitem(CYCLES, "FB", 9e6)  # so that no bound excludes the other case
    search.explore(wanted())
    assert [each for each in asked if each != "nothing"] == ["usual", "units", "units"]
    assert len(search.prices) == 2 and all(choice.seconds is not None for choice in search.choices)
    assert "were all stages" not in capsys.readouterr().err


def test_no_options_are_told_for_what_needs_more_when_compiled():
    """They are found by what is counted, which is known to be too little."""
    asked = []

    def ask(plan, compile, title, *, hints=False):
        asked.append((compile, hints))
        search.answers.counted.add(Cut.of(plan))
        return answer(plan, compile, memory=16 * GIB, fixed=4 * GIB, beyond=99 * GIB)

    search = asking(ask)
    search.explore(wanted(schedules=("1f1b",)))
    assert ("units", False) in asked and search.choices and all(choice.refused for choice in search.choices)
    assert search.nearest() is None and not any(hints for _, hints in asked)


def test_what_nobody_counted_yet_is_told_as_such(capsys):
    """On two ranks bubbles are smallest, but this program does not run on two, as is found when its turn has come."""
    told, asked = [], []

    def ask(plan, compile, title):
        asked.append((plan.pp, compile))
        if plan.pp == 2:
            raise CommandError("--ep 4: must divide the 6 experts")
        if compile == "units":
            told.append(capsys.readouterr().err)
        return answer(plan, compile)

    search = explored(ask, pp=(4, 2), schedules=("zb_h1",), tokens=16384)
    counted, others = [line for line in told[0].splitlines() if line.startswith("  ")]
    size = 4 * SIZES["residual_w"] + SIZES["stash"] + SIZES["parameters"]  # four microbatches, as in 1F1B
    (seconds,) = re.fullmatch(
        rf"  (\d.\d+) s, {size / GIB:.1f} GiB: zb_h1, 4 x 2, 512 microbatches of 2, remat all, capacity",
        counted,
    ).groups()
    assert others.endswith(" s: the least of 1 not counted, which may not fit")
    assert float(others.split()[0]) < float(seconds)
    assert asked.index((4, "units")) < asked.index((2, "nothing")), (
        "the first answer waits for no other count"
    )
    assert "--ep 4: must divide the 6 experts" in {choice.refused for choice in search.choices}


def test_what_cannot_fit_by_far_is_not_told_as_the_least(capsys):
    """About 33 GiB of 16, by those of four sequences."""
    search = explored(tokens=4096, schedules=("1f1b",), per_device=(1, 16))
    told = [line for line in capsys.readouterr().err.splitlines() if line.startswith("  ")]
    assert len(told) == 1 and "microbatches of 4," in told[0]
    assert {c.plan.batch for c in search.choices if " GiB of 16.0, about, by those of " in c.refused} == {64}


def test_what_was_excluded_tells_whether_it_was_counted():
    search = explored(minutes=1e-9, pp=(4, 2), schedules=("zb_h1",), remats=("none", "all"), tokens=16384)
    why = {(found.plan.pp, found.plan.remat): found.why for found in search.excluded}
    not_counted = "no CPU minutes left, not counted: it may not fit"
    assert why == {(4, "none"): "no CPU minutes left", (2, "all"): not_counted, (2, "none"): not_counted}
    seconds = [found.seconds for found in search.excluded]
    assert len(seconds) == 3 and seconds == sorted(seconds)


def test_a_fault_of_all_cuts_ends_the_search():
    def ask(plan, compile, title):
        raise CommandError("there is no such program")

    search = asking(ask)
    with pytest.raises(CommandError, match="no such program"):
        search.explore(wanted())
    assert search.shortest == math.inf


def test_memory_by_another_cut_is_what_a_rank_keeps_for_its_work():
    """1F1B's first rank keeps as many microbatches as there are ranks; parameters and what is fixed stay."""
    least = StepBound(plan("one_f_one_b"), counted())
    residual, rest = SIZES["residual_w"], SIZES["parameters"] + SIZES["fixed"]
    assert least.memory(plan("one_f_one_b"))[0] == 4 * residual + rest
    assert least.memory(plan("one_f_one_b", pp=2, microbatch_size=4))[0] == 2 * 2 * residual + rest
    assert least.memory(plan("one_f_one_b", microbatch_size=4)) == (2 * 4 * residual + rest, 16 * GIB)
    assert least.memory(plan("one_f_one_b", dp=2, ep=1))[0] == 4 * residual + rest, (
        "half as many on each of two"
    )


def test_what_by_another_cut_hardly_fits_is_not_passed_over_until_it_is_counted():
    """19 GiB, about, of 16. Counted it may be less, or as here more."""
    cases, _ = planner.cases(wanted(tokens=4096, schedules=("1f1b",), per_device=(1, 8)), 8)
    bounds = Bounds(cases)
    one, eight = bounds.cuts()
    bounds.add_counts(one, answer(bounds.representative(one), "nothing"))
    (large,) = bounds.cases[eight]
    assert bounds._probably_fits(large) and bounds._counted_for(eight).memory(large.plan)[0] == 19 * GIB
    bounds.add_counts(eight, answer(bounds.representative(eight), "nothing", fixed=14 * GIB))
    assert not bounds._probably_fits(large)


def test_what_needs_far_more_by_another_cut_is_not_counted():
    cases, _ = planner.cases(wanted(tokens=4096, schedules=("1f1b",), per_device=(1, 8, 16)), 8)
    bounds = Bounds(cases)
    one, eight, sixteen = bounds.cuts()
    assert not bounds.add_counts(one, answer(bounds.representative(one), "nothing"))
    assert not bounds.cannot_fit(eight), "19 GiB, about, may be 16"
    (why,) = (choice.refused for choice in bounds.cannot_fit(sixteen))
    assert why == "needs 35.0 GiB of 16.0, about, by those of 2 x 4 and 4 sequences"
    assert [case.plan.microbatch_size for case in bounds.open_cases()] == [4, 32]


def test_what_keeps_more_than_what_needs_far_more_is_not_counted():
    """Of 16 GiB 102 are counted on four ranks with all computed again; on two it is no less, and kept is more."""
    cases, _ = planner.cases(wanted(tokens=4096, schedules=("1f1b",), pp=(2, 4), remats=("local", "all")), 8)
    bounds = Bounds(cases)
    cuts = {(cut.pp, cut.remat): cut for cut in bounds.cuts()}
    bounds.add_counts(
        cuts[4, "all"], answer(bounds.representative(cuts[4, "all"]), "nothing", fixed=99 * GIB)
    )
    (why,) = (choice.refused for choice in bounds.cannot_fit(cuts[2, "local"]))
    by = "by those of 4 x 2 and 2 sequences of remat all"
    assert why.startswith("needs 10") and why.endswith(f" GiB of 16.0, about, {by}")
    assert not bounds.is_known(cuts[2, "local"]), "its work is not that of remat all"


@pytest.mark.parametrize("gib, first", [(16, "nothing"), (5.2, "optimizer"), (3.1, "parameters")])
def test_units_are_compiled_first_with_as_little_shared_out_as_there_is_probably_room_for(gib, first):
    """Counted are 5, 4 and 3 GiB, and a program needs more. Of 3.1 GiB the last may do, though it is not probable."""
    compiled = []

    def ask(plan, compile, title):
        if compile == "units":
            compiled.append(plan.shard)
        return answer(plan, compile, memory=gib * GIB)

    search = explored(ask, schedules=("1f1b",))
    assert compiled == [first]
    assert [choice.plan.shard for choice in planner.ranked(search.choices)] == [first]


@pytest.mark.parametrize("minutes, compiled", [(20.0, 2), (19.0, 1)])
def test_more_is_shared_out_only_if_its_units_end_in_time(monkeypatch, minutes, compiled):
    """With nothing shared out only a stash of one fits. Counts take no time here, units ten minutes each."""
    used, asked = [0.0], []
    monkeypatch.setattr(cpu_budget, "_minutes", lambda: used[0])

    def ask(plan, compile, title):
        if compile == "units":
            used[0] += 10.0
            asked.append(plan.shard)
        return answer(plan, compile, memory=8.8 * GIB)

    search = explored(ask, minutes=minutes, schedules=("zb_h1",), pp=(4,), stashes=(1, None))
    assert asked == ["nothing", "optimizer"][:compiled]
    left = [(found.plan.shard, found.plan.max_stash, found.why) for found in search.excluded]
    assert left == [("optimizer", None, "no CPU minutes left")][: 2 - compiled]
    assert all(found.seconds < search.shortest for found in search.excluded)


def test_what_the_compiler_refused_raises_what_is_expected_of_the_next():
    """It made one that took 1 GiB beyond what is counted; another did not fit into 4 beyond it."""
    (case, *_), _ = planner.cases(wanted(schedules=("1f1b",)), 8)
    bounds = Bounds([case])
    bounds.add_counts(
        Cut.of(case.plan), answer(bounds.representative(Cut.of(case.plan)), "nothing", memory=6 * GIB)
    )
    made = planner.Prices(case, "nothing", answer(case.plan, "units", beyond=GIB))
    bounds.add_prices(made)
    assert bounds._probably_fits(case)
    refused = answer(case.plan, "units", memory=9 * GIB)
    refused = dataclasses.replace(
        refused, step=None, compiled=dataclasses.replace(refused.compiled, out_of_memory="RESOURCE_EXHAUSTED")
    )
    bounds.add_prices(planner.Prices(case, "nothing", refused))
    assert not bounds._probably_fits(case)
    bounds.add_prices(made)
    assert bounds._probably_fits(case)


def test_both_ways_to_experts_are_counted_at_once(monkeypatch):
    """After one, which tells whether they differ at all: two counts wait for each other, or in vain."""
    monkeypatch.setattr(answers, "_AT_ONCE", 2)
    together, asked, ways = threading.Barrier(2), [], planner.DISPATCHES
    second = {("all", ways[1]), ("wide", ways[0])}

    def ask(plan, compile, title):
        if title == "counting":
            asked.append((plan.remat, plan.dispatch))
            search.answers.dispatches = True
            if (plan.remat, plan.dispatch) in second:
                together.wait(timeout=60)
        return answer(plan, compile)

    search = asking(ask)
    search.explore(wanted(schedules=("1f1b",), remats=("wide", "all"), dispatches=ways))
    assert asked[0] == ("all", ways[0]) and set(asked[1:3]) == second
    assert asked[3:] == [("wide", ways[1])]


def test_an_interruption_cancels_the_counts_that_have_not_begun(monkeypatch):
    monkeypatch.setattr(answers, "_AT_ONCE", 1)
    asked = []

    def ask(plan, compile, title):
        asked.append(plan.pp)
        raise KeyboardInterrupt

    search = asking(ask)
    with pytest.raises(KeyboardInterrupt):
        search.answers.count_at_once([plan("dualpipe", pp=pp) for pp in (2, 4, 8)])
    assert asked == [2]


def test_no_plan_is_called_the_one_that_needs_least_where_others_were_not_tried(capsys):
    asked = []

    def ask(plan, compile, title, *, hints=False):
        asked.append(hints)
        search.answers.counted.add(Cut.of(plan))
        return answer(plan, compile, fixed=(99 if plan.remat == "none" else 2) * GIB, beyond=99 * GIB)

    search = asking(ask, 1e-9)
    search.explore(wanted(remats=("none", "all")))
    assert [found.why for found in search.excluded] == ["no CPU minutes left"]
    assert plan_command.Plan(target=str(TARGET)).tell(search, search.nearest()) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "no plan that was compiled fits, but these may: --cpu-minutes" in said
    assert not any(asked) and "--schedule" not in said


@pytest.mark.parametrize("whole, moved", [(True, True), (False, False)])
def test_layers_are_not_moved_without_a_word(monkeypatch, capsys, whole, moved):
    """Without minutes they stay, and that is told; --whole has no such limit."""
    used = [0.0]
    monkeypatch.setattr(cpu_budget, "_minutes", lambda: used[0])
    asked = []

    def ask(plan, compile, title):
        used[0] += 10.0
        asked.append(plan.stage_layers)
        return layered(plan, compile)

    explored(ask, minutes=20.0, whole=whole, pp=(4,), schedules=("1f1b",), shards=("nothing",), moves=1)
    assert ((2, 3, 3, 1) in asked) == moved
    assert ("no layers are moved between stages: no CPU minutes left" in capsys.readouterr().err) != moved
