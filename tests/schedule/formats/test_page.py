"""The page: what it holds, and in headless Chromium what its script makes of it, against Python's simulator."""

import base64
import dataclasses
import functools
import html
import json
import re
import shutil
import subprocess
import zlib

import numpy as np
import pytest

from dualpipe_jax.present.numbers import Units
from dualpipe_jax.schedule import ALL_SCHEDULES, Action, CostModel, MemoryModel, Op, Schedule, simulate
from dualpipe_jax.schedule.blame import critical_path, why_idle
from dualpipe_jax.schedule.formats import page as page_module
from dualpipe_jax.schedule.formats.colours import COLOURS
from dualpipe_jax.schedule.formats.json_text import from_json, to_json
from dualpipe_jax.schedule.formats.page import encode, html_page
from dualpipe_jax.schedule.optimize.bounds import lower_bound
from dualpipe_jax.schedule.recipes import (
    dualpipe,
    dualpipe_v,
    gpipe,
    interleaved_zero_bubble,
    one_f_one_b,
    zb_h1,
)
from dualpipe_jax.schedule.recipes.classic import interleaved_1f1b, interleaved_1f1b_overlap, looped_bfs
from dualpipe_jax.schedule.simulate import jittered

RECIPES = {recipe.__name__: recipe for recipe in ALL_SCHEDULES}
FINER = {
    f"{recipe.__name__}, 4 stages a rank": functools.partial(recipe, num_stages_per_rank=4)
    for recipe in (interleaved_1f1b, interleaved_1f1b_overlap, looped_bfs, interleaved_zero_bubble)
}
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
in_chromium = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium")


@pytest.fixture(autouse=True)
def few_counts(monkeypatch):
    monkeypatch.setattr(page_module, "RANKS", (2, 4, 8))
    monkeypatch.setattr(page_module, "MICROBATCHES", (3, 8, 20))


def payload(page):
    packed = re.search(r'<script id="payload" type="text/plain">([^<]*)</script>', page)[1]
    return json.loads(zlib.decompress(base64.b64decode(packed)))


def decode(text, held):
    """The slots of an order, read back; shares no code with the page."""
    slots, following = [], {}
    for cell in re.findall(r"(?:[^\d+]\d*\+)?[^\d+]\d*", text):
        slot = []
        for part in cell.split("+"):
            letter, number = part[0], part[1:]
            microbatch = int(number) if number else following.get(letter, -1) + 1
            following[letter] = microbatch
            local, op = divmod(ord(letter) - 65, 4)
            slot.append(Action(held[local], Op("FBIW"[op]), microbatch))
        slots.append(tuple(slot))
    return tuple(slots)


def test_the_page_holds_the_orders_of_the_recipes():
    held = payload(html_page())["schedules"]
    assert set(held) == {*RECIPES, *FINER}
    served = 0
    for name, table in held.items():
        assert set(table) == {f"{r},{m}" for r in (2, 4, 8) for m in (3, 8, 20)}
        for counts, entry in table.items():
            if isinstance(entry, str):
                with pytest.raises(ValueError, match=re.escape(entry)):
                    (RECIPES | FINER)[name](*map(int, counts.split(",")))
                continue
            schedule = (RECIPES | FINER)[name](*map(int, counts.split(",")))
            stages = schedule.placement.stages_on
            assert schedule.placement.pipes == tuple(map(tuple, entry["pipes"]))
            assert schedule.orders == tuple(map(decode, entry["orders"], stages))
            served += 1
    assert served > 4 * len(RECIPES)


def test_microbatches_out_of_sequence_are_numbered():
    order = ((Action(1, Op.F, 1),), (Action(1, Op.F, 0),), (Action(7, Op.F, 0), Action(1, Op.B, 1)))
    assert encode(order, (1, 7)) == "A1A0E+B1"
    assert decode("A1A0E+B1", (1, 7)) == order


def test_it_is_one_file_that_needs_no_network():
    page = html_page(gpipe(2, 3), recipes=(gpipe,))
    assert not re.search(r"https?:|\bsrc=|\bhref=|@import|url\(|\bfetch\(|\bimport\b", page)
    assert "@" not in re.sub(r"@media", "", page), "a place of the template was left"


def test_the_real_page_is_small():
    few = payload(html_page())  # at nine counts of 98
    assert len(json.dumps(few)) < 100_000
    assert len(html_page()) < 72_000


def test_counts_off_the_grid_are_held():
    for counts in ((3, 5), (24, 8), (2, 96)):
        data = payload(html_page(zb_h1(*counts), recipes=(gpipe, zb_h1)))
        assert (data["start"]["schedule"], list(counts) in data["points"]) == ("zb_h1", True)
        assert f"{counts[0]},{counts[1]}" in data["schedules"]["zb_h1"]
        assert ("3,8" in data["schedules"]["gpipe"]) == (counts == (3, 5))


def test_a_schedule_of_ones_own_is_held_beside_the_recipe_of_its_name():
    mine = Schedule("gpipe", one_f_one_b(2, 3).placement, 3, one_f_one_b(2, 3).orders)
    data = payload(html_page(mine, recipes=(gpipe,)))
    assert data["start"]["schedule"] == "gpipe, as given"
    assert data["schedules"]["gpipe, as given"]["2,3"]["orders"][0] == "AABABB"
    assert data["schedules"]["gpipe"]["2,3"]["orders"][0] == "AAABBB"


def open_page(folder, page, fragment="", options=("--dump-dom",)):
    """What Chromium prints of a page after it has run."""
    path = folder / "page.html"
    path.write_text(page)
    switches = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    switches += [f"--user-data-dir={folder / 'profile'}", "--virtual-time-budget=20000"]
    command = [CHROMIUM, *switches, *options, f"file://{path}#{fragment}"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    return run.stdout


STEPS = """
const steps = [@STEPS@], seen = [];
const look = () => {
  seen.push(document.documentElement.outerHTML.replace(/<script[^]*?<\\/script>/g, ""));
  if (!steps.length) { document.body.dataset.seen = JSON.stringify(seen); return; }
  try { steps.shift()(); } catch (error) { document.body.dataset.error = error; }
  setTimeout(look, 2000);
};
const wait = setInterval(() => {
  if (!document.body.dataset.ready) return;
  clearInterval(wait);
  look();
}, 50);
"""


def look(folder, page, *steps, fragment=""):
    """The page as it stands at first and after each of some steps, lines of JavaScript; Chromium starts once."""
    script = STEPS.replace("@STEPS@", ",".join(f"() => {{ {step} }}" for step in steps))
    dom = open_page(folder, page.replace("</body>", f"<script>{script}</script></body>"), fragment)
    assert "data-error" not in dom
    return json.loads(html.unescape(re.search(r'data-seen="([^"]*)"', dom)[1]))


def told(dom, name):
    """What a step left in the body's data."""
    return html.unescape(re.search(rf'data-{name}="([^"]*)"', dom)[1])


def figures(dom, name):
    return float(re.search(rf'<output id="{name}" data-value="([^"]*)"', dom)[1])


def rows(dom):
    """Of each schedule in the table that can be played: makespan, bubble, memory."""
    found = {}
    for row in re.findall(r"<tr [^>]*data-schedule=[^>]*>", dom):
        attributes = dict(re.findall(r'data-(\w+)="([^"]*)"', row))
        if "makespan" in attributes:
            found[attributes["schedule"]] = tuple(
                float(attributes[name]) for name in ("makespan", "bubble", "memory")
            )
    return found


def by_python(counts, costs, memory):
    found = {}
    for name, recipe in (RECIPES | FINER).items():
        try:
            schedule = recipe(*counts)
            costs.for_schedule(schedule)
        except ValueError:
            continue
        timeline = simulate(schedule, costs.for_schedule(schedule))
        found[name] = timeline.makespan, timeline.bubble, max(timeline.memory(memory.for_schedule(schedule)))
    return found


HEAVY = {0: (0.1, 0, 0.2), -1: (0.3, 0.5, 0.25)}
LIGHT = {0: (-0.3, 0.2, 0), -1: (-0.4, -0.25, -0.1)}


def check_table(dom, counts, costs, memory):
    """All schedules in the table, and DualPipeV, which is shown, are as Python plays them."""
    expected, found = by_python(counts, costs, memory), rows(dom)
    assert {"gpipe", "dualpipe_v"} <= set(expected) == set(found)
    for name, figures_of in expected.items():
        assert found[name] == pytest.approx(figures_of, rel=1e-12, abs=1e-12), name
    assert tuple(figures(dom, name) for name in ("makespan", "bubble", "memory")) == found["dualpipe_v"]
    least = lower_bound(*counts, costs, placement=dualpipe_v(*counts).placement)
    assert figures(dom, "bound") == pytest.approx(least, rel=1e-12)


@in_chromium
def test_the_script_simulates_as_python_does_what_the_fragment_asks_for(tmp_path):
    first, *others = [
        ((8, 20), "FB=2.2", CostModel(FB=2.2), MemoryModel()),
        (
            (4, 20),
            "F=0.7&I=1.3&W=0.45&FB=2.1&send=0.17&residual_i=2&residual_w=0.5&stash=0.3&boundary=0.2&parameters=5",
            CostModel(0.7, 1.3, 0.45, FB=2.1, send=0.17),
            MemoryModel(2, 0.5, 0.3, 0.2, 5),
        ),
        (
            (4, 8),
            "W=1.5&pair=0.75&send=0.3&blocking=true&head=0.4",
            CostModel(1, 1, 1.5, FB=0.75 * 3.5, send=0.3, blocking=True, extra={-1: (0.4, 0.4, 0.6)}),
            MemoryModel(),
        ),
    ]

    def where(counts, asked, *_):
        return f"schedule=dualpipe_v&ranks={counts[0]}&microbatches={counts[1]}&{asked}"

    steps = [f'location.hash = "{where(*case)}";' for case in others]
    doms = look(tmp_path, html_page(one_f_one_b(4, 8)), *steps, fragment=where(*first))
    for dom, (counts, _, costs, memory) in zip(doms, (first, *others), strict=True):
        check_table(dom, counts, costs, memory)


TOLD = """
  const told = {};
  for (const name of Object.keys(data.schedules)) {
    const row = play(name, state);
    if (!row.reason) told[name] = [bound(row.schedule, row.costs), criticalPath(row), whyIdle(row, 1, 0)];
  }
  document.body.dataset.told = JSON.stringify(told);
"""


@in_chromium
@pytest.mark.parametrize(
    ("counts", "costs", "memory"),
    [
        (
            (4, 3),
            CostModel(1, 1.64, 0.97, FB=2.2, send=0.3, extra=HEAVY, send_inside=0.1, ranks_per_node=2),
            MemoryModel(stash=1),
        ),
        (
            (4, 8),
            CostModel(
                1, 1.64, 0.97, FB=2.2, send=0.3, extra=LIGHT, send_inside=0.1, ranks_per_node=2, blocking=True
            ),
            MemoryModel(parameters=9, extra={0: 2, -1: -1.5}, fixed=0.5),
        ),
    ],
    ids=["heavy", "light"],
)
def test_costs_bounds_and_chains_of_waiting_are_those_of_python(tmp_path, counts, costs, memory):
    _, dom = look(tmp_path, html_page(dualpipe_v(*counts), costs, memory), TOLD)
    check_table(dom, counts, costs, memory)
    found = json.loads(told(dom, "told"))
    assert len(found) > 10
    for name, (least, path, waits) in found.items():
        schedule = (RECIPES | FINER)[name](*counts)
        timeline = simulate(schedule, costs.for_schedule(schedule))
        bound = lower_bound(*counts, costs, placement=schedule.placement)
        assert least == pytest.approx(bound, rel=1e-12), name
        for links, expected in ((path, critical_path(timeline)), (waits, why_idle(timeline, 1, 0))):
            slots = [schedule.orders[rank][index] for rank, index in links]
            assert slots == [link.slot for link in expected], name


USE = """
  const slide = (id, value) => { $(id).value = value; $(id).dispatchEvent(new Event("input")); };
  slide("ranks", 0);
  slide("microbatches", 2);
  slide("F", 2);
  $("table").querySelector("[data-schedule=zb_h1] button").click();
  for (const key of ["ArrowRight", "ArrowDown", "ArrowRight"])
    $("canvas").dispatchEvent(new KeyboardEvent("keydown", { key }));
  $("theme").click();
  document.body.dataset.hash = location.hash;
"""


@in_chromium
def test_sliders_table_and_keys_and_what_a_fragment_cannot_ask_for(tmp_path):
    names = ("constructor", "__proto__", "toString", "no such")
    doms = look(
        tmp_path,
        html_page(gpipe(2, 3), recipes=(gpipe, zb_h1, dualpipe)),
        *(f'location.hash = "schedule={name}";' for name in names),
        'location.hash = "schedule=dualpipe&ranks=4&microbatches=3";',
        'location.hash = "theme=light&schedule=gpipe&ranks=8";',
        USE,
        fragment="schedule=nothing",
    )
    *unmoved, refused, _, used = doms
    assert len(unmoved) == 1 + len(names)
    for dom in unmoved:
        assert "<title>gpipe, 2 ranks, 3 microbatches</title>" in dom
        assert figures(dom, "makespan") == simulate(gpipe(2, 3)).makespan
    with pytest.raises(ValueError) as refusal:
        dualpipe(4, 3)
    assert f'<div id="refused"><p>{refusal.value}</p>' in refused
    assert "show 4 ranks, 8 microbatches" in refused
    assert re.search(r'<output id="makespan">\u2013</output>', refused)
    assert set(rows(refused)) == {"gpipe", "zb_h1"}
    timeline = simulate(zb_h1(2, 20), CostModel(2, 1, 1))
    assert figures(used, "makespan") == timeline.makespan
    assert 'data-theme="dark"' in used
    assert told(used, "hash") == "#schedule=zb_h1&ranks=2&microbatches=20&F=2"
    start, end = timeline.starts[1][1], timeline.ends[1][1]
    assert f"rank 1: {timeline.schedule.orders[1][1][0]}, from {start:g} to {end:g}; the rank keeps" in used
    assert "<title>zb_h1, 2 ranks, 20 microbatches</title>" in used


FOCUS = """
  [...$("table").querySelectorAll("button")].find((button) => button.textContent.includes("<i>")).focus();
  change({ F: 2 });
  document.body.dataset.focused = document.activeElement.textContent;
"""


@in_chromium
def test_a_schedule_of_ones_own_is_played_whatever_its_name_beside_another_send(tmp_path):
    mine, costs = dataclasses.replace(dualpipe_v(3, 8), name='a "b" <i>'), CostModel(FB=2.5)
    dom, slower = look(tmp_path, html_page(mine, costs, recipes=(gpipe, dualpipe_v)), FOCUS)
    found = {html.unescape(name): row for name, row in rows(dom).items()}
    assert found[mine.name] == found["dualpipe_v"] and figures(dom, "makespan") == found[mine.name][0]
    others = dict(re.findall(r'data-schedule="(\w+)"[^>]*data-other="([^"]*)"', dom))
    for schedule in (gpipe(3, 8), dualpipe_v(3, 8)):
        played = simulate(schedule, dataclasses.replace(costs, send=0.02).for_schedule(schedule))
        assert float(others[schedule.name]) == pytest.approx(played.makespan)
    assert ">send 0.02</th>" in dom
    assert told(slower, "focused") == mine.name


@in_chromium
def test_costs_in_ms_and_bytes_move_their_sliders_and_an_extra_of_no_stage_counts_nowhere(tmp_path):
    costs = CostModel(76.2, 99.6, 35.1, FB=129, extra={7: (1, 1, 1), -9: (2, 2, 2), -1: (0.5, 0.5, 0.5)})
    sizes = MemoryModel(residual_i=3e9, parameters=40e9)
    (dom,) = look(tmp_path, html_page(gpipe(2, 3), costs, sizes, recipes=(gpipe, dualpipe_v)))
    for id, value in (("F", 76.2), ("I", 99.6), ("residual_i", 3e9), ("parameters", 40e9)):
        (slider,) = re.findall(rf'<input[^>]* ?id="{id}"[^>]*>', dom)
        least, most = (float(re.search(rf'{end}="([^"]*)"', slider)[1]) for end in ("min", "max"))
        assert least < value < most / 2, f"{id} is pinned: {slider}"
    assert ">3G</output>" in dom and ">40G</output>" in dom
    expected = by_python((2, 3), costs, sizes)
    for name in ("gpipe", "dualpipe_v"):
        assert rows(dom)[name][0] == pytest.approx(expected[name][0])


@in_chromium
def test_a_schedule_dropped_on_the_page_is_played_and_saved_again(tmp_path):
    """And what never ends is refused; of a step that is zoomed into, all is saved."""
    mine, costs = dataclasses.replace(dualpipe_v(3, 7), name='mine "too"'), CostModel(FB=2.5)
    text = '{"name": "mine", "num_microbatches": 1, "pipes": [[0]], "orders": [["0B0", "0F0"]]}'
    *_, zoomed, refused, dropped = look(
        tmp_path,
        html_page(dualpipe(4, 8), costs, recipes=(dualpipe,)),
        """$("zoom").value = 4;
        draw();
        document.body.dataset.widths = JSON.stringify([picture().width, $("canvas").width]);""",
        f"try {{ takeIn({json.dumps(text)}); }} catch (error) {{ document.body.dataset.refused = error.message; }}",
        f"takeIn({json.dumps(to_json(mine))}); document.body.dataset.saved = writeSchedule(played);",
    )
    whole, seen = json.loads(told(zoomed, "widths"))
    assert whole > 3 * seen
    assert told(refused, "refused") == "mine never ends; dualpipe check says why"
    assert figures(dropped, "makespan") == pytest.approx(simulate(mine, costs.divided(2)).makespan)
    assert from_json(told(dropped, "saved")) == mine


def test_the_measured_preset_is_the_trace_it_says():
    """Compute 36.3, 59.7, 35.1 ms; 211 ms in series, 129 ms overlapped (the facts of the published trace)."""
    (_, costs, how) = next(p for p in page_module.presets() if "DeepSeek" in p[0])
    ms = 211 / (costs["F"] + costs["I"] + costs["W"])
    assert costs["W"] * ms == pytest.approx(35.1, abs=0.1)
    assert costs["I"] * ms - costs["F"] * ms == pytest.approx(59.7 - 36.3, abs=0.1)
    assert costs["pair"] * 211 == pytest.approx(129, abs=0.2)
    assert "36.3, 59.7, 35.1 ms" in how and "211 ms" in how and "129 ms" in how


@in_chromium
def test_the_picture_shows_the_boxes(tmp_path):
    from matplotlib.image import imread

    shot = tmp_path / "shot.png"
    options = [f"--screenshot={shot}", "--window-size=1300,900", "--hide-scrollbars"]
    open_page(tmp_path, html_page(dualpipe(4, 8), recipes=(dualpipe,)), "theme=light", options)
    pixels = np.round(imread(shot)[..., :3] * 255).astype(int)
    for op, shades in COLOURS.items():
        for colour in shades:
            rgb = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
            assert (pixels == rgb).all(axis=-1).sum() > 500, f"no {op} in {colour} in the picture"


@in_chromium
def test_a_chain_is_marked_until_something_changes_and_jitter_stands_beside_another_schedule(tmp_path):
    costs = CostModel(FB=2.25)
    chain = critical_path(simulate(dualpipe(4, 8), costs))
    page = html_page(dualpipe(4, 8), costs, recipes=(gpipe, dualpipe), chain=chain)
    held = payload(page)["chain"]
    assert [dualpipe(4, 8).orders[rank][index] for rank, index in held] == [link.slot for link in chain]
    beside = "schedule=dualpipe&ranks=4&microbatches=8&beside=gpipe&jitter=0.2"
    alone, dom, slower = look(tmp_path, page, f'location.hash = "{beside}";', "change({ F: 2 });")
    assert 'id="chain" aria-pressed="true"' in alone and 'id="chain" aria-pressed="false"' in slower
    assert '<p id="second-name" hidden=""' in alone and '<div id="spread" hidden="">' in alone
    assert '<p id="second-name">gpipe</p>' in dom and "95 % at 20.0&nbsp;% jitter" in dom
    for recipe in (dualpipe, gpipe):
        row = re.search(rf'<tr [^>]*data-schedule="{recipe.__name__}"[^>]*>', dom)[0]
        found = float(told(row, "median")), float(told(row, "late"))
        expected = np.quantile(jittered(recipe(4, 8), costs, 0.2, 2000), (0.5, 0.95))
        assert found == pytest.approx(expected, rel=0.03), "a hundred runs, of other luck"
    (other,) = look(tmp_path, page, fragment="schedule=dualpipe&ranks=4&microbatches=8&F=2")
    assert 'id="chain" aria-pressed="false"' in other


PRESET = """
  const before = { ...state };
  $("presets").children[0].click();
  document.body.dataset.preset = JSON.stringify([state.F, state.I, state.W]);
  change(before);
"""


@in_chromium
def test_units_stand_behind_figures_and_presets_keep_them(tmp_path):
    costs, sizes = CostModel(50, 60, 40, FB=100), MemoryModel(residual_i=2**30, parameters=2**34)
    page = html_page(gpipe(2, 3), costs, sizes, recipes=(gpipe,), units=Units("ms", "B"))
    _, dom = look(tmp_path, page, PRESET)
    assert re.search(r'<output id="makespan"[^>]*>600 ms</output>', dom)  # 4 x (50 + 100)
    assert re.search(r'<output id="memory"[^>]*>19 GiB</output>', dom)
    assert ">16 GiB</output>" in dom and "Costs of a rank's share, ms</legend>" in dom
    assert told(dom, "preset") == "[50,50,50]"
