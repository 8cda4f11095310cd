"""The report of a run, and runs side by side: what is in the pages, and what is said of bits."""

import base64
import dataclasses
import itertools
import json
import re

import numpy as np
import pytest

from dualpipe_jax.profile.timelines import draw_simulated
from dualpipe_jax.schedule import CostModel, dualpipe, simulate, zb_h1
from train.__main__ import main
from train.config import ConfigError, configure
from train.options import options_as_dict, parse
from train.report import RunFolder, compare, write_report
from train.report.folder import command_line
from train.report.page import render, report_page

OPTIONS = dict(pp=2, microbatches=4, schedule="dualpipe", steps=3)
LOSSES = (5.5, 4.0, 0.1 + 0.2)


def record(step, loss, **more):
    rates = {"tokens_per_s": 100.0 * step, "tflops_per_s": 0.5, "step_s": 1.0}
    return {"step": step, "loss": loss, "grad_norm": 1.0, "max_vio": 0.5, **rates, **more}


def make_run(folder, losses=LOSSES, records=(), **options):
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(options_as_dict(configure(**OPTIONS | options))))
    lines = [
        {"step": 0, "heldout_loss": 5.545},
        *(record(i + 1, loss) for i, loss in enumerate(losses)),
        *records,
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def data_of(page):
    (text,) = re.findall(r'<script id="data" type="application/json">(.*?)</script>', page, re.S)
    return json.loads(text)


def section(page, title):
    return next(part for part in page["sections"] if part["title"] == title)


def test_the_page_is_one_file_that_needs_no_network(tmp_path):
    page = write_report(make_run(tmp_path / "a")).read_text()
    assert page.count("<html") == page.count("</html>") == 1
    without_names = page.replace("http://www.w3.org/2000/svg", "")  # a name, not a place
    assert not re.search(r"https?://|<link|\bsrc=|@import|url\(", without_names)
    assert data_of(page)["title"] == "a"


def test_curves_are_the_metrics(tmp_path):
    more = [record(4, None, grad_norms={"head": 0.25, "router": 2.0}), {"step": 4, "heldout_loss": 4.5}]
    page = data_of(write_report(make_run(tmp_path / "a", records=more)).read_text())
    found = {chart["title"]: chart for chart in section(page, "Curves")["charts"]}
    training, held = found["loss, nats per token"]["series"]
    assert (training["x"], training["y"]) == ([1, 2, 3, 4], [*LOSSES, None])
    assert (held["x"], held["y"]) == ([0, 4], [5.545, 4.5])
    assert found["tokens a second"]["series"][0]["y"] == [100, 200, 300, 400]
    assert found["seconds of a step, the first left out"]["series"][0]["x"] == [2, 3, 4]
    parts = {curve["name"]: curve for curve in found["gradient norms by part"]["series"]}
    assert parts["head"] == {"name": "head", "x": [4], "y": [0.25]} and set(parts) == {"head", "router"}
    assert ["not a number", "last training loss"] in page["tiles"]
    assert "memory, GiB" not in found, "there is none in these metrics"


def test_held_out_losses_are_of_one_text(tmp_path):
    """Of a run that was resumed with other held-out text those since then."""
    other = [
        {"step": 3, "heldout_loss": 4.5},
        {"step": 3, "heldout_loss": 4.25, "anew": True},
        {"step": 4, "heldout_loss": 4.0},
    ]
    for upto, told in ((1, "5.545 → 4.500"), (3, "4.250 → 4.000")):
        folder = make_run(tmp_path / str(upto), records=other[:upto])
        assert [told, "held-out loss"] in report_page(RunFolder.read(folder))["tiles"]


def test_steps_that_a_run_gave_up_when_it_went_back_are_no_part_of_it(tmp_path):
    """It went back from step 5 to step 2, and was stopped after step 3, which it did again."""
    given_up = [record(4, 9.0), {"step": 4, "heldout_loss": 8.0}, record(5, None)]
    back = {"step": 5, "event": "loss is nan at step 5; back to step 2"}
    run = RunFolder.read(make_run(tmp_path / "a", records=[*given_up, back, record(3, 3.5)], steps=10))
    assert run.series("loss") == ([1, 2, 3], [5.5, 4.0, 3.5]) and run.events == (back,)
    page = report_page(run)
    assert page["alarms"] == ["Step 5: loss is nan at step 5; back to step 2"] and page["events"] == [5]
    tiles = page["tiles"]
    assert ["3 / 10", "steps"] in tiles and ["3.5000", "last training loss"] in tiles
    assert "held-out loss" not in [name for _, name in tiles], "there is none but the first"


def test_the_heat_map_is_load_over_its_layers_mean(tmp_path):
    load = [[[6, 2], [1, 3]], [[4, 4], [0, 4]]]
    records = [record(4 + 10 * i, 1.0, load=one) for i, one in enumerate(load)]
    page = report_page(RunFolder.read(make_run(tmp_path / "a", records=records)))
    heat = section(page, "Balance of experts")["heat"]
    values = np.frombuffer(base64.b64decode(heat["values"]), np.uint8).reshape(heat["shape"]) / heat["one"]
    assert heat["steps"] == [4, 14]
    np.testing.assert_allclose(values, [[[1.5, 0.5], [0.5, 1.5]], [[1, 1], [0, 2]]])


def test_long_runs_are_thinned_out_and_the_busiest_experts_are_no_idle_ones(tmp_path, monkeypatch):
    """A byte holds loads up to four times the mean; eight times would come round to none."""
    monkeypatch.setattr("train.report.page._MAX_POINTS", 3)
    monkeypatch.setattr("train.report.page._MAX_CELLS", 16)
    load = [[16, 0, 0, 0, 0, 0, 0, 0]]
    records = [record(4 + i, float(i), load=load) for i in range(4)]
    page = report_page(RunFolder.read(make_run(tmp_path / "a", records=records)))
    heat = section(page, "Balance of experts")["heat"]
    assert (heat["shape"], heat["steps"]) == ([2, 1, 8], [4, 6])
    assert base64.b64decode(heat["values"]) == 2 * bytes([255, *7 * [0]])
    training = section(page, "Curves")["charts"][0]["series"][0]
    assert (training["x"], training["y"]) == ([1, 4, 7], [5.5, 0.0, 3.0])


@pytest.mark.parametrize("recipe", [dualpipe, zb_h1])
def test_boxes_are_the_simulated_actions(recipe):
    timeline = simulate(recipe(4, 8), CostModel(F=1, I=1.5, W=0.5))
    picture = draw_simulated(timeline, "it", "ms")
    actions = sum(len(slot) for order in timeline.schedule.orders for slot in order)
    assert len(picture.boxes) == actions
    assert max(box[4] for box in picture.boxes) == pytest.approx(timeline.makespan)
    busy = sum((end - start) / parts for _, _, parts, start, end, *_ in picture.boxes)
    assert busy == pytest.approx(sum(timeline.busy))
    for rank in range(4):  # no two boxes of a rank's upper half at once
        spans = sorted((b[3], b[4]) for b in picture.boxes if b[0] == rank and b[1] == 0)
        assert all(end <= start + 1e-9 for (_, end), (start, _) in itertools.pairwise(spans))
    assert "bubble" in picture.title and f"{timeline.bubble:.1%}" in picture.title


def test_a_page_survives_names_that_look_like_html():
    page = render({"title": "</script><b>&", "about": "</script>", "tiles": [], "sections": []})
    assert data_of(page)["title"] == "</script><b>&"
    assert "<title>&lt;/script>&lt;b>&amp;</title>" in page
    page = render({"title": "<!--<script>", "about": "", "tiles": [], "sections": []})
    assert data_of(page)["title"] == "<!--<script>"
    assert "<!--" not in page, "from there on no </script> would end the script that holds the data"


@pytest.mark.parametrize(
    "options",
    [
        {},
        dict(pp=2, learning_rate=0.1 + 0.2, schedule="zb_v", track=("tensorboard", "wandb")),
        dict(name="a b'c", measure_peak=True, layers=3, peak_tflops=1e-3),
    ],
)
def test_the_command_to_reproduce_parses_to_the_same_options(options):
    import shlex

    config = configure(**options)
    words = shlex.split(command_line(config))
    assert words[0] == "scripts/train"
    assert parse(words[1:]).options == config


def test_options_that_are_not_defaults_are_marked(tmp_path):
    page = report_page(RunFolder.read(make_run(tmp_path / "a", learning_rate=0.5, clip=1.0)))
    tables = {table["title"]: dict(table["rows"]) for table in section(page, "Options")["tables"]}
    assert tables["optimizer"]["learning-rate"] == {"own": "0.5"}
    assert tables["optimizer"]["clip"] == "1.0"


def test_a_line_that_was_cut_short_is_no_damage(tmp_path):
    folder = make_run(tmp_path / "a")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')
    assert [r["step"] for r in RunFolder.read(folder).steps] == [1, 2, 3]


def test_what_is_no_run_is_named(tmp_path):
    with pytest.raises(ConfigError, match="no run's folder; it should hold config.json and metrics.jsonl"):
        RunFolder.read(tmp_path)
    folder = make_run(tmp_path / "a")
    text = (folder / "metrics.jsonl").read_text()
    (folder / "metrics.jsonl").write_text(text.replace('{"step": 2', '{"step: 2'))
    with pytest.raises(ConfigError, match="line 3 is damaged"):
        RunFolder.read(folder)
    for damage in (b"3", b'{"step": 2, "loss": \xff}', b'{"loss": 2.0}', b"[" * 100_000):
        (folder / "metrics.jsonl").write_bytes(text.encode() + damage + b"\n")
        with pytest.raises(ConfigError, match=r"metrics.jsonl: line 5 is damaged; take it out, or resume"):
            RunFolder.read(folder)
    (folder / "environment.json").write_text("3")
    (folder / "metrics.jsonl").write_text(text)
    with pytest.raises(ConfigError, match=r"environment.json: cannot read it: it holds no object"):
        RunFolder.read(folder)


@pytest.mark.parametrize("text", ['[{"title": "mea', '[{"title": "measured"}]', '{"a": 1}'])
def test_a_profile_that_cannot_be_read_is_named(tmp_path, text):
    folder = make_run(tmp_path / "a")
    (folder / "profile").mkdir()
    (folder / "profile" / "timeline.json").write_text(text)
    with pytest.raises(
        ConfigError, match=f"{folder}: its profile's timeline cannot be read: .*remove the folder"
    ):
        write_report(folder)


def test_equal_runs_are_bitwise_equal(tmp_path, capsys):
    for name in "ab":
        make_run(tmp_path / name, seed=ord(name))
    assert main(["--compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    said = capsys.readouterr().out
    assert "bitwise equal in loss and grad_norm at each of 3 common steps" in said
    page = data_of((tmp_path / "compare-a-b.html").read_text())
    assert page["title"] == "a and b: bitwise equal"
    assert section(page, "Options that differ")["tables"][0]["rows"] == [["seed", "97", "98"]]
    assert [s["name"] for s in section(page, "Curves")["charts"][0]["series"]] == ["a", "b"]


def test_pages_that_cannot_be_written_are_a_line(tmp_path, capsys):
    """The exit code of --compare is of the runs; 1 would say that they differ."""
    for name in "ab":
        (make_run(tmp_path / name) / "report.html").mkdir()
    (tmp_path / "compare-a-b.html").mkdir()
    assert main(["--compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    told = f"warning: no page with the curves: {tmp_path}/compare-a-b.html: Is a directory\n"
    assert capsys.readouterr().err == told
    assert main(["--report", str(tmp_path / "a")]) == 2
    assert capsys.readouterr().err == f"error: --report {tmp_path}/a: cannot write it: Is a directory\n"


def test_the_last_bit_is_a_difference(tmp_path, capsys):
    make_run(tmp_path / "a")
    make_run(tmp_path / "b", losses=(5.5, 4.0, np.nextafter(LOSSES[2], 1).item(), 2.0))
    assert main(["--compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 1
    said = capsys.readouterr().out
    assert "differs from step 3 on, loss 0.30000000000000004 against 0.3000000000000001;" in said
    assert "losses differ by 5.55e-17 at most over 3 common steps; 1 step in one of them alone" in said
    assert main(["--compare", str(tmp_path / "b"), str(tmp_path / "a")]) == 1
    said = capsys.readouterr().out
    assert "losses differ by 5.55e-17 at most over 3 common steps; 1 step in one of them alone" in said


def test_gradient_norms_count_too_and_runs_without_a_common_step_are_not_equal(tmp_path):
    runs = [RunFolder.read(make_run(tmp_path / name)) for name in "abc"]
    other = [{**step, "grad_norm": 1.5} for step in runs[1].steps]
    runs[1] = dataclasses.replace(runs[1], steps=tuple(other))
    runs[2] = dataclasses.replace(runs[2], steps=())
    differs, apart = compare(runs)
    assert differs.first == (1, "grad_norm", 1.0, 1.5) and not differs.equal
    assert not apart.equal and str(apart).endswith("no step in common")
    with pytest.raises(ConfigError, match="wants two runs or more"):
        compare(runs[:1])
