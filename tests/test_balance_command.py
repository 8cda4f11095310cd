"""`dualpipe balance`: loads from every kind of file, the table, the plan and the picture."""

import json
import math
import re
import xml.etree.ElementTree

import numpy as np
import pytest

from dualpipe_jax.__main__ import main
from dualpipe_jax.balance import Layout, Placement, balance, plot

TWO_LAYERS = [[4, 3, 2, 1], [1, 1, 5, 5]]
"""In order on two devices: 7 | 3 and 2 | 10; at best 5 | 5 and 6 | 6."""


def run(capsys, *arguments):
    assert main(["balance", *map(str, arguments)]) == 0
    captured = capsys.readouterr()
    files = arguments[arguments.index("-o") + 1 :] if "-o" in arguments else ()
    assert captured.err == "".join(f"wrote {file}\n" for file in files)
    return captured.out


def saved(folder, kind):
    if kind == "npz":
        np.savez(folder / "a.npz", other=np.ones(3), loads=TWO_LAYERS)
    elif kind == "npy":
        np.save(folder / "a.npy", np.array(TWO_LAYERS))
    elif kind == "json":
        (folder / "a.json").write_text(json.dumps({"loads": TWO_LAYERS}))
    else:
        lines = [{"step": 1, "load": TWO_LAYERS}, {"step": 2, "loss": 1.0}, {"step": 3, "load": TWO_LAYERS}]
        text = "".join(json.dumps(line) + "\n" for line in lines) + '{"step": 4, "load": [[1, 2'
        (folder / "metrics.jsonl").write_text(text)
        return folder if kind == "folder" else folder / "metrics.jsonl"
    return folder / f"a.{kind}"


@pytest.mark.parametrize("kind", ["npz", "npy", "json", "jsonl", "folder"])
def test_every_kind_of_file_and_what_the_table_says(capsys, tmp_path, kind):
    lines = run(capsys, saved(tmp_path, kind), "--devices", 2, "--expert-bytes", 1000).splitlines()
    windows = "; the worst of 2 windows of 2 counts" if kind in ("jsonl", "folder") else ""
    assert lines[0] == f"2 layers x 4 experts on 2 devices of 2 slots{windows}"
    rows = {line[:10].strip(): re.split(r"\s{2,}", line[10:].strip()) for line in lines[1:-1]}
    assert rows["in order"] == ["1.5333", "1.6667", "65.2 %", "0", "0"]  # 7 / 5 and 10 / 6
    assert rows["DeepSeek's"][:3] == ["1.0000", "1.0000", "100.0 %"]
    assert rows["this"] == ["1.0000", "1.0000", "100.0 %", "4", "4000"]  # a swap in each layer
    assert rows["bound"] == ["1.0000", "1.0000", "100.0 %"]
    assert lines[-1] == "the busiest devices have 34.8 % less to do"


def test_the_plan_is_read_back_and_moves_are_limited(capsys, tmp_path):
    random = np.random.default_rng(0)
    loads = np.exp(random.normal(size=(3, 4, 32)))
    np.save(tmp_path / "a.npy", loads)
    plan, later = tmp_path / "plan.json", tmp_path / "later.json"
    asked = tmp_path / "a.npy", "--devices", 8, "--slots", 5, "--windows", 1
    assert "the worst of 1 window of 3 counts" in run(capsys, *asked, "-o", plan)
    entries = json.loads(plan.read_text())
    placed = Placement.from_json(entries)
    assert entries["layout"] == {"num_devices": 8, "num_slots": 5, "num_nodes": 1, "num_groups": None}
    np.testing.assert_allclose(placed.imbalance(loads[-1]), entries["outlook"]["after"], rtol=1e-9)
    np.save(tmp_path / "a.npy", loads[::-1])
    told = json.loads(run(capsys, *asked, "--previous", plan, "--max-moves", 7, "--json", "-o", later))
    moved = Placement.from_json(json.loads(later.read_text())).moves_from(placed)
    assert told["experts"] == json.loads(later.read_text())["experts"]
    assert 0 < moved.sum() <= 7 and told["outlook"]["moves"] == moved.tolist()
    assert told["outlook"]["moved_bytes"] == moved.sum() * 3 * 7168 * 2048 * 2
    assert told["outlook"]["gain"] > 0


def test_the_picture_has_both_maps_and_their_figures(capsys, tmp_path):
    path = tmp_path / "picture.svg"
    run(capsys, saved(tmp_path, "json"), "--devices", 2, "-o", path, tmp_path / "picture.png")
    first = path.read_bytes()
    root = xml.etree.ElementTree.fromstring(first)
    assert len(root.findall(".//{http://www.w3.org/2000/svg}image")) >= 2
    run(capsys, saved(tmp_path, "json"), "--devices", 2, "-o", path)
    assert path.read_bytes() == first
    assert (tmp_path / "picture.png").read_bytes()[:4] == b"\x89PNG"


def test_the_colours_of_the_picture_are_loads_over_the_mean():
    loads, before = np.array(TWO_LAYERS), Placement.in_order(2, 4, 2, 2)
    after = balance(loads, Layout(2, 2))
    figure = plot(loads, before, after, bound=1.0)
    maps = [axes.images[0].get_array() for axes in figure.axes if axes.images]
    np.testing.assert_allclose(maps[0], [[7 / 5, 3 / 5], [2 / 6, 10 / 6]])
    np.testing.assert_allclose(maps[1], np.ones((2, 2)))
    assert figure.axes[0].get_title(loc="left") == "before: max/mean 1.5333, worst layer 1.6667"
    told = [[text.get_text() for text in axes.texts] for axes in figure.axes[:2]]
    assert told == [[], ["even: 1.0000 to 1.0000 of the mean"]], "a white map is told in words"
    with pytest.raises(ValueError, match="cannot tell a format from 'a.pdf'"):
        plot(loads, before, after, "a.pdf")


def test_groups_and_what_deepseeks_does_not_answer(capsys, tmp_path):
    np.save(tmp_path / "a.npy", np.random.default_rng(1).random((1, 8)))
    by_groups = run(capsys, tmp_path / "a.npy", "--devices", 4, "--slots", 3, "--nodes", 2, "--groups", 4)
    assert "DeepSeek's" in by_groups
    unequal = "--devices", 3, "--slots", 3, "--nodes", 2
    alone = run(capsys, tmp_path / "a.npy", *unequal)
    assert "this" in alone


@pytest.mark.parametrize("size", [1e308, 1e-300])
def test_loads_of_any_size_say_the_same(capsys, tmp_path, size):
    """As of loads of usual size, digit for digit: sums that no float64 holds are not made."""
    windows, told = np.array([TWO_LAYERS, TWO_LAYERS[::-1]]) / 8, []
    for times in (1.0, size):
        np.save(tmp_path / "a.npy", windows * times)
        picture = tmp_path / "map.svg"
        told.append(run(capsys, tmp_path / "a.npy", "--devices", 2, "--slots", 3, "-o", picture))
    assert told[0] == told[1] and "DeepSeek's" in told[0]
    placed = Placement.in_order(2, 4, 2, 2)
    assert np.array_equal(placed.imbalance(windows * 2.0**1023), placed.imbalance(windows))
    assert (
        plot(windows * size, placed, placed).axes[0].get_title(loc="left").startswith("before: max/mean 1.6")
    )


PREVIOUS = "--previous", "a.json"


@pytest.mark.parametrize(
    ("name", "content", "options", "message"),
    [
        ("a.json", "[1, 2", (), "a.json: not JSON: .*; give .npz, .npy, .json, or a run's metrics.jsonl"),
        ("a.json", '{"x": 1}', (), "a.json: has none of loads, load, weight, counts"),
        ("a.json", "[[1, 2], [3]]", (), r"a.json: object \[0\]; loads are numbers \[layers, experts\]"),
        ("metrics.jsonl", '{"step": 1}\n', (), "no step has a load; .*--load-every"),
        ("metrics.jsonl", '{"load": [[1]]}\n{"lo\n{"load": [[2]]}\n', (), "line 2 is damaged; take it out"),
        ("a.json", "[" * 100_000, (), "a.json: not JSON: .*; give .npz"),
        ("a.npz", "nothing", (), "a.npz: no arrays of NumPy"),
        ("a.npz", "PK\x03\x04", (), "a.npz: no arrays of NumPy: File is not a zip file"),
        ("a.json", "[[1, -2]]", (), "the load of layer 0, expert 1 is -2.0"),
        ("a.json", "[[1, 2]]", ("--devices", "0"), "num_devices=0; it must be at least 1"),
        ("a.json", "[[1, 2]]", ("--slots", "3"), "twice on one device, for the loads are of 2 experts"),
        ("a.json", "[[1, 2]]", ("-o", "a.pdf"), "--output a.pdf: end the name in .json for the plan"),
        ("a.json", "[[1, 2]]", ("--windows", "0"), "--windows 0: give at least 1"),
        ("a.json", "[[1, 2]]", ("--max-moves", "1"), "add --previous plan.json"),
        ("a.json", "[[1, 2]]", ("--previous", "a.json"), 'a JSON object with "num_experts" and "experts"'),
        (
            "a.json",
            "[[1, 2]]",
            ("--devices", "1000000"),
            "1,000,000 devices x 1 slots are 1,000,000 slots; at most 65",
        ),
        (
            "a.json",
            f"{[[1, 2]] * 16}",
            ("--devices", "65536"),
            "16 layers .* are 1,048,576 slots; at most .* 1,000,000",
        ),
        *(
            (
                "a.json",
                "[[1, 2]]",
                ("--expert-bytes", size),
                f"--expert-bytes {size}.*: give a number of at least 0",
            )
            for size in ("nan", "-1", "inf")
        ),
        *(
            (
                "a.json",
                json.dumps({"loads": [[1, 2]], "experts": [[[0, 1]]], "num_experts": count}),
                PREVIOUS,
                message,
            )
            for count, message in (
                (math.inf, "num_experts is inf, no whole number"),
                (4.7, "num_experts is 4.7, no whole number"),
                ("2", "num_experts is '2', no whole number"),
                (10**15, "1000000000000000 experts in 2 slots of a layer; each needs one"),
            )
        ),
        (
            "a.json",
            '{"loads": [[1, 2]], "experts": [[[0, 1]]], "num_experts": 1e400}',
            PREVIOUS,
            "is inf, no whole",
        ),
    ],
)
def test_what_it_refuses(capsys, tmp_path, monkeypatch, name, content, options, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_text(content)
    devices = () if "--devices" in options else ("--devices", "1")
    assert main(["balance", name, *devices, *options]) == 2
    assert re.search(message, capsys.readouterr().err)


def test_arrays_that_are_no_loads_or_damaged(capsys, tmp_path):
    path = tmp_path / "a.npz"
    np.savez(path, loads=np.ones((2, 64)))
    whole = path.read_bytes()
    at = whole.index(np.ones(8).tobytes())
    path.write_bytes(whole[:at] + b"\x01" + whole[at + 1 :])
    np.save(tmp_path / "line.npy", np.ones(8))
    for name, message in (
        ("a.npz", "no arrays of NumPy: Bad CRC-32"),
        ("line.npy", r"float64 \[8\]; loads are"),
    ):
        assert main(["balance", str(tmp_path / name), "--devices", "2"]) == 2
        assert re.search(f"{name}: {message}", capsys.readouterr().err)
