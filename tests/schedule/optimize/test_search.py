"""The automatic scheduler is no worse than any named schedule that fits, and says what it cannot do."""

import itertools
import math
import pathlib
import runpy
import sys
import types

import pytest

from dualpipe_jax.schedule import ALL_SCHEDULES, CostModel, MemoryModel, Placement, lower, simulate, validate
from dualpipe_jax.schedule.optimize import search_state
from dualpipe_jax.schedule.optimize.bounds import lower_bound
from dualpipe_jax.schedule.optimize.choose import choose
from dualpipe_jax.schedule.optimize.moves import (
    Move,
    moves_of,
    of_different_microbatches,
    paired,
    split_alone,
)
from dualpipe_jax.schedule.optimize.player import Player
from dualpipe_jax.schedule.optimize.polish import improve
from dualpipe_jax.schedule.optimize.problem import Problem
from dualpipe_jax.schedule.optimize.search import search
from dualpipe_jax.schedule.optimize.terms import make_terms
from dualpipe_jax.schedule.recipes import interleaved_1f1b_overlap, one_f_one_b

BENCHMARK = pathlib.Path(__file__).parents[3] / "benchmarks" / "search.py"

SIZES = MemoryModel(residual_i=0.4, residual_w=0.6, stash=0.5, boundary=0.1, parameters=3)
ACTIVATIONS = MemoryModel()

GRID = (  # ranks, microbatches, costs, memory limit: all of a whole rank's share
    (2, 2, CostModel(1, 1, 1, FB=2), 2.0),
    (2, 8, CostModel(1, 1.64, 0.97), 2.0),
    (3, 6, CostModel(1, 1, 1.5, FB=2.5), 3.5),
    (4, 4, CostModel(1, 2, 1, FB=3), math.inf),
    (3, 6, CostModel(1, 1, 1, FB=2.25), 7.0, SIZES),
    (4, 8, CostModel(1, 1.64, 0.97, FB=2.7), 3.0),
    (4, 16, CostModel(1, 1, 1, FB=2, send=0.2), 4.5),
    (6, 12, CostModel(1, 1, 1.5, extra={0: (0.1, 0, 0.1), -1: (0.3, 0.3, 0.3)}), 6.0),
    (8, 8, CostModel(1, 1, 1, FB=2.25, send=0.1, blocking=True), 8.0),
)


def makespan(schedule, costs):
    return simulate(schedule, costs.for_schedule(schedule)).makespan


def measured(ranks, microbatches, costs, limit, memory=ACTIVATIONS, effort=0.03):
    """Makespans of the search and of the best named schedule with one copy of the parameters that fits."""
    found = validate(search(ranks, microbatches, costs, limit, memory=memory, effort=effort))
    timeline = simulate(found, costs.for_schedule(found))
    assert max(timeline.memory(memory.for_schedule(found))) <= limit * (1 + 1e-9)
    assert found.placement.num_pipes == 1
    candidates = choose(ranks, microbatches, costs, limit, memory=memory)
    best = min((c.makespan for c in candidates if c.fits and c.num_copies == 1), default=math.inf)
    return timeline.makespan, best


@pytest.mark.parametrize("settings", [GRID[:5], pytest.param(GRID[5:], marks=pytest.mark.slow)])
def test_no_worse_than_any_named_schedule_and_mostly_better(settings):
    results = [measured(*setting) for setting in settings]
    assert all(found <= best * (1 + 1e-9) for found, best in results)
    assert sum(found < best * (1 - 1e-9) for found, best in results) >= len(settings) - 1


@pytest.mark.slow
def test_no_worse_on_small_settings_of_the_benchmark():
    grid = [setting for setting in runpy.run_path(str(BENCHMARK))["grid"]() if setting[0] <= 4][::3]
    assert len(grid) >= 12
    results = [measured(*setting, effort=0.01) for setting in grid]
    assert all(found <= best * (1 + 1e-9) for found, best in results)
    assert sum(found < best * (1 - 1e-9) for found, best in results) > 0.8 * len(grid)


def test_shorter_than_zb_v_in_its_memory_and_than_dualpipe_v_in_its_own():
    costs = CostModel(1, 1, 1, FB=2)
    named = {c.name: c.makespan for c in choose(4, 12, costs)}
    found = search(4, 12, costs, memory_limit=4, placement="v", effort=0.01)
    assert makespan(found, costs) < 0.9 * named["zb_v"]
    roomier = search(4, 12, costs, memory_limit=4.5, placement="v", effort=0.03)
    assert makespan(roomier, costs) < named["dualpipe_v"]


def test_what_is_proven_best_is_not_polished(monkeypatch):
    monkeypatch.setattr(sys.modules[search.__module__], "polish", lambda *_: pytest.fail("it is the best"))
    found = search(8, 32, placement="v", effort=100)
    bound = lower_bound(8, 32, placement=Placement.v(8))
    assert makespan(found, CostModel()) == pytest.approx(bound)


@pytest.mark.parametrize(
    ("ranks", "placement", "costs", "limit"),
    [
        (2, "v", CostModel(FB=2), 2.5),
        (3, "linear", CostModel(2, 3, 2, FB=5), 3.0),
        (3, "v", CostModel(FB=2), 2.0),
        (4, "linear", CostModel(FB=2), 4.0),
    ],
)
def test_small_ones_are_the_optimum(ranks, placement, costs, limit):
    pytest.importorskip("scipy")
    from dualpipe_jax.schedule.optimize.optimum import optimum

    found = search(ranks, 4, costs, limit, placement, effort=0.1)
    best = optimum(found.placement, 4, costs, limit, incumbents=(found,), time_limit=20)
    assert best.proven
    assert makespan(found, costs) == pytest.approx(best.makespan)


def test_the_same_arguments_give_the_same_schedule_and_it_lowers():
    arguments = 2, 4, CostModel(1, 1.64, 0.97, FB=2.7), 2.0
    found = search(*arguments, effort=0.02)
    assert found == search(*arguments, effort=0.02)
    assert lower(found).num_ticks > 0


def test_it_stops_when_told(monkeypatch):
    """By a clock that goes on a tenth of a second whenever it is looked at: with so much effort it would take days."""
    looks = itertools.count()
    for module in (sys.modules[search.__module__], search_state):
        monkeypatch.setattr(module, "time", types.SimpleNamespace(monotonic=lambda: next(looks) / 10))
    found = search(8, 32, CostModel(FB=2.25), 8.0, effort=1e6, seconds=5)
    assert next(looks) > 50
    assert validate(found).num_microbatches == 32


def test_a_given_placement_is_kept():
    other = Placement(((0, 2, 1, 3),))
    for given, expected in (
        ("linear", Placement.linear(4)),
        ("v", Placement.v(4)),
        ("wave", Placement.wave(4, 2)),
        ("interleaved", Placement.interleaved(4, 2)),
        ("interleaved_4", Placement.interleaved(4, 4)),
        ("bidirectional", Placement.bidirectional(4)),
        (other, other),
    ):
        found = search(4, 4, CostModel(FB=2), 6.0, given, effort=0.005)
        assert validate(found).placement == expected, given


@pytest.mark.parametrize(
    ("ranks", "microbatches", "costs", "memory"),
    [
        (2, 5, CostModel(1, 1.64, 0.97, FB=2.7, send=0.05), ACTIVATIONS),
        (2, 4, CostModel(1, 1, 1.5, FB=2.5), MemoryModel(0.5, 0.5, 0.4, 0.1, parameters=2)),
        pytest.param(3, 6, CostModel(FB=2.25), ACTIVATIONS, marks=pytest.mark.slow),
    ],
)
def test_more_memory_never_makes_it_longer(ranks, microbatches, costs, memory):
    last = math.inf
    for limit in (1, 1.5, 2.3, 3.4, math.inf):
        limit += memory.parameters + memory.boundary * 4
        found = validate(search(ranks, microbatches, costs, limit, memory=memory, effort=0.005))
        played = simulate(found, costs.for_schedule(found))
        assert max(played.memory(memory.for_schedule(found))) <= limit * (1 + 1e-9)
        assert played.makespan <= last * (1 + 1e-9)
        last = played.makespan


def test_finer_cuts_are_where_it_starts_too():
    """With free sends and pairs that gain, four stages a rank in rounds; with dear ones, fewer."""
    free, dear = CostModel(FB=2.25), CostModel(FB=2.25, send=1)
    deep = interleaved_1f1b_overlap(4, 8, 4)
    found = search(4, 8, free, effort=0)
    assert found.placement == Placement.interleaved(4, 4)
    assert makespan(found, free) <= makespan(deep, free)
    modest = search(4, 8, dear, effort=0)
    assert modest.placement != found.placement
    assert makespan(modest, dear) < makespan(deep, dear)


def test_cuts_so_fine_that_an_extra_takes_more_than_there_is_are_left_out():
    costs = CostModel(FB=2.25, extra={-1: (-0.4, 0, 0)})  # of a quarter of a forward
    found = search(2, 4, costs, effort=0)
    assert found.placement.num_stages <= 4 and makespan(found, costs) > 0


def test_extras_that_no_placement_can_take_are_told():
    costs = CostModel(extra={0: (-0.6, 0, 0), -1: (-0.6, 0, 0)})  # on one rank both are of one stage
    with pytest.raises(ValueError, match=r"extra\[0\]=\(-1.2, .*takes more away than a stage has"):
        search(1, 4, costs)


def test_own_recipes_are_where_it_starts():
    made = []

    def recipe(ranks, microbatches):
        made.append((ranks, microbatches))
        return one_f_one_b(ranks, microbatches)

    costs = CostModel(FB=1.9)
    found = search(4, 8, costs, placement="linear", schedules=(recipe,), effort=0)
    assert made == [(4, 8)]
    assert makespan(found, costs) <= makespan(one_f_one_b(4, 8), costs)


def test_something_is_found_where_only_parameters_take_memory():
    """No recipe makes this placement, and with activations of no size no limit but the least was climbed."""
    placement, memory = Placement(((0, 0, 1, 1),)), MemoryModel(residual_i=0, parameters=1)
    found = search(2, 2, memory_limit=1.5, placement=placement, memory=memory, effort=0.01)
    assert validate(found).placement == placement


@pytest.mark.parametrize("options", [{"effort": 0}, {"seconds": 0}], ids=str)
def test_something_is_found_even_from_nothing(options):
    found = validate(search(3, 5, memory_limit=1, schedules=(), **options))
    assert max(simulate(found).memory(ACTIVATIONS.for_schedule(found))) <= 1


def test_no_room_says_how_much_the_most_modest_schedule_takes():
    memory = MemoryModel(parameters=3)
    message = r"search: got memory_limit=3.5, but no schedule runs in less than 4, .*placement \(\(0, 1\),\)"
    with pytest.raises(ValueError, match=message):
        search(2, 4, memory_limit=3.5, memory=memory)
    found = search(2, 4, memory_limit=4, memory=memory, effort=0.01)
    assert max(simulate(found).memory(memory.for_schedule(found))) <= 4


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((0, 4), {}, "got 0 ranks and 4 microbatches.*try 1 ranks and 4 microbatches"),
        ((4, 8), {"placement": "w"}, "no placement 'w'; try one of linear, v, wave, interleaved, .*bid"),
        (
            (4, 8),
            {"placement": Placement.v(3)},
            r"got 4 ranks and 8 .*, but a placement of 3 ranks; give num_ranks=3",
        ),
        ((4, 8), {"memory_limit": math.nan}, "got memory_limit=nan; give a number, or leave it out"),
        (
            (4, 7),
            {"placement": "bidirectional"},
            r"got 4 ranks and 7 microbatches, .* must be a positive multiple of 2; try 6 or 8",
        ),
        ((2, 4), {"effort": -1}, "got effort=-1; it must be finite and at least 0"),
        ((2, 4), {"effort": math.nan}, "got effort=nan; it must be finite and at least 0"),
        ((2, 4), {"seconds": math.inf}, "got seconds=inf; it must be finite and at least 0"),
    ],
)
def test_arguments_that_make_no_sense(arguments, options, message):
    with pytest.raises(ValueError, match=f"search: {message}"):
        search(*arguments, **options)


def test_moves_play_as_the_schedule_they_came_from():
    """With whole backwards nothing is left to the player; with split ones it places W's at least as well."""
    costs = CostModel(1, 1.5, 0.7, FB=2.5, send=0.1)
    for recipe in ALL_SCHEDULES:
        schedule = recipe(4, 8)
        player, moves = Player(make_terms(schedule.placement, Problem(8, costs))), moves_of(schedule)
        again = simulate(validate(player.schedule(moves, "again")), costs)
        assert again.makespan == pytest.approx(player.play(moves).makespan), schedule.name
        timeline, sizes = simulate(schedule, costs), MemoryModel(0.4, 0.6, stash=0.5)
        if not any(move.split for order in moves for move in order):
            assert again.ends == timeline.ends, schedule.name
        within = make_terms(schedule.placement, Problem(8, costs, sizes, max(timeline.memory(sizes))))
        assert Player(within).play(moves) is not None, f"{schedule.name} fits the memory that it takes"


def test_moves_that_hang_or_overflow_are_refused():
    schedule = one_f_one_b(2, 4)
    player = Player(make_terms(schedule.placement, Problem(4, limit=1)))
    moves = moves_of(schedule)
    assert player.play(moves) is None  # two microbatches on rank 0
    with pytest.raises(ValueError, match="improve: the moves hang or do not fit the memory"):
        improve(player, moves, 1)
    roomy = Player(make_terms(schedule.placement, Problem(4)))
    assert roomy.play([order[::-1] for order in moves]) is None
    assert roomy.play(moves, bound=roomy.play(moves).makespan - 0.5) is None


def test_neighbours_are_paired_but_never_with_themselves():
    terms = make_terms(Placement.v(2), Problem(3, CostModel(FB=2)))
    merged = paired(terms, [[Move(0, -1), Move(-1, 0), Move(1, -1), Move(-1, 9)], []])
    assert merged == [[Move(0, -1), Move(1, 0), Move(-1, 9)], []]
    assert not of_different_microbatches(terms, Move(0, 9)) and of_different_microbatches(terms, Move(0, 10))
    assert split_alone(merged)[0][1:] == [Move(1, 0), Move(-1, 9, split=True)]
