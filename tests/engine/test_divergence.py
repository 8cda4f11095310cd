"""How ranks part ways: loops and conditionals a tick in each form, and the order in which collectives are met."""

import functools
import itertools
import re
from collections.abc import Iterator
from typing import NamedTuple

import jax
import numpy as np
import pytest

from dualpipe_jax import engine, inspect, make_mesh
from dualpipe_jax.contract import staged
from dualpipe_jax.engine import Pipeline
from dualpipe_jax.engine import tick as ticks
from dualpipe_jax.engine.guard import run_in_lockstep, usual_divergence
from dualpipe_jax.inspect.collectives import collectives
from dualpipe_jax.parallel.p2p import CONCURRENT_PERMUTE
from dualpipe_jax.schedule import CostModel, dualpipe, lower, one_f_one_b, zb_v
from dualpipe_jax.schedule.lowering.table import Keeps
from dualpipe_jax.varying import varying_axes
from tests.engine import models

COLLECTIVES = {"all_to_all", "all_reduce", "all_gather", "reduce_scatter", "collective_permute"}
PP, EP = 2, 2
DEVICES = range(PP * EP)
BRANCHES = {"while": 1, "case": 0}  # the first region that is a branch; a while's first is its condition


class Met(NamedTuple):
    """A collective of the scan's body, in the order of the program."""

    kind: str
    unit: int | None  # the place of the branch in which it stands; None at tick level
    groups: list[list[int]]


class Branch:
    """A region of an operation; each is one object, and no other is equal to it."""

    def __init__(self, op, number):
        self.op, self.number = op, number


def table_of(schedule):
    """As the engine lowers it for a first kind, a last one and what is between."""
    stages = schedule.placement.num_model_stages
    kind_of = (0, *(1,) * (stages - 2), 2) if stages > 2 else (0, 1)
    pools = {
        name: dict.fromkeys(range(max(kind_of) + 1), life)
        for name, life in (("residual_i", "FI"), ("residual_w", "FW"), ("stash", "IW"))
    }
    return lower(schedule, CostModel(), Keeps(kind_of, ("W",) * (max(kind_of) + 1), pools))


@functools.cache
def lowered_step(make, divergence, check_vma=False):
    schedule = make(PP, 4)
    stages = schedule.placement.num_model_stages
    pipeline = Pipeline(
        staged(models.MOE, stages),
        schedule,
        make_mesh(PP, EP),
        param_specs=models.init("moe", stages)[1],
        fuse_pairs=True,
        idle_sends=True,
        divergence=divergence,
        check_vma=check_vma,
    )
    return schedule, pipeline.value_and_grad.lower(*models.given("moe", stages, 4))


@functools.cache
def operations(make, divergence, check_vma=False):
    """The schedule, and all of the program's operations, each with the branches around it."""
    schedule, lowered = lowered_step(make, divergence, check_vma)
    return schedule, [*walk_all(lowered)]


def walk_all(lowered) -> Iterator:
    """Operations of a whole program, as ``walk`` gives them."""
    module = lowered.compiler_ir("stablehlo")
    functions = {
        op.sym_name.value: op.regions[0] for op in module.body.operations if name_of(op) == "func.func"
    }
    return walk(functions["main"], functions)


def scan_of(make, divergence):
    """The schedule, and the operations of the scan's body, with the branches inside it."""
    schedule, found = operations(make, divergence)
    (scan,) = {at[0] for at, op in found if name_of(op) == "collective_permute" and at}
    return schedule, [(at[1:], op) for at, op in found if at and at[0] is scan]


def name_of(op):
    return op.operation.name.removeprefix("stablehlo.")


def walk(region, functions, at=()) -> Iterator:
    """Operations in order, each with the branches that it stands in, from outside."""
    for block in region:
        for op in block.operations:
            yield at, op
            if name_of(op) == "func.call":
                yield from walk(functions[op.operation.attributes["callee"].value], functions, at)
            elif name_of(op) in BRANCHES:
                for number in range(BRANCHES[name_of(op)], len(op.regions)):
                    branch = Branch(op, number)
                    yield from walk(op.regions[number], functions, (*at, branch))
            elif name_of(op) == "sdy.manual_computation":
                yield from walk(op.regions[0], functions, at)


@pytest.mark.parametrize(
    ("divergence", "make"),
    [("loop", dualpipe), ("switch", dualpipe), ("switch", one_f_one_b), ("none", one_f_one_b)],
)
def test_round_trips_to_the_host(make, divergence):
    """On GPU each costs one: as many as units, and one."""
    schedule, body = scan_of(make, divergence)
    names = [name_of(op) for at, op in body if not at]
    num_units = len(units_of(schedule))
    assert num_units >= 4
    wanted = {"loop": (num_units, 0), "switch": (0, 1), "none": (num_units, 0)}[divergence]
    assert (names.count("while"), names.count("case")) == wanted
    assert "all_to_all" not in names, "each is in a guard"


@pytest.mark.parametrize(
    ("platform", "version", "form"),
    [
        ("gpu", (0, 11, 0), "switch"),
        ("cuda", (0, 12, 0, 1), "switch"),
        ("cuda", (0, 10, 2), "loop"),
        ("tpu", (0, 12, 0), "loop"),
        ("cpu", (0, 12, 0), "loop"),
        (None, (0, 12, 0), "loop"),
    ],
)
def test_the_form_that_suits_a_platform(platform, version, form, monkeypatch):
    monkeypatch.setattr(jax, "__version_info__", version)
    assert usual_divergence(platform) == form


def test_a_pipeline_takes_the_form_that_suits_its_devices(monkeypatch):
    asked = []
    monkeypatch.setattr(
        engine.pipeline, "usual_divergence", lambda platform: asked.append(platform) or "switch"
    )
    _, lowered = lowered_step.__wrapped__(one_f_one_b, None)
    ops = [name_of(op) for _, op in walk_all(lowered)]
    assert set(asked) == {"cpu"} and ops.count("case") == 1


@pytest.mark.parametrize("make", [one_f_one_b, dualpipe], ids=lambda make: make.__name__)
def test_in_lockstep_all_ranks_go_one_way(make, monkeypatch):
    """What opens a guard is typed as the same on all ranks; what a rank keeps is its own matter."""
    seen = []

    def spy(anywhere, wanted, *rest):
        seen.append((varying_axes(anywhere), varying_axes(wanted)))
        return run_in_lockstep(anywhere, wanted, *rest)

    monkeypatch.setattr(ticks, "run_in_lockstep", spy)
    lowered_step.__wrapped__(make, "none", check_vma=True)
    assert len(seen) >= 4 and all(alike == frozenset() and "pp" in own for alike, own in seen)


def units_of(schedule):
    """The units that the table runs, in the order of the conditional's branches."""
    return sorted(set(table_of(schedule).column("unit").ravel().tolist()) - {-1})


@pytest.mark.parametrize("make", [one_f_one_b, dualpipe, zb_v], ids=lambda make: make.__name__)
def test_collectives_are_met_in_one_order(make):
    """As traced."""
    schedule, body = scan_of(make, "switch")
    found = [(at, op) for at, op in body if name_of(op) in COLLECTIVES]

    def groups(op):
        if name_of(op) == "collective_permute":
            return [[*DEVICES]]
        return groups_of(op.operation.attributes["replica_groups"])

    check_order(schedule, [Met(name_of(op), at[0].number if at else None, groups(op)) for at, op in found])


@pytest.mark.slow
def test_collectives_are_met_in_one_order_when_compiled():
    """As scheduled: in the order in which every device issues them, and with no more than one round trip a tick."""
    schedule, lowered = lowered_step(dualpipe, "switch")
    module = inspect.read(lowered.compile(compiler_options={"xla_backend_optimization_level": 0}))
    assert module.is_scheduled
    (scan,) = {name for name in module.loops if "collective-permute" in dict(issued(module, name))}
    everywhere = [i for name in {scan, *held_by(module, scan)} for i in module.computations[name]]
    divergent = [i for i in everywhere if i.opcode in ("while", "conditional") and i.trips is None]
    assert [i.opcode for i in divergent] == ["conditional"], "no more than two a tick, and one is enough"
    branches = divergent[0].called()
    assert len(branches) == len(units_of(schedule)) + 1, "and one for ranks that do nothing"
    at_tick_level = {pair.issued: pair for _, pair in issued(module, scan)}
    met = []
    for instruction in module.computations[scan]:
        if instruction is divergent[0]:
            for number, branch in enumerate(branches):
                for name in {branch, *held_by(module, branch)}:
                    met += [met_as(pair, number) for _, pair in issued(module, name)]
        elif instruction in at_tick_level:
            met.append(met_as(at_tick_level[instruction], None))
    check_order(schedule, met)


def issued(module, name):
    """A computation's own collectives, each with its kind."""
    return [(pair.kind, pair) for pair in collectives(module, module.computations[name])]


def met_as(pair, unit):
    groups = [[*DEVICES]] if pair.kind == "collective-permute" else [[*group] for group in pair.groups]
    return Met(pair.kind.replace("-", "_"), unit, groups)


def held_by(module, name):
    """Computations inside a computation."""
    inner = [c for i in module.computations[name] for c in i.called()]
    return itertools.chain(inner, *(held_by(module, c) for c in inner))


def groups_of(attribute):
    """Of an operation: numbers, or since jax 0.12 the names of the mesh's axes, along which alone they differ."""
    if not (axes := re.findall(r'axis_ref<name = "(\w+)">', str(attribute))):
        return np.array(attribute).tolist()
    places = [("dp", "pp", "ep").index(axis) for axis in axes]
    sizes = np.array([1, PP, EP])
    last = np.moveaxis(np.arange(PP * EP).reshape(sizes), places, range(-len(places), 0))
    return last.reshape(-1, sizes[places].prod()).tolist()


def check_order(schedule, met):
    """Each device's are a subsequence of (tick, place in the program), and all that meet in one come to it.

    So nobody waits for somebody who waits: of all that devices stand at, the first in that order has everybody there.
    """
    assert {kind for kind, unit, _ in met if unit is None} == {"collective_permute"}, (
        "permutes stand at tick level"
    )
    inside = {kind for kind, unit, _ in met if unit is not None}
    assert "all_to_all" in inside and "collective_permute" not in inside
    table, units = table_of(schedule), units_of(schedule)
    sequences = {device: [] for device in DEVICES}
    for tick, place in np.ndindex(table.num_ticks, len(met)):
        for device, sequence in sequences.items():
            unit = table.column("unit")[tick, device // EP]
            branch = units.index(unit) if unit >= 0 else len(units)
            if met[place].unit in (None, branch):
                sequence.append((tick, place))
    for device, sequence in sequences.items():
        assert sequence == sorted(set(sequence))
        for tick, place in sequence:
            (group,) = [group for group in met[place].groups if device in group]
            assert all((tick, place) in sequences[other] for other in group)
    assert len({tuple(sequence) for sequence in sequences.values()}) == PP, "ranks do part ways"


@pytest.mark.parametrize(("divergence", "check_vma"), [("loop", True), ("switch", False)])
def test_attributes_of_permutes_stand_on_nothing_else(divergence, check_vma):
    """On GPU XLA runs whatever else carries them as asynchronous computation (since xla#46465)."""
    schedule, found = operations(dualpipe, divergence, check_vma)
    key = "mhlo.frontend_attributes"
    carrying = [op for _, op in found if key in op.operation.attributes]
    marked = [
        op for op in carrying if any(name in str(op.operation.attributes[key]) for name in CONCURRENT_PERMUTE)
    ]
    assert {name_of(op) for op in marked} == {"collective_permute"}
    assert len(marked) == len(table_of(schedule).channels), "x is one array"
