"""Layers moved between stages by what these took: as good as any, by trying all; and what programs make of shares."""

import dataclasses
import itertools
import json
import re

import pytest

import models
from dualpipe_jax.pods import Plan
from dualpipe_jax.pods.dryrun import draw
from dualpipe_jax.pods.layers import moved_layers
from dualpipe_jax.pods.plain import plain
from dualpipe_jax.schedule import CostModel, dualpipe, dualpipe_v, interleaved_1f1b, one_f_one_b
from tests.pods import own_program
from train.config import ConfigError, configure, make_schedule
from train.model import make_model
from train.options import parse

OWN = f"{own_program.__file__}:blocks"


def rank_times(layers, placement, embed, head):
    """Of each rank for one microbatch of each pipe, a layer 1; stages between the ends take what the deepest does."""
    times = [layers[0] + embed, *[max(layers[1:-1])] * (len(layers) - 2), layers[-1] + head]
    busy = [0.0] * placement.num_ranks
    for pipe in placement.pipes:
        for stage, rank in enumerate(pipe):
            busy[rank] += times[stage]
    return busy


def every_way(num_layers, num_stages):
    """To share them out with as many layers, one at least, on all stages between the ends."""
    for cuts in itertools.combinations_with_replacement(range(num_layers + 1), num_stages - 1):
        shares = [b - a for a, b in itertools.pairwise((0, *cuts, num_layers))]
        if min(shares[1:-1]) == max(shares[1:-1]) > 0:
            yield shares


@pytest.mark.parametrize(
    "schedule", [one_f_one_b(4, 8), dualpipe(4, 8), dualpipe_v(3, 6), one_f_one_b(5, 7)], ids=lambda s: s.name
)
@pytest.mark.parametrize(("embed", "head"), [(0, 0), (0.5, 2), (3, 0), (1, 7)])
@pytest.mark.parametrize("more", [0, 1, 3])
def test_no_other_shares_are_better(schedule, embed, head, more):
    placement = schedule.placement
    stages = placement.num_model_stages
    own = (1 + more, *[2] * (stages - 2), 1)
    ends = {0: own[0] + embed - 2, -1: own[-1] + head - 2}
    costs = CostModel(2.0, 2.0, 2.0, extra={stage: (more,) * 3 for stage, more in ends.items()})
    layers, ratio = moved_layers(own, schedule, costs)
    assert sum(layers) == sum(own) and len(set(layers[1:-1])) == 1
    best, before = (
        min(max(rank_times(shares, placement, embed, head)) for shares in ways)
        for ways in (every_way(sum(own), stages), [own])
    )
    assert max(rank_times(layers, placement, embed, head)) == pytest.approx(best)
    assert ratio == pytest.approx(best / before)
    assert layers == own or best < before, "what is as good stays"


def test_unequal_stages_between_the_ends_are_made_equal():
    """Each takes what its own layers take; one of the first stage's four goes to where there are two."""
    extra = {0: (1.0, 1.0, 1.0), 3: (-1.0, -1.0, -1.0), -1: (-3.0, -3.0, -3.0)}
    costs = CostModel(3.0, 3.0, 3.0, extra=extra)
    layers, ratio = moved_layers((4, 3, 3, 2, 0), one_f_one_b(5, 9), costs)
    assert layers == (3, 3, 3, 3, 0) and ratio == pytest.approx(3 / 4)


def test_where_nothing_tells_what_a_layer_takes_they_stay():
    costs = CostModel(2.0, 2.0, 2.0, extra={-1: (5.0, 5.0, 5.0)})
    for schedule in (one_f_one_b(2, 4), dualpipe(2, 4), interleaved_1f1b(2, 4, 2)):
        own = (2,) * schedule.placement.num_model_stages
        assert moved_layers(own, schedule, costs) == (own, 1.0)
    assert moved_layers((2,) * 4, one_f_one_b(4, 8), costs)[1] < 1
    assert moved_layers((2,) * 4, one_f_one_b(4, 8), costs, at_once=1) == ((2,) * 4, 1.0), "one works for all"


PLAN = Plan("tiny", pp=4, ep=1, microbatches=8, schedule="dualpipe", sequence=16)


def test_a_dry_run_takes_shares():
    own = draw(PLAN, None, None)
    moved = draw(dataclasses.replace(PLAN, stage_layers=(1, 2, 2, 4)), None, None)
    assert own.program.stage_layers == models.layer_plan(models.tiny(), PLAN.make_schedule()) == (3, 2, 2, 2)
    assert moved.program.stage_layers == (1, 2, 2, 4) and moved.program.total == own.program.total


@pytest.mark.parametrize(
    ("shares", "changes", "message"),
    [
        ("4 5", {}, "of 2 stages; dualpipe on 4 ranks has 4, one number for each"),
        ("2 2 2 2", {}, "8 layers; there are 9, dense ones included. Leave them out for shares that"),
        ("11 2 -2 -2", {}, "none can have fewer than 0 layers. Leave"),
        (
            "3 2 2 2",
            {"layers_per_stage": 2},
            "--layers-per-stage 2 says it, too, and another number; drop one",
        ),
        ("3 2 2 2", {"model": OWN}, f"--program {OWN} does not cut its layers so, its Program.stage_layers"),
    ],
)
def test_shares_that_will_not_do(shares, changes, message):
    asked = dataclasses.replace(PLAN, stage_layers=tuple(map(int, shares.split())), **changes)
    with pytest.raises(ValueError, match="^" + re.escape(f"--stage-layers {shares}: {message}")):
        draw(asked, None, None)


def test_the_trainer_takes_a_plans_shares(tmp_path):
    file = tmp_path / "plan.json"
    plan = dataclasses.replace(PLAN, ep=2, microbatch_size=2, stage_layers=(1, 2, 2, 4))
    file.write_text(json.dumps({"plan": plain(plan)}))
    options = parse(["--plan", str(file)]).options
    for given in ((2, 3, 3, 1), ()):
        asked = ["--plan", str(file), "--stage-layers", *map(str, given)]
        assert parse(asked).options.step.stage_layers == given
    schedule = make_schedule(options)
    model = make_model(options, schedule)
    assert model.layout.plan == (1, 2, 2, 4)
    assert make_model(configure(options, stage_layers=()), schedule).layout.plan == (3, 2, 2, 2)
    for wrong, why in (
        ((4, 5), "of 2 stages; there are 4, one number for each"),
        ((2,) * 4, "8 layers; there are 9"),
    ):
        words = " ".join(map(str, wrong))
        with pytest.raises(ConfigError, match=re.escape(f"--stage-layers {words}: {why}")):
            make_model(configure(options, stage_layers=wrong), schedule)
