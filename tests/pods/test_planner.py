"""Plans: what is enumerated, priced by units given by hand, kept on disk, gone on with, written and read back."""

import dataclasses
import functools
import importlib.util
import itertools
import json
import re
import sys

import pytest

import models
from dualpipe_jax.__main__ import main
from dualpipe_jax.command import answers, planning
from dualpipe_jax.command import plan as command
from dualpipe_jax.command.answers import Answers
from dualpipe_jax.command.options import ChildDied, CommandError
from dualpipe_jax.inspect.target import Target
from dualpipe_jax.pods import Answer, Plan, ahead, dryrun, planner
from dualpipe_jax.pods.cache import Cache, _digest, default_folder
from dualpipe_jax.pods.costs import units_of
from dualpipe_jax.pods.dryrun import draw
from dualpipe_jax.pods.plain import filled, plain
from dualpipe_jax.pods.plan import read_plan
from dualpipe_jax.pods.request import Request
from dualpipe_jax.pods.results import (
    CollectiveTotals,
    Compiled,
    Memory,
    MemorySaving,
    Overheads,
    Parameters,
    Prediction,
    TargetFigures,
    Unit,
)
from dualpipe_jax.pods.stage_memory import StageMemory
from dualpipe_jax.schedule import CostModel, MemoryModel, dualpipe, lower, one_f_one_b, simulate, zb_h1
from dualpipe_jax.schedule.costs import stages_a_share
from tests.pods import own_program
from tests.pods.test_predict import keyed
from tests.pods.whole_backwards import WholeBackwards
from train.config import ConfigError
from train.model import model_config
from train.options import parse

TPU = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
TARGET = Target.parse("v5e:2x4")
BASE = Plan("tiny", sequence=16)
GIB = 2**30
CYCLES = {"F": 1e6, "I": 1e6, "W": 5e5, "B": 1.4e6, "FB": 2e6}
PRODUCTS = {"F": 6e5, "I": 6e5, "W": 4e5, "B": 1e6}
"""Cycles of matrix products alone."""
BESIDE = {"nothing": 7000.0, "optimizer": 9000.0, "parameters": 50e3}
UPDATE = {"nothing": 80e3, "optimizer": 40e3, "parameters": 10e3}
"""Cycles of what stands beside the ticks, by what is shared out."""
SIZES = {"residual_w": 1.0 * GIB, "stash": 0.5 * GIB, "parameters": 1.0 * GIB, "fixed": 2.0 * GIB}


def kept_of(plan):
    """Stages all alike, whose share of a rank's values is that of their layers."""
    placement = plan.make_schedule().placement
    sizes = tuple(SIZES[name] / stages_a_share(placement) for name in ("residual_w", "stash"))
    return StageMemory((0,) * placement.num_model_stages, ("F",), (("FW",), ("IW",)), sizes, 0, CostModel())


def machine(memory=16 * GIB):
    return TargetFigures(str(TARGET), 8, memory, 197e12, 819e9, 1.5e9)


def answer(plan, compile, *, memory=16 * GIB, fixed=None, beyond=0, cycles=None, layers=()):
    """As a dry run would: units of the schedule, sizes of a share; a step that says what MFU is a share of."""
    less = planner.SHARDS.index(plan.shard) * GIB
    sizes = SIZES | {"fixed": SIZES["fixed"] - less if fixed is None else fixed}
    kinds = {"optimizer": 0, "stages": 3 * GIB}
    memory = Memory(kinds, 0, beyond, 0, memory, True, sizes, kept_of(plan))
    total = round(planner.needed(plan, memory))
    memory = dataclasses.replace(memory, total=total, needed=total + beyond)
    products = keyed({name: Unit(each, each, None, 0.0, 0) for name, each in PRODUCTS.items()})
    found = Answer(machine(memory.limit), plan, tuple(layers), memory=memory, products=products)
    if compile == "nothing":
        return found
    cycles = cycles or {name: CYCLES[name] for name in units_of(plan.make_schedule())}
    units = keyed({name: Unit(each, each, 0.0, 0.0, 0) for name, each in cycles.items()})
    beside, update = Overheads(100.0, BESIDE[plan.shard]), Unit(UPDATE[plan.shard], 0.0, 0.0, 0.0, 0)
    compiled = Compiled(
        "units", units=units, sends=CollectiveTotals(each=1e4), overheads=beside, update=update
    )
    step = Prediction(
        1.0, 1.0, 0.0, seconds=2.0, tokens=64, tokens_per_second=1.0, mfu=0.25e-3, lower_bound=False
    )
    return dataclasses.replace(found, compiled=compiled, step=step)


LEAST = 2.0 * 0.25e-3
"""Seconds at the peak."""


def wanted(**more):
    options = {"pp": (2,), "per_device": (1,), "remats": ("all",), "schedules": ("dualpipe", "1f1b", "zb_h1")}
    return planner.Wanted(BASE, **{**options, "stashes": (None, 1), "dispatches": ("capacity",), **more})


def asking(ask=lambda plan, compile, title: answer(plan, compile), minutes=None, target=str(TARGET)):
    """A search whose questions ``ask(plan, compile, title)`` answers."""
    search = planning.Search(Answers(target, None, None), minutes)
    search.answers.ask = ask
    return search


def explored(*ask, minutes=None, whole=False, **more):
    """The same, after it has looked at all that is ``wanted``."""
    search = asking(*ask, minutes=minutes)
    search.explore(wanted(**more), whole=whole)
    return search


def test_what_is_considered():
    cases, refused = planner.cases(wanted(remats=("none", "all"), per_device=(1, 2)), 8)
    assert not refused and len(cases) == 2 * 2 * 2, "remat, sequences, and two placements"
    both, line, *_ = cases
    assert {plan.schedule for plan in both.plans} == {"dualpipe"}
    found = {(plan.schedule, plan.max_stash) for plan in line.plans}
    no_stash = "1F1B keeps no stash that could be limited"
    assert found == {("one_f_one_b", None), ("zb_h1", None), ("zb_h1", 1)}, no_stash
    assert (line.plan.pp, line.plan.ep, line.plan.microbatch_size, line.plan.num_microbatches) == (2, 4, 4, 8)
    assert {(c.plan.microbatch_size, c.plan.num_microbatches) for c in cases} == {(4, 8), (8, 4)}
    ops = set(units_of(line.plan.make_schedule()))
    assert ops >= {"F", "B", "I", "W"}, "what stands for all of them runs whole backwards and halves"
    assert line.plan.max_stash == 1, "units of a program that does not fit are not those of one that does"


def test_what_is_named_twice_is_one_case():
    once, _ = planner.cases(wanted(), 8)
    names = ("dualpipe", "1f1b", "one_f_one_b", "zb_h1")
    twice, _ = planner.cases(wanted(pp=(2, 2), per_device=(1, 1), remats=("all", "all"), schedules=names), 8)
    assert twice == once


def test_stages_of_a_rank_are_chosen_where_a_schedule_leaves_the_choice():
    names = "dualpipe", "1f1b", "interleaved_1f1b_overlap"
    cases, refused = planner.cases(wanted(schedules=names, stages_per_rank=(2, 4)), 8)
    found = [{(plan.schedule, plan.stages_per_rank) for plan in case.plans} for case in cases]
    interleaved = [{("interleaved_1f1b_overlap", stages)} for stages in (2, 4)]
    assert not refused and found == [{("dualpipe", None)}, {("one_f_one_b", None)}, *interleaved]
    assert [len(case.plan.make_schedule().placement.pipes[0]) for case in cases[2:]] == [4, 8]
    rows = command.table([planner.Choice(case.plan, 0.1, 1.0, 1.0) for case in cases]).rows
    assert [row[0] for row in rows[2:]] == [f"{names[2]}, {stages} stages a rank" for stages in (2, 4)]


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize(
    "layers, refused", [(9, 0), (8, 1), (5, 1), (0, 0)], ids=["two", "one", "less", "unknown"]
)
def test_ranks_are_not_cut_into_stages_without_layers_where_fewer_have_one_each(layers, refused, whole):
    """Two stages on each of four ranks are eight; four on each are sixteen, of which eight would have none."""
    compiled = []

    def ask(plan, compile, title):
        if compile != "nothing":
            compiled.append(plan.stages_per_rank)
        return answer(plan, compile, layers=[layers])

    search = asking(ask)
    search.answers.layers = layers
    search.explore(
        wanted(schedules=("interleaved_1f1b_overlap",), pp=(4,), tokens=16 * 16 * 2, stages_per_rank=(2, 4)),
        whole=whole,
    )
    why = f"of 16 stages some have no layer: of 8 each has {'' if layers == 8 else 'at most '}one"
    assert [c.refused for c in search.choices if c.plan.stages_per_rank == 4 and c.refused] == refused * [why]
    assert not refused or set(compiled) == {2}


def test_what_cannot_be_whatever_it_takes():
    cases, refused = planner.cases(wanted(tokens=3 * 4 * 16), 8)
    assert {plan.schedule for case in cases for plan in case.plans} == {"one_f_one_b", "zb_h1"}
    (odd,) = refused
    assert odd.plan.schedule == "dualpipe" and "number must be even" in odd.refused
    (_, (none,)) = planner.cases(wanted(tokens=100), 8)
    assert none.refused == "100 tokens are no whole number of microbatches of 4 x 16"
    with pytest.raises(ValueError, match="^--pp 3: must divide the target's 8 devices$"):
        planner.cases(wanted(pp=(3,)), 8)
    assert {case.plan.pp for case in planner.cases(wanted(pp=()), 8)[0]} == {2, 4, 8}


def choices(limit=16 * GIB, beyond=0, compiled=None, **more):
    """All that is found in a memory; what is compiled is told, schedule and what is shared out."""

    def ask(plan, compile, title):
        if compile == "units" and compiled is not None:
            compiled.append((plan.schedule, plan.shard))
        return answer(plan, compile, memory=limit, beyond=beyond)

    search = explored(ask, whole=True, **more)
    return search.choices


@pytest.mark.parametrize("shard", planner.SHARDS)
def test_times_and_memory_of_plans_by_hand(shard):
    by_plan = {(c.plan.schedule, c.plan.max_stash): c for c in choices(shards=(shard,))}
    whole = CostModel(1e6, 1.4e6 * 2 / 3, 1.4e6 / 3, send=1e4)
    halves = CostModel(1e6, 1e6, 5e5, send=1e4)
    for name, schedule, costs in (
        ("dualpipe", dualpipe(2, 8), dataclasses.replace(halves, FB=2e6)),
        ("one_f_one_b", one_f_one_b(2, 8), whole),
        ("zb_h1", zb_h1(2, 8), halves),
    ):
        table, choice = lower(schedule), by_plan[name, None]
        cycles = table.makespan(WholeBackwards(**vars(costs))) + 100 * table.num_ticks
        assert choice.seconds == pytest.approx((cycles + BESIDE[shard] + UPDATE[shard]) / 1.5e9)
        assert choice.mfu == pytest.approx(LEAST / choice.seconds)
        each = [MemoryModel(0.0, **{name: SIZES[name]}) for name in ("residual_w", "stash")]
        kept = sum(max(simulate(schedule).memory(sizes)) for sizes in each)
        kept += schedule.placement.num_pipes * SIZES["parameters"] + SIZES["fixed"]
        assert choice.memory == kept - planner.SHARDS.index(shard) * GIB and not choice.refused
    best = planner.ranked(by_plan.values())
    assert [c.seconds for c in best] == sorted(c.seconds for c in best)


def test_a_plan_waits_for_guards_as_long_as_its_dry_run(tmp_path, monkeypatch):
    (file := tmp_path / "rates.json").write_text(
        '{"rates": {"flops": 1, "guards": {"loop": {"taken_seconds": 1e-3}}}}'
    )
    units = keyed({name: Unit(CYCLES[name], 0.0, 0.0, 0.0, 0) for name in "FB"})
    made = Compiled("units", units=units, overheads=Overheads(100.0, 7.0))
    drawn = functools.partial(draw, devices=None)
    monkeypatch.setattr(dryrun, "draw", lambda plan, target, _: drawn(plan, target))
    monkeypatch.setattr(dryrun, "compile_and_read", lambda *_: made)
    shape = {"schedule": "one_f_one_b", "pp": 2, "ep": 2, "microbatches": 8, "microbatch_size": 4}
    plan, target = Plan(f"{own_program.__file__}:blocks", **shape), Target.parse("v5e:2x2")
    found = dryrun.answer(Request(plan, str(target), "units", rates=str(file)), target, [], print)
    (choice,) = planner.Prices(planner.Case(plan, (plan,)), "nothing", found).choices([plan], found)
    ticks = lower(one_f_one_b(2, 8)).num_ticks
    assert choice.seconds == pytest.approx(found.step.seconds) and choice.seconds > 1e-3 * ticks
    assert found.step.schedules == (), "a plan does not ask for other schedules, whose prices take seconds"


def test_ranks_that_share_a_core_take_turns():
    """One core does the work of both ranks, so a step takes all of it: eight forwards and backwards of each."""
    plan = dataclasses.replace(
        BASE, schedule="one_f_one_b", pp=2, ep=4, microbatches=8, microbatch_size=4, shard="nothing"
    )
    found = answer(plan, "units")
    alone = dataclasses.replace(found.compiled, sends=CollectiveTotals(), at_once=1)
    found = dataclasses.replace(found, compiled=alone)
    (choice,) = planner.Prices(planner.Case(plan, (plan,)), "nothing", found).choices([plan], found)
    cycles = 2 * 8 * (CYCLES["F"] + CYCLES["B"]) + 100 * lower(one_f_one_b(2, 8)).num_ticks
    assert choice.seconds == pytest.approx((cycles + BESIDE["nothing"] + UPDATE["nothing"]) / 1.5e9)


def test_of_equal_plans_the_first_has_no_limit_and_each_layout_has_its_nearest():
    none, one, twice = (dataclasses.replace(BASE, **more) for more in ({}, {"max_stash": 1}, {"dp": 2}))
    equal = [planner.Choice(plan, 0.1, 1.0, GIB) for plan in (one, none)]
    assert [choice.plan for choice in planner.ranked(equal)] == [none, one]
    large = [
        planner.Choice(plan, memory=size * GIB, refused="no")
        for plan, size in ((one, 9), (twice, 8), (none, 7))
    ]
    assert [choice.plan for choice in planner.nearest(large)] == [none, twice]


def test_what_does_not_fit_is_not_compiled_and_says_so():
    kept = {c.plan.schedule: c.memory for c in choices() if c.plan.max_stash is None}
    limit = kept["one_f_one_b"]
    best, refused = planner.ranked(choices(limit)), planner.nearest(choices(limit))
    assert "one_f_one_b" in {c.plan.schedule for c in best}
    (why,) = (c.refused for c in refused if c.plan.schedule == "dualpipe")
    assert re.fullmatch(r"needs \d+\.\d GiB of \d+\.\d, counted", why)
    tight = planner.ranked(choices(limit, beyond=GIB))
    besides = "what the compiler takes besides counts, too"
    assert {c.plan.shard for c in tight if c.plan.schedule == "one_f_one_b"} == {"optimizer"}, besides
    tight = planner.ranked(choices(limit, beyond=2 * GIB))
    assert {c.plan.shard for c in tight if c.plan.schedule == "one_f_one_b"} == {"parameters"}
    assert not planner.ranked(choices(GIB))


def test_what_is_compiled_for_a_case_fits_itself():
    """ZB-H1 runs more kinds of units, and does not fit: the compiler would refuse it, and all with it."""
    only = {"schedules": ("1f1b", "zb_h1"), "stashes": (None,), "shards": ("nothing",), "pp": (4,)}
    memory = {c.plan.schedule: c.memory for c in choices(**only)}
    compiled: list[tuple[str, str]] = []
    found = choices(memory["one_f_one_b"], compiled=compiled, **only)
    assert compiled == [("one_f_one_b", "nothing")] and memory["zb_h1"] > memory["one_f_one_b"]
    assert [c.plan.schedule for c in planner.ranked(found)] == ["one_f_one_b"]


def test_more_is_shared_out_only_where_that_could_be_shorter(monkeypatch):
    """ZB-H1's first rank keeps four stashes, half a GiB each; with one its backwards are whole, and others wait."""
    compiled: list[tuple[str, str]] = []
    asked = {"compiled": compiled, "schedules": ("zb_h1",), "pp": (4,)}
    by_stash = {c.plan.max_stash: c for c in choices(**asked)}
    most, least = by_stash[None], by_stash[1]
    assert compiled == [("zb_h1", "nothing")], "all fit"
    assert most.memory == pytest.approx(least.memory + 3 * GIB / 2) and most.seconds < least.seconds
    compiled.clear()

    tight = choices(most.memory - GIB, **asked)
    assert compiled == [("zb_h1", "nothing"), ("zb_h1", "optimizer")], "parameters in parts add nothing"
    by_plan = {(c.plan.max_stash, c.plan.shard): c for c in tight if not c.refused}
    assert by_plan.keys() == {(1, "nothing"), (1, "optimizer"), (None, "optimizer")}
    saved = BESIDE["nothing"] + UPDATE["nothing"] - BESIDE["optimizer"] - UPDATE["optimizer"]
    assert by_plan[None, "optimizer"].seconds == pytest.approx(most.seconds - saved / 1.5e9)
    best = [(c.plan.max_stash, c.plan.shard) for c in planner.ranked(tight)]
    assert best == [(None, "optimizer"), (1, "optimizer"), (1, "nothing")], "shorter with more shared out"

    monkeypatch.setitem(UPDATE, "optimizer", 1e6)
    best = [(c.plan.max_stash, c.plan.shard) for c in planner.ranked(choices(most.memory - GIB, **asked))]
    assert best == [(None, "optimizer"), (1, "nothing")], "for no gain none is shared out"

    compiled.clear()
    monkeypatch.setitem(CYCLES, "W", 3e6)
    tight = choices(most.memory - GIB, **asked)
    assert compiled == [("zb_h1", "nothing")], "halves take longer than whole backwards"
    assert {(c.plan.max_stash, c.plan.shard) for c in planner.ranked(tight)} == {(1, "nothing")}


def test_what_the_compiler_refuses_is_tried_with_more_shared_out(monkeypatch):
    plain_answer = answer

    def refuses(plan, compile, **more):
        found = plain_answer(plan, compile, **more)
        if compile == "nothing" or plan.shard != "nothing":
            return found
        refused = Compiled("units", out_of_memory="RESOURCE_EXHAUSTED: 99 GiB")
        return dataclasses.replace(found, compiled=refused, step=None)

    monkeypatch.setitem(globals(), "answer", refuses)
    found = choices(compiled=(compiled := []), schedules=("1f1b",))
    assert compiled == [("one_f_one_b", "nothing"), ("one_f_one_b", "optimizer")]
    assert [c.plan.shard for c in planner.ranked(found)] == ["optimizer"]
    (why,) = (c.refused for c in planner.nearest(found))
    assert why == "the compiler refuses its units: RESOURCE_EXHAUSTED: 99 GiB"


def test_a_refusal_of_unknown_memory_hides_none_that_is_known():
    plan = Plan("v3", schedule="zb_h1", pp=2, ep=2, microbatches=8, microbatch_size=4)
    large, small = (planner.Choice(plan, memory=float(n * GIB), refused=f"needs {n} GiB") for n in (98, 97))
    impossible = [planner.Choice(plan, refused="too few microbatches") for _ in range(2)]
    found = planner.nearest([large, impossible[0], small, impossible[1]])
    assert [choice.refused for choice in found] == ["needs 97 GiB", "too few microbatches"]


@pytest.fixture
def studied(monkeypatch):
    """Dry runs are answered at once; what was asked, and what happens at the n-th."""
    asked, events = [], {}

    def study(request, title):
        asked.append((request.plan, request.compile))
        if (event := events.get(len(asked))) is not None:
            raise event
        return answer(request.plan, request.compile)

    monkeypatch.setattr(answers, "ask_pods", study)
    return asked, events


USUAL = {
    "--pp": "2",
    "--per-device": "1",
    "--remat": "all",
    "--max-stash": "1",
    "--dispatch": "capacity",
    "--schedule": "dualpipe 1f1b",
}


def planned(tmp_path, *more):
    """The exit status of a plan with these options, and the usual ones where it has none of theirs."""
    asked = "plan --target v5e:2x4 --program tiny --sequence 16 --whole"
    usual = " ".join(f"{flag} {values}" for flag, values in USUAL.items() if flag not in more)
    return main([*asked.split(), *usual.split(), "--cache", str(tmp_path / "kept"), *more])


@pytest.mark.parametrize(
    "dropped, more, ways",
    [
        (None, [], ["dropless"]),
        (0.01, [], ["dropless", "capacity"]),
        # Of two hops nobody counts what is dropped.
        (None, ["--ep-nodes", "2"], ["dropless", "capacity"]),
    ],
)
def test_ways_to_experts_are_told_apart_if_any_token_goes_there(
    studied, tmp_path, monkeypatch, dropped, more, ways
):
    asked, _ = studied
    study = answers.ask_pods
    answered = lambda *args, **how: dataclasses.replace(study(*args, **how), dropped=dropped)  # noqa: E731
    monkeypatch.setattr(answers, "ask_pods", answered)
    assert planned(tmp_path, "--dispatch", *planner.DISPATCHES, *more) == 0
    assert list(dict.fromkeys(plan.dispatch for plan, _ in asked)) == ways
    assert command.Plan("v5e:2x4").dispatch == ("dropless", "capacity"), "the trainer's own comes first"


def test_the_best_plans_are_printed_and_kept(studied, tmp_path, capsys):
    asked, _ = studied
    assert planned(tmp_path, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert [p["mfu"] for p in found["plans"]] == sorted((p["mfu"] for p in found["plans"]), reverse=True)
    assert {p["schedule"] for p in found["plans"]} == {"dualpipe", "one_f_one_b"} and not found["refused"]
    keys = "mfu schedule pp microbatches remat max_stash seconds"
    assert found["plans"][0].keys() >= {*keys.split()}
    assert [compile for _, compile in asked] == 2 * ["nothing", "nothing", "nothing", "units"]
    file = tmp_path / "plan.json"
    assert planned(tmp_path, "-o", str(file)) == 0
    out = capsys.readouterr().out
    assert len(asked) == 8, "all of it was known"
    assert re.search(r"schedule +step, s +MFU +pp x ep +microbatches", out) and f"is written to {file}" in out
    assert plain(read_plan(file)).items() <= found["plans"][0].items()
    assert planned(tmp_path, "--matmul", "plain") == 0
    assert len(asked) == 16, "another program is another question"


def test_programs_that_grow_with_their_stages_are_told(studied, tmp_path, capsys, monkeypatch):
    several = itertools.count(100)

    def study(request, title):
        found = answer(request.plan, request.compile)
        return dataclasses.replace(found, parameters=Parameters(next(several) // 3, 1, 1))

    monkeypatch.setattr(answers, "ask_pods", study)
    assert planned(tmp_path) == 0
    assert "these are different models, of 33, 34, 35 parameters" in capsys.readouterr().out


def layered(plan, compile, own=(3, 2, 2, 2)):
    """Four stages of layers that take 1e6 cycles forwards and twice that backwards; a head as much as two layers."""
    layers = plan.stage_layers or own
    deep = {"/first": layers[0], "": max(layers[1:-1]), "/last": layers[-1] + 2}
    cycles = {f"F{kind}": 1e6 * many for kind, many in deep.items()}
    cycles |= {f"B{kind}": 2e6 * many for kind, many in deep.items()}
    return answer(plan, compile, cycles=cycles, layers=layers)


def test_layers_are_moved_where_the_ends_take_more_or_less(monkeypatch, tmp_path, capsys):
    """The last stage takes as much as four layers; three for the first and 2 x 2, or 2 and 2 x 3, leave it three."""
    asked = []

    def study(request, title):
        asked.append((request.plan.stage_layers, request.compile))
        return layered(request.plan, request.compile)

    monkeypatch.setattr(answers, "ask_pods", study)
    options = ["--pp", "4", "--schedule", "1f1b", "--shard", "nothing"]
    assert planned(tmp_path, *options, "--move-layers", "0", "--json") == 0
    (own,) = json.loads(capsys.readouterr().out)["plans"]
    assert asked == [((), "nothing"), ((), "units")] and own["stage_layers"] == []
    file = tmp_path / "plan.json"
    assert planned(tmp_path, *options, "--move-layers", "9", "-o", str(file)) == 0
    moved = (2, 3, 3, 1)
    assert asked[2:] == [(moved, "nothing"), (moved, "units")], "and no other promises more"
    out = capsys.readouterr().out
    assert re.search(r"^one_f_one_b .* 4 x 2 +2, 2 x 3, 1 +16 of 2 ", out, re.M)
    assert re.search(r"^one_f_one_b .* 4 x 2 +own +16 of 2 ", out, re.M)
    assert read_plan(file).stage_layers == moved
    seconds = json.loads(file.read_text())["predicted"]["seconds"]
    costs = CostModel(3e6, 4e6, 2e6, send=1e4, extra={0: (-1e6, -4e6 / 3, -2e6 / 3)})
    table = lower(one_f_one_b(4, 16))
    cycles = table.makespan(costs) + 100 * table.num_ticks + BESIDE["nothing"] + UPDATE["nothing"]
    assert seconds == pytest.approx(cycles / 1.5e9) and seconds < own["seconds"]


@pytest.mark.parametrize("why", ["cannot be chosen", "fit their stages", "gain too little", "one core"])
def test_layers_that_stay(monkeypatch, why):
    """Where nobody can choose, where the ends take as long as the others, where one core works for all ranks; and where
    101 layers instead of 102, the head's two included, are not a hundredth less."""
    own = {"fit their stages": (3, 3, 3, 1), "gain too little": (100,) * 4}.get(why, (3, 2, 2, 3))

    def ask(plan, compile, title):
        asked.add(plan.stage_layers)
        found = layered(plan, compile, own=own)
        if why == "cannot be chosen":
            return dataclasses.replace(found, stage_layers=())
        if why == "one core" and compile == "units":
            return dataclasses.replace(found, compiled=dataclasses.replace(found.compiled, at_once=1))
        return found

    asked, search = set(), asking()
    search.answers.ask = ask
    search.explore(wanted(pp=(4,), schedules=("1f1b",), moves=3), whole=True)
    assert asked == {()}


def test_interrupted_it_goes_on_where_it_was(studied, tmp_path, capsys):
    asked, events = studied
    events[6] = KeyboardInterrupt()
    assert planned(tmp_path) == 130
    said = capsys.readouterr()
    assert "dualpipe " in said.out and "one_f_one_b" not in said.out, "what is known is told"
    kept = "interrupted: cases left: 1; what was compiled is kept, the same command goes on from there\n"
    best, last = said.err.splitlines(keepends=True)
    assert best.startswith("the best so far takes ") and last == kept
    events.clear()
    del asked[:]
    assert planned(tmp_path) == 0
    assert {plan.schedule for plan, _ in asked} == {"one_f_one_b"}
    assert [compile for _, compile in asked] == ["nothing", "nothing", "units"]


def test_a_case_that_fails_is_not_the_end(studied, tmp_path, capsys):
    asked, events = studied
    events[1] = CommandError("--ep 4: must divide the 6 experts")
    events[5] = ChildDied("ended by SIGABRT\nwords", "compiling", {})
    assert planned(tmp_path) == 1
    out = capsys.readouterr().out
    for words in (": 0 plans fit\n", "--ep 4: must divide the 6 experts", "ended by SIGABRT\n"):
        assert words in out
    events.pop(5)
    del asked[:]
    assert planned(tmp_path / "anew") == 0
    assert "on v5e:2x4: 1 plan fits\n" in capsys.readouterr().out


def test_where_nothing_fits_options_are_told_that_would_make_it_fit(monkeypatch, tmp_path, capsys):
    asked = []

    def study(request, title):
        found = answer(request.plan, request.compile, memory=GIB)
        if request.hints:
            asked.append(request.plan)
            remedy = MemorySaving("--remat all", GIB // 2, "layers are computed again")
            found = dataclasses.replace(found, memory=dataclasses.replace(found.memory, remedies=(remedy,)))
        return found

    monkeypatch.setattr(answers, "ask_pods", study)
    assert planned(tmp_path) == 1
    out = capsys.readouterr().out
    (least,) = asked
    assert least.shard == "parameters" and least.schedule == "one_f_one_b"
    assert "--schedule one_f_one_b --pp 2 --ep 4 --microbatch-size 4 --remat all --shard parameters" in out
    assert re.search(
        r"it fits with these options:\n\n.*\n.*--remat all +0\.50 +layers are computed again", out
    )
    assert planned(tmp_path, "--json") == 1
    found = json.loads(capsys.readouterr().out)
    assert found["nearest"]["memory"]["remedies"][0]["option"] == "--remat all" and len(asked) == 1, "kept"


def test_results_are_told_where_no_hint_can_be_had(monkeypatch, tmp_path, capsys):
    def study(request, title):
        if request.hints:
            raise ChildDied("ended by SIGKILL", "counting", {})
        return answer(request.plan, request.compile, memory=GIB)

    monkeypatch.setattr(answers, "ask_pods", study)
    assert planned(tmp_path) == 1
    assert "needs 3.0 GiB of 1.0, counted" in capsys.readouterr().out


REFUSED = {
    "--pp 0": "--pp 0: must be at least 1",
    "--stages-per-rank 0": "--stages-per-rank 0: must be at least 1",
    "--pp 3": "--pp 3: must divide the target's 8 devices",
    "--per-device": "--per-device: give at least one to choose from",
    "--shard": "--shard: give at least one to choose from",
    "--remat": "--remat: give at least one to choose from",
    "--max-stash -1": "--max-stash -1: must be at least 0",
    "--tokens-per-step 0": "--tokens-per-step 0: must be at least 1",
    "--schedule dualpip": "there is no schedule 'dualpip'; did you mean dualpipe",
    "--sequence 0": "--sequence 0: must be at least 1",
    "--capacity-factor 0": "--capacity-factor 0.0: must be above 0",
    "--capacity-factor nan": "--capacity-factor nan: must be above 0",
    "--set dim": "--set dim: wants NAME=NUMBER, such as dim=2048",
    "--set dim=big": "--set dim=big: wants NAME=NUMBER, such as dim=2048",
    "--compiler-option xla": "--compiler-option xla: wants NAME=VALUE",
    "--cpu-minutes -1": "--cpu-minutes -1: must be at least 0",
    "--cpu-minutes nan": "--cpu-minutes nan: must be at least 0",
    f"--cache {__file__}": f"--cache {__file__}: is no folder",
    f"--cache {__file__}/kept": f"{__file__}/kept: Not a directory",
    "--move-layers -1": "--move-layers -1: must be at least 0",
    "-o no/plan.json": "--output no/plan.json: there is no folder no",
}


def test_options_that_will_not_do(studied, tmp_path, capsys):
    for options, message in REFUSED.items():
        assert planned(tmp_path, *options.split()) == 2
        assert capsys.readouterr().err.startswith(f"error: {message}"), options
    assert not studied[0], "told before anything is counted"


def test_a_key_is_all_that_decides_an_answer(tmp_path, monkeypatch):
    mine, cache = tmp_path / "mine.py", Cache(tmp_path / "kept")
    mine.write_text("first = 1\n")
    request = Request(dataclasses.replace(BASE, model=f"{mine}:step"), "v5e:2x4", "units")
    files = {cache.file(request)}
    whole = dataclasses.replace(request.plan, remat="all")
    for change in ({"target": "v5e:4x4"}, {"compile": "nothing"}, {"plan": whole}):
        files.add(cache.file(dataclasses.replace(request, **change)))
    assert len(files) == 4 and cache.file(dataclasses.replace(request, log="elsewhere")) in files
    _digest.cache_clear()
    mine.write_text("first = 2\n")
    assert cache.file(request) not in files, "its source has changed"
    assert cache.get(request) is None
    cache.put(request, answer(request.plan, "units"))
    assert cache.get(request) == answer(request.plan, "units")
    cache.file(request).write_text('{"target": 3')
    assert cache.get(request) is None, "damaged"
    kept = cache.file(request)
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_autotune_level=0")
    assert cache.file(request) != kept, "compilers read them"


def test_a_module_of_this_folder_is_part_of_the_key(tmp_path, monkeypatch):
    """The script `dualpipe` does not look there, its child, started by python -m, does so first."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", str(tmp_path))])
    (mine := tmp_path / "module_of_this_folder.py").write_text("first = 1\n")
    request = Request(dataclasses.replace(BASE, model="module_of_this_folder:step"), "v5e:2x4", "units")
    before = Cache(tmp_path / "kept").file(request)
    _digest.cache_clear()
    mine.write_text("first = 2\n")
    assert Cache(tmp_path / "kept").file(request) != before
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_folder() == tmp_path / "dualpipe"


def written(tmp_path, **changes):
    file = tmp_path / "plan.json"
    file.write_text(json.dumps({"plan": plain(dataclasses.replace(BASE, **changes))}))
    return file


def test_dry_runs_take_a_plan(tmp_path, capsys):
    mine = f"{own_program.__file__}:blocks"
    file = written(tmp_path, model=mine, pp=2, ep=2, microbatches=4, schedule="zb_h1", set=("dim=8",))
    assert main(["dryrun", "--target", "v5e:2x2", "--compile", "nothing", "--json", "--plan", str(file)]) == 0
    found = filled(Answer, json.loads(capsys.readouterr().out))
    assert found.program == read_plan(file)
    # What is left out counts, not what is usual.
    for given in (["--pp", "2"], ["--pp", "4"], ["--remat", "none"]):
        assert main(["dryrun", "--target", "v5e:2x2", "--plan", str(file), *given]) == 2, given
    said = capsys.readouterr().err
    assert said.startswith(f"error: --plan {file}: says all of the program; drop its options")


def test_files_that_hold_no_plan(tmp_path):
    file = tmp_path / "plan.json"
    for text, message in (
        (None, "cannot read it: No such file or directory"),
        ("{", "cannot read it: Expecting"),
        ("[]", "holds no plan; `dualpipe plan -o plan.json` writes one"),
        ('{"plan": {"ranks": 3}}', "a plan has no ranks; it is of another version"),
        ('{"plan": {"serialised": true}}', "a plan has no serialised; it is of another version"),
        ('{"plan": {"change": ["dim=8"]}}', "a plan has no change; it is of another version"),
        ('{"plan": {"shard": "optimiser"}}', "shard is 'optimiser', which --shard cannot be"),
        ('{"plan": {"pp": "4"}}', "pp is '4', which --pp cannot be"),
        ('{"plan": {"set": [8]}}', "set is (8,), which --set cannot be"),
        ('{"plan": {"set": 8}}', "holds no plan: 'int' object is not iterable"),
    ):
        if text is not None:
            file.write_text(text)
        with pytest.raises(ValueError, match=f"^--plan {re.escape(str(file))}: {re.escape(message)}"):
            read_plan(file)


def test_the_trainer_takes_a_plan(tmp_path):
    room = {"dispatch": "capacity", "capacity_factor": 1.0}
    shape = {"pp": 8, "ep": 4, "microbatches": 24, "microbatch_size": 8}
    file = written(tmp_path, model="v2-lite", remat="local", max_stash=2, **shape, **room)
    options = parse(["--plan", str(file), "--pp", "4"]).options
    step = options.step
    assert (step.pp, step.ep, step.microbatches, step.microbatch_size) == (4, 4, 24, 8)
    assert (options.model.name, step.remat, step.max_stash) == ("v2-lite", "local", 2)
    assert (step.dispatch, step.capacity_factor, step.sequence) == ("capacity", 1.0, 16)
    assert options.step == dataclasses.replace(read_plan(file).step, pp=4), "one value for both"
    for name, make in models.MODELS.items():
        told = parse(["--plan", str(written(tmp_path, model=name, set=("dim=64",)))]).options
        assert model_config(told).compute_dtype == make().compute_dtype, "as the dry run computed"
        assert model_config(told).dim == 64


def test_plans_that_the_trainer_cannot_train(tmp_path):
    for changes, message in (
        ({"model": "mine.py:step"}, "--program mine.py:step: this trains the published models"),
        (
            {"layers_per_stage": 2},
            "layers-per-stage 2: say how many layers there are by --layers, and where they",
        ),
    ):
        with pytest.raises(ConfigError, match=re.escape(message)):
            parse(["--plan", str(written(tmp_path, **changes))])


@TPU
@pytest.mark.slow
def test_real_units_make_the_plan_that_a_dry_run_of_it_predicts(tmp_path, capsys):
    file, program = tmp_path / "plan.json", f"{own_program.__file__}:blocks"
    asked = f"plan --target v5e:2x2 --program {program} --set dim=128 --sequence 1 --pp 2 --per-device 4"
    asked = f"{asked} --remat none --tokens-per-step 64 --schedule 1f1b dualpipe".split()
    assert main([*asked, "--cache", str(tmp_path / "kept"), "--json", "-o", str(file)]) == 0
    best, *_ = json.loads(capsys.readouterr().out)["plans"]
    assert main(["dryrun", "--target", "v5e:2x2", "--json", "--plan", str(file)]) == 0
    step = filled(Answer, json.loads(capsys.readouterr().out)).step
    assert best["seconds"] == pytest.approx(step.seconds) and best["mfu"] == pytest.approx(step.mfu)
    assert sum(part.seconds for part in step.account) == pytest.approx(step.seconds)


def test_replicas_are_chosen_too():
    """Of eight devices two replicas of two ranks have two devices for experts each; a microbatch lies on both."""
    cases, refused = planner.cases(wanted(dp=(1, 2), per_device=(1, 3), tokens=3 * 4 * 8 * 16), 8)
    assert not refused
    found = {(c.plan.dp, c.plan.ep, c.plan.microbatch_size, c.plan.num_microbatches) for c in cases}
    assert found == {(1, 4, 4, 24), (1, 4, 12, 8), (2, 2, 4, 24), (2, 2, 12, 8)}
    assert all(c.plan.num_devices == 8 for c in cases)
    with pytest.raises(ValueError, match="^--dp 3: must divide the target's 8 devices$"):
        planner.cases(wanted(dp=(3,)), 8)
    with pytest.raises(ValueError, match="^--pp 8: must divide the 4 devices of a replica$"):
        planner.cases(wanted(dp=(2,), pp=(8,)), 8)


def test_replicas_hold_the_same_and_share_a_microbatch():
    mine = Plan(f"{own_program.__file__}:blocks", pp=2, ep=2, microbatches=4, microbatch_size=4)
    once, twice = (draw(dataclasses.replace(mine, dp=dp), None, None) for dp in (1, 2))
    one, two = ahead.memory_by_kind(once), ahead.memory_by_kind(twice)
    assert two["stages"] == one["stages"] and two["shared"] == one["shared"]
    assert two["boundary"] * 2 == one["boundary"], "half as many sequences a device"
    assert twice.tokens_of_device * 2 == once.tokens_of_device
    with pytest.raises(ValueError, match="--target v5e:2x2: has 4 devices, --dp 2 x --pp 2 x --ep 2 = 8"):
        draw(dataclasses.replace(mine, dp=2), Target.parse("v5e:2x2"), None)
    message = "^--microbatch-size 2: --dp 2 x --ep 2 devices must share it equally, try 4$"
    with pytest.raises(ValueError, match=message):
        draw(dataclasses.replace(mine, dp=2, microbatch_size=2), None, None)


def test_the_update_is_compiled_in_a_form_that_fits(studied, tmp_path, monkeypatch):
    asked, _ = studied

    def large(request, title):
        plan = request.plan
        asked.append((plan, request.compile))
        fixed = {"nothing": 20 * GIB, "optimizer": 3 * GIB, "parameters": 2 * GIB}[plan.shard]
        return answer(plan, request.compile, fixed=fixed)

    monkeypatch.setattr(answers, "ask_pods", large)
    assert planned(tmp_path, "--json") == 0
    assert {plan.shard for plan, compile in asked if compile == "units"} == {"optimizer"}
    assert len(asked) == 2 * (3 + 1)
    assert planned(tmp_path, "--json", "--shard", "parameters") == 0
    known = "counted before, and priced as it is"
    assert [(plan.shard, compile) for plan, compile in asked[8:]] == 2 * [("parameters", "units")], known
