"""The tutorial on DualPipe: its blocks print what it says, its figures are right, and its notebook is of today."""

import contextlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
from collections import Counter
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dualpipe_jax.__main__ import main
from tests.loading import load

DOCS = Path(__file__).parent.parent / "docs"
PAGE = (DOCS / "understand.md").read_text()
BLOCKS = re.findall(r"^```(python|bash)\n(.*?)^```\n(?:```text\n(.*?)^```\n)?", PAGE, re.M | re.S)
END = "\n=== the end of a block ===\n"


def shown(line, printed):
    """A line that ends in dots is the beginning of one that was printed."""
    lines = printed.splitlines()
    return line in lines or (line.endswith(" ...") and any(x.startswith(line[:-4]) for x in lines))


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    """What each Python block printed: all in one process without flags, as the page says."""
    found = [(body, said) for language, body, said in BLOCKS if language == "python"]
    program = "".join(f"{body}\nprint({END!r}, end='')\n" for body, _ in found)
    folder = tmp_path_factory.mktemp("page")
    (folder / "page.py").write_text(program)
    environ = {
        name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_PLATFORMS")
    }
    ran = subprocess.run(
        [sys.executable, folder / "page.py"],
        env={**environ, "PYTHONPATH": str(DOCS.parent)},
        cwd=folder,
        check=True,
        capture_output=True,
        text=True,
    )
    return list(zip(found, ran.stdout.split(END), strict=False))


@pytest.mark.slow
def test_python_blocks_print_what_the_page_says(printed):
    assert len(printed) == sum(language == "python" for language, *_ in BLOCKS) >= 12
    for (body, said), output in printed:
        for line in said.splitlines():
            if not line.startswith("largest difference"):
                assert shown(line, output), f"{line}\nis not printed by\n{body}\nbut\n{output}"


@pytest.mark.slow
def test_gradients_are_those_of_the_plain_model(printed):
    """The page's own comparison; the reference in it uses nothing of the library."""
    ((body, said), output), *none = (entry for entry in printed if "plain_loss" in entry[0][0])
    assert not none and output.count(": equal") == said.count(": equal") == 4
    assert 0 < float(re.search(r"largest difference of a gradient: (\S+)", output)[1]) < 1e-7
    plain = body[body.index("def embed") : body.index("schedule, mesh")]
    assert "pipeline" not in plain and "dualpipe" not in plain
    loss, of_the_plain = re.search(r"loss (\S+), of the plain model (\S+)", output).groups()
    assert loss == of_the_plain


def stated(name):
    """What the page says of a schedule, wherever it does: (makespan, bubble in percent, live, copies)."""
    pattern = rf"^{name}: makespan (\S+), bubble (\S+)%, live (\S+), copies of the parameters (\d)$"
    return [tuple(map(float, groups)) for groups in re.findall(pattern, PAGE, re.M)]


def expected(makespan, busy, live, copies):
    return makespan, pytest.approx(100 * (1 - busy / makespan), abs=0.05), live, copies


def dualpipe_makespan(ranks, microbatches, FB):
    """A middle rank's work at F = I = W = 1 and DeepSeek's bubble, (ranks / 2 - 1)(FB + B - 3W)."""
    pairs = microbatches - ranks - 1
    return 3 * (microbatches - pairs) + pairs * FB + (ranks / 2 - 1) * (FB + 2 - 3)


def test_figures_agree_with_closed_formulas():
    F, B, W = 1, 2, 1
    for ranks, microbatches, at in ((4, 8, 0), (8, 20, 1)):
        work = microbatches * (F + B)
        line = (microbatches + ranks - 1) * (F + B)
        split = work + (ranks - 1) * (F + B - 2 * W)
        assert stated("one_f_one_b")[at] == expected(line, work, ranks, 1)
        assert stated("zb_h1")[at] == expected(split, work, ranks, 1)
    assert stated("gpipe") == [expected((8 + 4 - 1) * 3, 24, 8, 1)]
    waits = (4 - 2) * (max(F, B) + (8 // 4 - 1) * abs(B - F))
    assert stated("chimera") == [expected(24 + waits, 24, 4, 2)]
    costs = [(4, 8, 2.25), (4, 8, 3), (4, 8, 2.25), (4, 8, 2), (8, 20, 2.25)]
    assert [row[0] for row in stated("dualpipe")] == [dualpipe_makespan(*cost) for cost in costs]
    assert [row[2:] for row in stated("dualpipe")] == [(ranks + 1, 2) for ranks, *_ in costs]
    # Half-size stages, twice as many, all microbatches.
    for ranks, microbatches, at in ((8, 20, 0), (4, 8, 1)):
        makespan = dualpipe_makespan(2 * ranks, 2 * microbatches, 2.25) / 2
        assert stated("dualpipe_v")[at][::2] == (makespan, ranks + 0.5)


def played(grid, FB):
    """(makespan, live at most on each rank) of a grid as the page prints it, by rules written here again."""
    rows = [re.findall(r"\d+[FBIW]\d+(?:\+\d+[FBIW]\d+)*", line) for line in grid.splitlines()]
    last = {stage for stage in (3, 7)}
    done, free, at = {}, [Fraction()] * 4, [0] * 4
    live, most = [0] * 4, [0] * 4

    def needs(stage, op, number):
        if op == "F":
            return [] if stage in (0, 4) else [(stage - 1, "F", number)]
        own = [(stage, "I" if op == "W" else "F", number)]
        return own if op == "W" or stage in last else [*own, (stage + 1, "I", number)]

    while any(place < len(row) for place, row in zip(at, rows, strict=True)):
        before = list(at)
        for rank, row in enumerate(rows):
            if at[rank] == len(row):
                continue
            actions = [(int(s), op, m) for s, op, m in re.findall(r"(\d+)([FBIW])(\d+)", row[at[rank]])]
            wanted = [value for action in actions for value in needs(*action)]
            if all(value in done for value in wanted):
                start = max([free[rank], *(done[value] for value in wanted)])
                units = {"F": 1, "I": 1, "W": 1, "B": 2}[actions[0][1]]
                free[rank] = start + (Fraction(FB) if len(actions) == 2 else units)
                for stage, op, number in actions:
                    done[stage, "I" if op == "B" else op, number] = free[rank]
                live[rank] += sum(op == "F" for _, op, _ in actions)
                most[rank] = max(most[rank], live[rank])
                live[rank] -= sum(op in "BI" for _, op, _ in actions)
                at[rank] += 1
        assert at != before, "it hangs"
    return max(free), most


def grid_printed(printed, call):
    ((_, output),) = (entry for entry in printed if call in entry[0][0])
    return "\n".join(re.findall(r"^rank .*", output, re.M)).replace("rank ", "r")


@pytest.mark.slow
def test_the_printed_orders_take_as_long_as_is_said(printed):
    """The grids that the page's blocks print, played by this file's own rules."""
    gpipe = grid_printed(printed, "print(format_grid(gpipe(4, 8), EQUAL))")
    assert played(gpipe, 3) == (33, [8] * 4)
    dualpipe = grid_printed(printed, "print(format_grid(dualpipe(4, 8), PAIRS))")
    for FB, makespan in ((3, 26), (2.25, 23), (2, 22)):
        assert played(dualpipe, FB) == (makespan, [5] * 4)
    assert played(dualpipe.replace("+", " "), 3) == (25, [5] * 4), "two directions, one action at a time"
    (two_directions,) = stated("two directions")
    assert two_directions == expected(25, 24, 5, 2)
    actions = Counter(re.findall(r"[FBIW]", dualpipe))
    assert actions["F"] == actions["B"] + actions["I"] == 4 * 8 and actions["I"] == actions["W"]


def test_commands_print_what_the_page_says(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for _, body, said in (block for block in BLOCKS if block[0] == "bash"):
        output = ""
        for line in body.splitlines():
            program, *arguments = shlex.split(line)
            assert program == "dualpipe", line
            written = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
            with contextlib.redirect_stdout(written):
                assert main(arguments) == 0, line
            written.seek(0)
            output += written.read()
        for line in said.splitlines():
            assert shown(line, output), f"{line}\nis not printed by\n{body}"
    assert (tmp_path / "page.html").stat().st_size > 10_000


def test_the_notebook_is_made_of_the_page():
    made = load(DOCS / "notebook.py").text_of(PAGE)
    assert (DOCS / "understand.ipynb").read_text() == made, "run python docs/notebook.py"
    cells = json.loads(made)["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert code[0] == "%matplotlib inline" and len(code) == 1 + len(BLOCKS)
    assert [text for text in code[1:] if not text.startswith("!dualpipe")] == [
        body.strip("\n") for language, body, _ in BLOCKS if language == "python"
    ]
    words = "".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    assert "iframe" not in words and "pip install -e '.[plot]'" in words and "## Questions" in words


def test_pictures_are_those_that_the_library_draws():
    """All are there; what some of them show is drawn again. Another matplotlib may set letters a little differently."""
    draw = load(DOCS / "draw.py")
    pictures = {name: rest for name, *rest in draw.pictures()}
    named = re.findall(r"\]\(pictures/(\S+\.png)\)", PAGE)
    assert set(named) <= set(pictures) and len(named) == 7
    assert {path.name for path in (DOCS / "pictures" / "gallery").glob("*.png")} == {
        name.removeprefix("gallery/") for name in pictures if name.startswith("gallery/")
    }
    for name in ("understand_1.png", "understand_5.png", "gallery/hanayo.png"):
        with Image.open(DOCS / "pictures" / name) as file:
            there = np.asarray(file.convert("RGB"), float)
        drawn = np.asarray(draw.draw(*pictures[name]).convert("RGB"), float)
        assert there.shape == drawn.shape and np.abs(there - drawn).mean() < 3, name
