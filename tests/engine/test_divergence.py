"""How ranks part ways: loops and conditionals a tick in each form, and the order in which collectives are met."""

import functools
from collections.abc import Iterator

import numpy as np
import pytest

from dualpipe_jax import PipelineModel, make_mesh
from dualpipe_jax.engine import Pipeline
from dualpipe_jax.engine.model import staged
from dualpipe_jax.schedule import CostModel, dualpipe, lower, one_f_one_b, zb_v
from dualpipe_jax.schedule.lowering.lower import Keeps
from tests.engine import models

MODEL = PipelineModel(models.embed, lambda p, x: models.moe(p, x)[0], models.head_loss)
COLLECTIVES = {"all_to_all", "all_reduce", "all_gather", "reduce_scatter", "collective_permute"}
PP, EP = 2, 2
BRANCHES = {"while": 1, "case": 0}  # the first region that is a branch; a while's first is its condition


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
def scan_of(make, divergence):
    """The StableHLO region of the scan's body, and the module's functions."""
    schedule = make(PP, 4)
    stages = schedule.placement.num_model_stages
    params, specs = models.init("moe", stages)
    given = {"stages": params["stages"], "shared": {"embed": params["embed"], "head": params["head"]}}
    inputs, targets = models.data(4)
    pipeline = Pipeline(
        staged(MODEL, stages),
        schedule,
        make_mesh(PP, EP),
        param_specs={"stages": specs["stages"]},
        fuse_pairs=True,
        divergence=divergence,
    )
    lowered = pipeline.value_and_grad.lower(given, {"inputs": inputs, "targets": targets})
    module = lowered.compiler_ir("stablehlo")
    functions = {op.sym_name.value: op.regions[0] for op in module.body.operations if name_of(op) == "func.func"}
    loops = [op for _, op in walk(functions["main"], functions) if name_of(op) == "while"]
    scans = [
        loop
        for loop in loops
        if any(name_of(op) == "collective_permute" and not at for at, op in walk(loop.regions[1], functions))
    ]
    assert len(scans) == 1
    return schedule, scans[0].regions[1], functions, lowered


def name_of(op):
    return op.operation.name.removeprefix("stablehlo.")


def walk(region, functions, at=()) -> Iterator:
    """Operations in order, each with the branches ((operation, number), ...) that it stands in."""
    for block in region:
        for op in block.operations:
            yield at, op
            if name_of(op) == "func.call":
                yield from walk(functions[op.operation.attributes["callee"].value], functions, at)
            elif name_of(op) in BRANCHES:
                for number in range(BRANCHES[name_of(op)], len(op.regions)):
                    yield from walk(op.regions[number], functions, (*at, (op, number)))


@pytest.mark.parametrize("make", [one_f_one_b, dualpipe], ids=lambda make: make.__name__)
@pytest.mark.parametrize("divergence", ["loop", "switch", "none"])
def test_round_trips_to_the_host(make, divergence):
    """On GPU each costs one: as many as units, one, and none."""
    schedule, body, functions, _ = scan_of(make, divergence)
    names = [name_of(op) for at, op in walk(body, functions) if not at]
    units = len(set(table_of(schedule).column("unit").ravel().tolist()) - {-1})
    assert units >= 4
    wanted = {"loop": (units, 0), "switch": (0, 1), "none": (0, 0)}[divergence]
    assert (names.count("while"), names.count("case")) == wanted
    assert ("all_to_all" in names) == (divergence == "none"), "what is in no branch every rank runs"


@pytest.mark.parametrize("make", [one_f_one_b, dualpipe, zb_v], ids=lambda make: make.__name__)
def test_collectives_are_met_in_one_order(make):
    """Each device's are a subsequence of (tick, place in the program), and all that meet in one come to it.

    So nobody waits for somebody who waits: of all that devices stand at, the first in that order has everybody there.
    """
    schedule, body, functions, _ = scan_of(make, "switch")
    table = table_of(schedule)
    units = sorted(set(table.column("unit").ravel().tolist()) - {-1})
    found = [(at, op) for at, op in walk(body, functions) if name_of(op) in COLLECTIVES]
    assert {name_of(op) for at, op in found if not at} == {"collective_permute"}
    assert {name_of(op) for at, op in found if at} >= {"all_to_all"}
    assert not any(name_of(op) == "collective_permute" for at, op in found if at), (
        "permutes stand at tick level"
    )
    sequences = {device: [] for device in range(PP * EP)}
    groups = {}
    for tick, place in np.ndindex(table.num_ticks, len(found)):
        at, op = found[place]
        for device, sequence in sequences.items():
            unit = table.column("unit")[tick, device // EP]
            if not at or (unit >= 0 and at[0][1] == units.index(unit)):
                sequence.append((tick, place))
    for place, (_, op) in enumerate(found):
        if name_of(op) != "collective_permute":
            groups[place] = np.array(op.operation.attributes["replica_groups"]).tolist()
        else:
            groups[place] = [list(range(PP * EP))]
    for device, sequence in sequences.items():
        assert sequence == sorted(set(sequence))
        for tick, place in sequence:
            (group,) = [group for group in groups[place] if device in group]
            assert all((tick, place) in sequences[other] for other in group)
    assert any(at for at, _ in found) and len({tuple(sequence) for sequence in sequences.values()}) == PP
