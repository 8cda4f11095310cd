"""What the page on schedules says: its tables against commands, its formulas against the simulator, its warnings."""

import contextlib
import dataclasses
import inspect
import io
import itertools
import json
import re
from pathlib import Path

import pytest

from dualpipe_jax.__main__ import main
from dualpipe_jax.pods import Plan, planner
from dualpipe_jax.schedule import (
    ALL_SCHEDULES,
    CostModel,
    MemoryModel,
    chimera,
    dualpipe,
    interleaved_1f1b_overlap,
    one_f_one_b,
    simulate,
    v_min,
    validate,
)

PAGE = Path(__file__).parent.parent / "docs" / "schedules.md"
TEXT = PAGE.read_text()
RECIPES = {recipe.__name__: recipe for recipe in ALL_SCHEDULES}
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)


def section(title: str) -> str:
    """From a heading to the next one of its level or above it."""
    level = title.index(" ")
    return re.split(rf"^#{{1,{level}}} ", TEXT.split(f"\n{title}\n")[1], maxsplit=1, flags=re.M)[0]


def tables(text: str) -> list[list[dict[str, str]]]:
    """Tables as rows by the titles of their columns."""
    found = []
    for body in re.findall(r"(?:^\|.*\|\n)+", text, re.M):
        head, _, *rows = [[cell.strip() for cell in line[1:-1].split("|")] for line in body.splitlines()]
        found.append([dict(zip(head, row, strict=True)) for row in rows])
    return found


def printed(line: str) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main(line.split()[1:]) == 0, line
    return out.getvalue()


def commands_with_tables() -> dict[str, list[dict[str, str]]]:
    """Commands of `compare` that a table follows, before the next block and heading."""
    found = {}
    for match in FENCE.finditer(TEXT):
        rest = re.split(r"^(?:```|#)", TEXT[match.end() + 1 :], maxsplit=1, flags=re.M)[0]
        if match[1] == "bash" and "| schedule |" in rest:
            found[match[2].strip()] = tables(rest)[0]
    return found


TABLES = commands_with_tables()


def test_two_commands_have_tables():
    assert len(TABLES) == 2


@pytest.mark.parametrize("command", TABLES)
def test_tables_hold_columns_that_the_command_prints(command):
    (whole,) = tables(printed(f"{command} --format markdown"))
    shown = TABLES[command]
    assert [row["schedule"] for row in shown] == [row["schedule"] for row in whole]
    assert [row | mine for row, mine in zip(whole, shown, strict=True)] == whole


# The gallery


def arithmetic(text: str) -> str:
    """A formula of the page in Python's spelling: (P - 1)(F + B) with its signs of multiplication."""
    text = re.sub(r"(\d)(?=[A-Za-z(])", r"\1 * ", " ".join(text.split()))
    return re.sub(r"\) ?(?=[A-Za-z(])", ") * ", text)


def condition(text: str) -> str:
    terms = re.findall(r"`([^`]*)`", text) or [text.replace("always", "True")]
    return " and ".join(re.sub(r"(?<![<>])=", "==", arithmetic(term)) for term in terms)


FORMULAS = {
    row["schedule"]: (
        arithmetic(row["largest idle"][1:-1]),
        condition(row["exact where"]),
        row["activations"],
    )
    for table in tables(section("## Gallery"))
    for row in table
    if "exact where" in row
}
COSTS = [
    CostModel(),
    CostModel(FB=2),
    CostModel(2, 2, 1, 4),
    CostModel(3, 2, 1, 5),
    CostModel(1, 1.64, 0.97, 3),
    CostModel(1, 0.25, 0.75, 1.5),
    CostModel(1, 2, 3, 5.5),
]


def cases(name, ranks, microbatches):
    """Schedules of all numbers of ranks, of microbatches by ranks, and of stages; with the formulas' names."""
    finer = {"num_stages_per_rank", "num_waves"} & inspect.signature(RECIPES[name]).parameters.keys()
    for p in ranks:
        for m, cut in itertools.product(microbatches(p), (1, 2, 3) if finer else (2,)):
            try:
                schedule = RECIPES[name](p, m, **dict.fromkeys(finer, cut))
            except ValueError:
                assert name in ("dualpipe", "chimera"), "only two pipes refuse odd numbers"
                continue
            yield schedule, {"P": p, "M": m, "v": cut, "w": cut, "max": max, "min": min, "abs": abs}


def largest_idle(schedule, costs):
    return max(simulate(schedule, costs.for_schedule(schedule)).idle)


def given(costs):
    return {name: getattr(costs, name) for name in ("F", "I", "W", "B", "FB")}


def test_every_schedule_has_formulas_a_picture_and_a_heading():
    gallery = section("## Gallery")
    assert FORMULAS.keys() == RECIPES.keys()
    for name in RECIPES:
        assert f"(pictures/gallery/{name}.png)" in gallery
        assert re.search(rf"^#### .*: {name}$", gallery, re.M)


@pytest.mark.parametrize("name", FORMULAS)
def test_the_largest_idle_is_what_the_formula_says(name):
    idle, where, _ = FORMULAS[name]
    held = 0
    for schedule, names in cases(
        name, (1, 2, 3, 4, 6, 7), lambda p: {1, p, p + 1, 2 * p - 2, 2 * p - 1, 2 * p, 3 * p} - {0}
    ):
        for costs in COSTS:
            if eval(where, values := names | given(costs)):
                held += 1
                assert largest_idle(schedule, costs) == pytest.approx(eval(idle, values)), values
    assert held >= 15


@pytest.mark.parametrize("name", FORMULAS)
def test_activations_are_what_the_formula_says(name):
    formula = arithmetic(FORMULAS[name][2].strip("`"))
    for schedule, names in cases(name, range(1, 8), lambda p: (2 * p, 3 * p, 4 * p)):
        live = simulate(schedule).memory(MemoryModel().for_schedule(schedule))
        assert max(live) == pytest.approx(eval(formula, names)), names


def test_dualpipe_at_any_costs():
    (formula,) = re.findall(r"`(\(h - 1\)[^`]*)`", section("### What the formulas leave out"))
    formula = arithmetic(formula)
    for name, share in (("dualpipe", 1), ("dualpipe_v", 2)):
        for schedule, names in cases(name, range(1, 7), lambda p: (2 * p, 2 * p + 2)):
            for costs in COSTS:
                h = names["P"] / 2 * share
                if max(costs.F, costs.B) <= costs.FB <= costs.F + costs.B:
                    wanted = eval(formula, names | given(costs) | {"h": h}) / share
                    assert largest_idle(schedule, costs) == pytest.approx(wanted), (names, costs)


@pytest.mark.parametrize("name", ["v_half", "v_min"])
def test_other_ranks_on_a_v_differ_by_at_most_two_forwards(name):
    for schedule, names in cases(name, range(1, 13), lambda p: [2 * p]):
        assert (
            abs(largest_idle(schedule, CostModel()) - eval(FORMULAS[name][0], names | given(CostModel())))
            <= 2
        )


def test_pairs_idle_more_of_a_shorter_step():
    rows = {row["schedule"]: row for row in next(iter(TABLES.values()))}
    pairs, whole = rows["interleaved_1f1b_overlap"], rows["interleaved_zero_bubble"]
    assert (pairs["pairs"], whole["pairs"]) == ("yes", "no")
    assert float(pairs["bubble"][:-2]) > float(whole["bubble"][:-2])
    assert float(pairs["makespan"]) < float(whole["makespan"])


def test_interleaved_pairs_of_four_stages_idle_longer_in_a_shorter_step():
    """Where sends are free and microbatches many, as three pages say; with 20 on 8 ranks DualPipe's step is shorter."""
    for ranks, microbatches, shorter in ((4, 16, True), (16, 64, True), (8, 20, False)):
        pipes, finer = dualpipe(ranks, microbatches), interleaved_1f1b_overlap(ranks, microbatches, 4)
        one, four = (simulate(each, CostModel(FB=2.25).for_schedule(each)) for each in (pipes, finer))
        assert sum(four.idle) > sum(one.idle)
        assert (four.makespan < one.makespan) == shorter


# Warnings


def test_chimera_idles_more_than_1f1b_from_the_third_unit_on():
    more = [
        largest_idle(chimera(8, m), CostModel()) > largest_idle(one_f_one_b(8, m), CostModel())
        for m in (8, 16, 24, 32)
    ]
    assert more == [False, False, True, True]


def test_v_min_is_fragile_at_the_costs_of_a_real_pair():
    assert "twice as long as 1F1B on 16 ranks with 64 microbatches" in " ".join(TEXT.split())
    costs = CostModel(1, 1.64, 0.97)  # DeepSeek-V3: computation alone
    assert largest_idle(v_min(16, 64), costs) > 2 * largest_idle(one_f_one_b(16, 64), costs)


@pytest.mark.parametrize(("ranks", "microbatches"), [(4, 8), (8, 20), (16, 64)])
@pytest.mark.parametrize(("both", "one_more"), [(2, 1), (2.5, 0), (3, 0)])
def test_blocking_transfers_cost_dualpipe_so_many(ranks, microbatches, both, one_more):
    schedule, free = dualpipe(ranks, microbatches), CostModel(FB=both)
    blocking = simulate(schedule, CostModel(FB=both, send=0.125, blocking=True)).makespan
    transfers = (blocking - simulate(schedule, free).makespan) / 0.125
    assert transfers == microbatches + 2 * ranks - 3 + one_more


def test_plan_tries_what_the_page_says():
    (named,) = re.findall(r"it prices (.*?)\. ", " ".join(TEXT.split()))
    assert tuple(re.findall(r"`(\w+)`", named)) == planner.SCHEDULES
    wanted = planner.Wanted(Plan("v2-lite"), pp=(4,), schedules=("interleaved_1f1b_overlap",))
    found, _ = planner.cases(wanted, 16)
    assert found and all(case.plan.schedule == "interleaved_1f1b_overlap" for case in found)
    assert {max(map(len, planner.schedule_of(case.plan).placement.stages_on)) for case in found} == {2}
    assert validate(interleaved_1f1b_overlap(16, 64, 4)).placement.num_model_stages == 64


# Costs


def test_the_file_of_costs_is_read(tmp_path):
    (text,) = (body for language, body in FENCE.findall(TEXT) if language == "json")
    (tmp_path / "costs.json").write_text(text)
    known = json.loads(text)
    facts = json.loads(
        printed(f"dualpipe compare dualpipe --ranks 4 --microbatches 8 --json --costs {tmp_path}/costs.json")
    )
    assert known["costs"].items() <= facts["costs"].items() and facts["units"] == known["units"]


def test_every_cost_and_size_is_in_the_tables(capsys):
    with pytest.raises(SystemExit):
        main(["compare", "--help"])
    options = set(re.findall(r"--[A-Za-z][\w-]*", capsys.readouterr().out))
    by_model = {
        title: table
        for table in tables(section("## Costs"))
        for title in ("`CostModel`", "`MemoryModel`")
        if title in table[0]
    }
    for model in (CostModel, MemoryModel):
        title = f"`{model.__name__}`"
        told = " ".join(row["option"] + row[title] for row in by_model[title]).replace("-", "_")
        for field in dataclasses.fields(model):
            assert re.search(rf"\b(?:__)?{field.name}\b", told), field.name
    flags = {
        flag
        for table in by_model.values()
        for row in table
        for flag in re.findall(r"--[\w-]+", row["option"])
    }
    assert flags <= options
