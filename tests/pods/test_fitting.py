"""Which options make a step fit: against all of their combinations, for programs whose memory is a plain sum."""

import dataclasses
import itertools

import numpy as np
import pytest

from dualpipe_jax.pods.fitting import remedies
from dualpipe_jax.pods.plan import Plan

VALUES = {
    "shard": ("nothing", "optimizer", "parameters"),
    "remat": ("none", "keys", "local", "wide", "all"),
    "max_stash": (None, 3, 2, 1, 0),
    "capacity_factor": (None, 1.25),
}


INTERLEAVED = VALUES | {"stages_per_rank": (None, 4)}


def program(seed, every=VALUES):
    """Bytes of a plan: each option saves something of its own, the weaker less than the stronger."""
    rng = np.random.default_rng(seed)
    saved = {name: np.append(0, np.sort(rng.integers(1, 100, len(of) - 1))) for name, of in every.items()}

    def needed(plan):
        return 1000 - sum(int(saved[name][of.index(getattr(plan, name))]) for name, of in every.items())

    return needed


def options(found):
    words = " ".join(one.option for one in found).split()
    flags = [word.removeprefix("--").replace("-", "_") for word in words[::2]]
    values = [int(v) if v.isdigit() else float(v) if v[0].isdigit() else v for v in words[1::2]]
    return dict(zip(flags, values, strict=True))


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize(
    "schedule, options_of", [("dualpipe", VALUES), ("interleaved_1f1b_overlap", INTERLEAVED)]
)
def test_what_is_found_fits_and_nothing_of_it_is_idle(schedule, options_of, seed):
    plan, needed = Plan("v3", schedule=schedule), program(seed, options_of)
    every = [
        dataclasses.replace(plan, **dict(zip(options_of, values, strict=True)))
        for values in itertools.product(*options_of.values())
    ]
    lossless = min(needed(other) for other in every if other.capacity_factor is None)
    for limit in sorted({needed(other) for other in every}):
        if limit >= needed(plan):
            continue
        found = remedies(plan, limit, needed)
        chosen = options(found)
        last = dataclasses.replace(plan, **chosen)
        assert needed(last) == found[-1].needed <= limit
        assert ("capacity_factor" in chosen) == (limit < lossless), (
            "tokens are dropped where nothing else is enough"
        )
        for name in chosen.keys() - {"capacity_factor"}:
            assert needed(dataclasses.replace(last, **{name: getattr(plan, name)})) > limit, name
        so_far = [needed(dataclasses.replace(plan, **options(found[: n + 1]))) for n in range(len(found))]
        assert [one.needed for one in found] == so_far


def test_what_is_never_enough_is_counted_once_with_all_that_helps():
    asked = []

    def needed(plan):
        asked.append(plan)
        return 1000

    plan = Plan("v3", remat="all", dispatch="capacity", capacity_factor=1.0)
    (found,) = remedies(plan, 10, needed)
    assert found.option == "--shard parameters --max-stash 0" and found.needed == 1000
    assert len(asked) == 1, "each takes seconds"
    plan = dataclasses.replace(plan, shard="parameters", max_stash=0)
    assert remedies(plan, 10, needed) == ()


@pytest.mark.parametrize(
    "limit, wanted", [(850, ["--shard optimizer"]), (10, ["--shard parameters --max-stash 0"])]
)
def test_what_the_program_refuses_is_not_proposed(limit, wanted):
    sizes = {"nothing": 1000, "optimizer": 800, "parameters": 700}

    def needed(plan):
        if plan.remat != "none" or plan.capacity_factor is not None:
            raise ValueError("this program recomputes nothing, and its room is its own")
        return sizes[plan.shard]

    assert [one.option for one in remedies(Plan("v3"), limit, needed)] == wanted


def test_what_saves_next_to_nothing_is_passed_over_where_others_are_enough():
    def needed(plan):
        saved = {"none": 0, "keys": 0, "local": 0, "wide": 300, "all": 400}[plan.remat]
        return 1000 - saved - 5 * (plan.shard != "nothing")

    found = remedies(Plan("v3"), 697, needed)  # to which --shard optimizer --remat wide would do
    assert [(one.option, one.needed) for one in found] == [("--remat all", 600)]


def test_what_the_plan_has_already_is_not_proposed():
    plan = Plan("v3", remat="local", shard="optimizer", max_stash=2, dispatch="capacity")
    sizes = {"none": 500, "local": 400, "wide": 300, "all": 100}
    found = remedies(plan, 350, lambda other: sizes[other.remat])
    assert [(one.option, one.needed) for one in found] == [("--remat wide", 300)]


def test_stages_are_cut_finer_only_where_that_is_left_to_choose():
    def needed(plan):
        return 1000 if plan.stages_per_rank in (None, 2) else 500

    def found(schedule, **given):
        return [one.option for one in remedies(Plan("v3", schedule=schedule, **given), 600, needed)]

    assert found("interleaved_1f1b_overlap") == ["--stages-per-rank 4"]
    assert found("interleaved-1f1b", stages_per_rank=2) == ["--stages-per-rank 4"]
    for schedule, given in (
        ("dualpipe", {}),
        ("interleaved_1f1b_overlap", {"stage_layers": (4, 4, 4, 4)}),
        ("interleaved_1f1b_overlap", {"layers_per_stage": 2}),
    ):
        assert not any("--stages-per-rank" in option for option in found(schedule, **given)), schedule
