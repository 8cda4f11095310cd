import io
import itertools
import json
import math
import os
import re
import subprocess
import sys
import xml.etree.ElementTree

import pytest
from rich.console import Console

import dualpipe_jax
from dualpipe_jax.__main__ import COMMANDS, main, options_of
from dualpipe_jax.command.drawing import draw
from dualpipe_jax.present.numbers import Units
from dualpipe_jax.schedule import (
    ALL_SCHEDULES,
    CostModel,
    MemoryModel,
    Placement,
    dualpipe,
    dualpipe_v,
    format_grid,
    limit_stash,
    one_f_one_b,
    parse_grid,
    simulate,
    validate,
    zb_h1,
)
from dualpipe_jax.schedule.formats.json_text import from_json

NAMES = [recipe.__name__ for recipe in ALL_SCHEDULES]
RECIPES = dict(zip(NAMES, ALL_SCHEDULES, strict=True))
SMALL = ["--ranks", "4", "--microbatches", "8"]


def printed(capsys, *arguments):
    assert main([*arguments]) == 0
    captured = capsys.readouterr()
    files = [arguments[at + 1] for at, word in enumerate(arguments) if word in ("-o", "--output")]
    assert captured.err == "".join(f"wrote {file}\n" for file in files)
    return captured.out


def facts_of(capsys, *arguments):
    return json.loads(printed(capsys, *arguments, "--json"))


def refused(capsys, status, *arguments):
    assert main([*arguments]) == status
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    return captured.err


def in_process(*arguments, **options):
    command = [sys.executable, "-m", "dualpipe_jax", *arguments]
    return subprocess.run(command, capture_output=True, text=True, **options)


@pytest.fixture
def saved(tmp_path):
    def save(text, name="file"):
        path = tmp_path / name
        path.write_text(text)
        return str(path)

    return save


@pytest.mark.parametrize("name", NAMES)
def test_every_schedule_is_shown_in_every_format_and_checked_back(capsys, saved, name):
    schedule = RECIPES[name](4, 8)
    grid = printed(capsys, "show", name, *SMALL, "--FB", "2.25", "--send", ".1")
    assert parse_grid(grid) == schedule
    assert grid.splitlines()[-1].startswith("# of_a_share {")
    assert "{" not in printed(capsys, "show", name, *SMALL), "costs that are the default's need no line"
    text = printed(capsys, "show", name, *SMALL, "--json")
    assert from_json(text) == schedule
    rows = printed(capsys, "show", name, *SMALL, "--format", "csv")
    for file in (grid, text, rows):
        told = json.loads(printed(capsys, "check", saved(file), "--json"))
        assert told["valid"] and told["pipes"] == [list(pipe) for pipe in schedule.placement.pipes]
    events = json.loads(printed(capsys, "show", name, *SMALL, "--format", "trace"))["traceEvents"]
    assert sum(map(len, schedule.orders)) <= sum(event["ph"] == "X" for event in events)


def test_shown_in_time_with_the_costs_of_its_stages(capsys):
    costs = CostModel(F=1, I=1.5, W=0.5, FB=2, send=0.25, extra={-1: (0.5, 1, 1)}, blocking=True)
    options = ["--F", "1", "--I", "1.5", "--W", ".5", "--FB", "2", "--send", ".25", "--blocking"]
    out = printed(capsys, "show", "dualpipe_v", *SMALL, *options, "--last", ".5", "1", "1")
    schedule = dualpipe_v(4, 8)
    halves = costs.for_schedule(schedule)
    assert out.startswith(format_grid(schedule, halves) + "\n# makespan ")
    timeline = simulate(schedule, halves)
    assert f"# makespan {timeline.makespan:g}, bubble {100 * timeline.bubble:.1f} %\n" in out
    assert "# cost of a stage: F 0.5, I 0.75, W 0.25, FB 1, send 0.25 blocking, last +0.5/+1/+1\n" in out


def test_the_summary_is_of_a_whole_ranks_share_and_equal_ranks_share_a_row(capsys):
    costs = ["--FB", "2", "--parameters", "10e9", "--residual-i", "1e9"]
    assert printed(capsys, "show", "dualpipe_v", *SMALL, *costs).splitlines()[5:-1] == [
        "# makespan 22, bubble 5.1 %, memory 14.5G",
        "# cost of a stage: F 0.5, I 0.5, W 0.5, FB 1",
        "# ranks  idle  of the step  activations  memory",
        "# 0       0.5        2.3 %          4.5   14.5G",
        "# 1         1        4.5 %          4.5   14.5G",
        "# 2-3     1.5        6.8 %          4.5   14.5G",
    ]


def test_written_in_the_format_that_the_files_name_says(capsys, tmp_path):
    for ending, starts in {"csv": "0F0,", "json": "{", "trace": "{", "txt": "# zb_h1"}.items():
        path = tmp_path / f"schedule.{ending}"
        assert printed(capsys, "show", "zb_h1", *SMALL, "-o", str(path)) == "", ending
        assert path.read_text().startswith(starts) and path.read_text().endswith("\n"), ending


def test_json_says_what_was_simulated(capsys):
    facts = json.loads(printed(capsys, "show", "dualpipe_v", *SMALL, "--FB", "2", "--json"))
    timeline = simulate(dualpipe_v(4, 8), CostModel(0.5, 0.5, 0.5, FB=1))
    assert facts["makespan"] == timeline.makespan
    assert tuple(map(tuple, facts["starts"])) == timeline.starts
    assert facts["peak_activations"] == [peak / 2 for peak in timeline.peak_activations]


def test_compared_by_makespan_and_refusals_with_their_reason(capsys):
    out = printed(capsys, "compare", "dualpipe", "zb_h1", "1F1B", "--ranks", "5", "--microbatches", "10")
    lines = out.splitlines()
    assert lines[0] == "5 ranks, 10 microbatches, F 1, I 1, W 1, FB 3"
    heads = "schedule  stages  makespan  send 0.02  bubble  above bound  largest idle  activations"
    assert [re.split(" {2,}", line) for line in lines[1:4]] == [
        [*heads.split("  "), "parameters", "pairs"],
        ["zb_h1", "1", "34", "34.32", "11.8 %", "0.0 %", "4", "5", "1x", "no"],
        ["one_f_one_b", "1", "42", "42.44", "28.6 %", "23.5 %", "12", "5", "1x", "no"],
    ]
    assert lines[4] == "not with these counts:"
    assert lines[5].startswith("  dualpipe  got 5 ranks and 10 microbatches, but ranks work in mirrored")


def test_compare_and_choose_show_how_sends_and_jitter_change_the_ranking(capsys):
    deep = ["--stages-per-rank", "4", "--FB", "2.25", "--json"]
    order, deeper = {}, "interleaved_1f1b_overlap"
    for send in ("0", "0.02"):
        arguments = "--ranks", "16", "--microbatches", "64", "--send", send, *deep
        facts = json.loads(printed(capsys, "compare", "dualpipe", deeper, "zb_v", *arguments))
        order[send] = [row["name"] for row in facts["schedules"]]
        rows = {row["name"]: row for row in facts["schedules"]}
        for name, free, real in (("dualpipe", 165.5, 167.12), (deeper, 164.4375, 171.0775)):
            assert rows[name]["free_sends"] == pytest.approx(free)
            assert rows[name]["real_sends"] == pytest.approx(real)
            assert rows[name]["makespan"] == pytest.approx(free if send == "0" else real)
        assert (rows[deeper]["stages"], rows[deeper]["jitter"]) == (4, None)
    assert order["0"][0] == deeper and order["0.02"][0] == "dualpipe"
    for command in ("compare", "choose"):
        facts = json.loads(printed(capsys, command, *SMALL, "--jitter", "0.1", *deep))
        for row in facts["schedules"]:
            assert row["makespan"] < row["jitter"][0] < row["jitter"][1] < 1.3 * row["makespan"]
        head = printed(capsys, command, *SMALL, "--jitter", "0.1").splitlines()[1]
        assert "send 0.02  jitter 50 %" in head
        for jitter in ("-1", "nan", "inf"):
            message = f"error: --jitter {jitter}: give a share of a slot's time, at least 0"
            assert refused(capsys, 2, command, *SMALL, "--jitter", jitter).startswith(message)


def test_a_search_that_finds_nothing_advises_by_the_option(capsys):
    told = refused(capsys, 1, "choose", *SMALL, "--memory-limit", "0.5", "--search", "0.01")
    assert re.search(r"search +got --memory-limit 0.5, but .*; try --memory-limit 1 or more", told)


@pytest.mark.parametrize("unit", ["1e-10", "36300000.1"])
def test_the_order_does_not_depend_on_the_unit_of_time(capsys, unit):
    def order(f):
        rows = facts_of(capsys, "compare", *SMALL, "--F", f, "--I", f, "--W", f)["schedules"]
        return [row["name"] for row in rows]

    assert order(unit) == order("1")


def test_compare_counts_halves_and_copies(capsys):
    facts = facts_of(capsys, "compare", *SMALL, "--FB", "2", "--parameters", "10", "--boundary", "1")
    rows = {row["name"]: row for row in facts["schedules"]}
    assert set(rows) | set(facts["refused"]) == set(NAMES)
    halves = simulate(dualpipe_v(4, 8), CostModel(0.5, 0.5, 0.5, FB=1))
    assert rows["dualpipe_v"]["makespan"] == halves.makespan
    assert rows["dualpipe_v"]["activations"] == max(halves.peak_activations) / 2 == 4.5
    assert (rows["dualpipe_v"]["parameters"], rows["dualpipe"]["parameters"]) == (1, 2)
    whole = simulate(dualpipe(4, 8), CostModel(FB=2))
    kept = [2 * 10 + live for live in (whole.peak_activations[0], whole.peak_inputs[0])]
    assert kept[0] < rows["dualpipe"]["memory"] <= kept[1] + whole.peak_activations[0]
    assert (rows["dualpipe"]["pairs"], rows["zb_h1"]["pairs"]) == (True, False)


def test_compare_writes_markdown(capsys):
    counts = "--ranks", "3", "--microbatches", "4"
    out = printed(capsys, "compare", "gpipe", "dualpipe", *counts, "--format", "markdown")
    table, reason = out.strip().split("\n\n")
    assert table.splitlines()[:2] == [
        "| schedule | stages | makespan | send 0.02 | bubble | above bound | largest idle | activations | "
        "parameters | pairs |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    assert table.splitlines()[2] == "| gpipe | 1 | 18 | 18.08 | 33.3 % | 28.6 % | 6 | 4 | 1x | no |"
    assert reason.startswith("Not with these counts: dualpipe: got 3 ranks")


def test_an_invalid_schedule_shows_its_culprit(capsys, saved):
    grid = format_grid(dualpipe_v(2, 3)).replace("1F0 2F0", "2F0 1F0")
    message = refused(capsys, 1, "check", saved(grid))
    assert "dualpipe_v: rank 1, slot 0 runs 2F0 before 1F0" in message
    assert "[2F0]" in message and "<-- here" in message
    assert main(["check", saved(grid), "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["valid"] is False and "[2F0]" in told["error"]


DEEP = "from_json: nested too deeply; a schedule is an object of four flat entries"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("# a, ranks 1, microbatches 1, pipes (0)\n0F0 0X0", "parse_grid: line 2: not an action: '0X0'"),
        ("{", "from_json: not JSON"),
        ('{"a":' + "[" * 200_000, DEEP),
        ("[" * 200_000, DEEP),
        ("[1, 2]", "num_microbatches, pipes, orders missing; a schedule has name"),
        ("999999999F0,0F0", "got stages [0, 999999999], but no stage 1"),
        (
            '{"name": "a\\nvalid: b", "num_microbatches": 1, "pipes": [[0]], "orders": [["0F0", "0B0"]]}',
            "Schedule: name 'a\\nvalid: b' has line breaks or control characters",
        ),
        ("# \x1b[31mred, ranks 1, microbatches 1, pipes (0)\n0F0 0B0", "name '\\x1b[31mred' has line breaks"),
        ('{"name": "a"}', "num_microbatches, pipes, orders missing; a schedule has name, num_mic"),
        ("0F0,0X0", "cannot read '0X0'"),
    ],
)
def test_a_file_that_holds_no_schedule(capsys, saved, text, message):
    assert message in refused(capsys, 1, "check", saved(text))


def test_one_cell_is_csv_where_the_file_says_so(capsys, saved):
    message = refused(capsys, 1, "check", saved("999999999F0", "one.csv"))
    assert "from_torch_csv: got stages [999999999], but no stage 0" in message
    assert printed(capsys, "check", saved("0F0,0B0", "two.csv")).startswith("valid: parsed, 1 ranks")


def test_an_empty_file_is_called_empty_and_a_byte_order_mark_passed_over(capsys, saved):
    for command, text in itertools.product(("check", "show"), ("", " \n\n", "\ufeff")):
        assert ": empty; give a grid, JSON or PyTorch's CSV" in refused(capsys, 2, command, saved(text))
    for form in ("text", "json", "csv"):
        written = printed(capsys, "show", "zb_v", *SMALL, "--format", form)
        assert printed(capsys, "check", saved("\ufeff" + written)).startswith("valid: "), form


def test_where_stages_live_may_be_said_beside_the_file(capsys, saved):
    bare = format_grid(dualpipe(2, 4)).partition("\n")[2]
    message = refused(capsys, 2, "check", saved(bare))
    assert message == 'error: where do the stages live? Add --pipes, such as --pipes "(0 1 2 3)"\n'
    out = printed(capsys, "check", saved(bare), "--pipes", "(0 1) (1 0)")
    assert out.startswith("valid: parsed, 2 ranks, 4 microbatches, 4 stages, 2 pairs; makespan ")
    assert "expected ranks in brackets" in refused(capsys, 2, "check", saved(bare), "--pipes", "0 1 | 1 0")


def test_check_reads_standard_input(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(format_grid(zb_h1(3, 4), CostModel())))
    told = json.loads(printed(capsys, "check", "-", "--json"))
    assert told["valid"] is True
    assert (told["name"], told["ranks"], told["microbatches"], told["pipes"]) == ("zb_h1", 3, 4, [[0, 1, 2]])
    assert told["makespan"] == simulate(zb_h1(3, 4)).makespan


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["show", "dualpip", *SMALL],
            "no schedule 'dualpip'; did you mean dualpipe or dualpipe_v? There are",
        ),
        (["compare", "one_f", *SMALL], "there is no schedule 'one_f'; did you mean one_f_one_b? There are"),
        (["show", "xyzzy", *SMALL], "there is no schedule 'xyzzy'; there are gpipe, one_f_one_b"),
        (["show", "1f1b", "--ranks", "3"], "show one_f_one_b: add --ranks and --microbatches"),
        (["show", "dualpipe", "--ranks", "3", "--microbatches", "8"], "try 2 or 4 ranks"),
        (["show", "gpipe", "--ranks", "0", "--microbatches", "8"], "try 1 ranks"),
        (["show", "gpipe", *SMALL, "--F", "-1"], "costs must be finite and at least 0, got F=-1.0"),
        (["show", "zb_h1", *SMALL, "--W", "0"], "all costs must be above 0"),
        (["show", "gpipe", *SMALL, "--F", "1e-12"], "of 4 ranks at most 1,000,000; let costs differ less"),
        (
            ["show", "gpipe", "--ranks", "3000", "--microbatches", "1"],
            "a line is 6.3e+04 characters long, and of 3,000 ranks at most 33,333; let costs differ less, take fewer",
        ),
        (["show", "gpipe", *SMALL, "--F", "1e308"], "gpipe takes longer than a number can say under Cost"),
        (["compare", *SMALL, "--F", "1e308"], "takes longer than a number can say"),
        (["show", "gpipe", *SMALL, "--waves", "2"], "gpipe takes no --waves; "),
        (["compare", "gpipe", "zb_v", *SMALL, "--waves", "2"], "--waves: none of these schedules takes it"),
        (["diff", "gpipe", "hanayo", *SMALL, "--stages-per-rank", "4"], "--stages-per-rank: none of these"),
        (["show", "gpipe", *SMALL, "--json", "--format", "csv"], "--json and --format csv are two formats"),
        (
            ["compare", *SMALL, "--json", "--format", "markdown"],
            "--json and --format markdown are two formats",
        ),
        (["show", "gpipe", *SMALL, "--pipes", "(0 1 2 3)"], "--pipes: gpipe says its own; drop it"),
        (["compare", *SMALL, "--pipes", "(0 1 2 3)"], "--pipes: schedules by name say their own; drop it"),
        (
            ["show", "gpipe", *SMALL, "-o", "/nowhere/be.txt"],
            "--output /nowhere/be.txt: there is no folder /nowhere",
        ),
        (["search", *SMALL, "--effort", "-1"], "search: got effort=-1.0; it must be finite and at least 0"),
        (["search", *SMALL, "--effort", "nan"], "search: got effort=nan"),
        (["search", *SMALL, "--seconds", "inf"], "search: got seconds=inf"),
        (["search", *SMALL, "--memory-limit", "nan"], "--memory-limit nan: give a number above 0"),
        (["search", *SMALL, "--memory-limit", "inf"], "--memory-limit inf: give a number above 0"),
        (["choose", *SMALL, "--memory-limit", "nan"], "--memory-limit nan: give a number above 0"),
        (["choose", *SMALL, "--search", "-1"], "search: got effort=-1.0"),
        (["replay", "/nowhere/to/be.json", "--top", "-1"], "--top -1: give at least 0"),
        (["check", "/nowhere/to/be.txt"], "/nowhere/to/be.txt: No such file or directory"),
    ],
)
def test_what_cannot_be_done_is_one_clear_message(capsys, arguments, message):
    assert message in refused(capsys, 2, *arguments)


def test_nothing_fits_is_status_1(capsys):
    message = refused(capsys, 1, "compare", "dualpipe", "--ranks", "5", "--microbatches", "4")
    assert "no schedule takes 5 ranks, 4 microbatches:\n  dualpipe  got 5 ranks" in message


def test_bad_usage_is_status_2():
    for line in ("", "show gpipe --rnaks 3", "show gpipe --ranks x"):
        with pytest.raises(SystemExit) as exit:
            main(line.split())
        assert exit.value.code == 2, line


def test_a_command_that_is_none_is_told_the_nearest(capsys):
    assert "has no command 'shwo'; did you mean show? dualpipe --help" in refused(capsys, 2, "shwo", "gpipe")
    assert "has no command 'bake'; they are show, compare, choose," in refused(capsys, 2, "bake")


@pytest.mark.parametrize("name", COMMANDS)
def test_help_names_every_option_and_the_help_of_all_says_what_each_does(capsys, name):
    """The first words, that is: the one stands in a table so that nothing need be imported for it."""
    for arguments in ([name, "--help"], ["--help"]):
        with pytest.raises(SystemExit) as exit:
            main(arguments)
        assert exit.value.code == 0
    verb, said = COMMANDS[name].split()[0], capsys.readouterr().out
    assert "--json" in said and re.search(rf"{name} +{verb}", said)
    assert options_of(name).__doc__.split()[0] == verb


def test_help_and_version_load_nothing_that_takes_time():
    code = (
        "import sys\n"
        "from dualpipe_jax.__main__ import main\n"
        "try: main([sys.argv[1]])\n"
        "except SystemExit: pass\n"
        "print(*sorted({m.split('.')[0] for m in sys.modules}), file=sys.stderr)\n"
    )
    for option, heavy in (("--version", {"tyro", "numpy", "jax"}), ("--help", {"numpy", "jax"})):
        run = subprocess.run([sys.executable, "-c", code, option], capture_output=True, text=True, check=True)
        assert not heavy & set(run.stderr.split())


@pytest.mark.parametrize("asked", [["--help"], ["check", "--help"]])
def test_help_ends_in_the_narrowest_terminal(asked):
    narrow = os.environ | {"COLUMNS": "3"}
    assert (
        in_process(*asked, env=narrow, timeout=60).stdout
        == in_process(*asked, env=narrow | {"COLUMNS": "40"}).stdout
    )


def test_it_says_which_version_it_is(capsys):
    assert printed(capsys, "--version") == f"dualpipe {dualpipe_jax.__version__}\n"
    assert "--version" in in_process("--help").stdout


def test_starts_without_what_is_slow(tmp_path):
    code = (
        "import sys\n"
        "from dualpipe_jax.__main__ import main\n"
        "grid, *counts = sys.argv[1:]\n"
        "assert not main(['show', 'dualpipe', *counts, '-o', grid])\n"
        "assert not main(['compare', *counts, '--json'])\n"
        "assert not main(['check', grid])\n"
        "print(*sorted({m.split('.')[0] for m in sys.modules}), file=sys.stderr)\n"
    )
    command = [sys.executable, "-c", code, tmp_path / "grid.txt", *SMALL]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    assert not {"jax", "jaxlib", "flax", "optax", "scipy", "matplotlib"} & set(run.stderr.split())


def test_piped_output_is_plain_and_the_status_tells(tmp_path):
    path = tmp_path / "bad.txt"
    counts = "--ranks", "16", "--microbatches", "64"
    run = in_process("show", "dualpipe", *counts, env=os.environ | {"COLUMNS": "40"})
    assert run.returncode == 0 and run.stdout.isascii() and "\x1b" not in run.stdout
    assert parse_grid(run.stdout) == dualpipe(16, 64)
    path.write_text(run.stdout.replace("0F0 ", "0F1 ", 1))
    run = in_process("check", str(path))
    assert (run.returncode, run.stdout) == (1, "")
    assert "Traceback" not in run.stderr and "[0F1]" in run.stderr


@pytest.mark.parametrize(
    "asked, buffered",
    [("show gpipe --ranks 4 --microbatches 8", True), ("check --help", True), ("--help", False)],
)
def test_a_reader_may_stop_early(asked, buffered):
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "dualpipe_jax", *asked.split()]
    environment = os.environ | {"PYTHONUNBUFFERED": "" if buffered else "1"}
    run = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, env=environment)
    os.close(writer)
    assert (run.returncode, run.stderr) == (141, "")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no device that is always full")
def test_a_full_disk_is_told_once():
    command = [sys.executable, "-m", "dualpipe_jax", "--version"]
    with open("/dev/full", "w") as full:
        run = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (run.returncode, run.stderr) == (2, "error: [Errno 28] No space left on device\n")


@pytest.mark.parametrize("width", [20, 60, 1000])
@pytest.mark.parametrize("schedule", [dualpipe(4, 8), dualpipe_v(3, 12), zb_h1(4, 20)], ids=lambda s: s.name)
def test_a_drawing_keeps_to_the_terminal_and_loses_no_slot(schedule, width):
    console = Console(file=io.StringIO(), force_terminal=True, color_system="truecolor", width=width)
    lines = [line.plain for line in draw(simulate(schedule, CostModel(FB=2.25)), console)[0]]
    assert all(len(line) <= max(width, 40) for line in lines)
    for rank, order in enumerate(schedule.orders):
        own = f"rank {rank} "
        drawn = " ".join(line.removeprefix(own) for line in lines if line.startswith(own))
        written = "".join("+".join(map(str, slot)) for slot in order)
        numbers = [str(action.microbatch) for slot in order for action in slot]
        assert drawn.replace(" ", "") == written if width > 60 else drawn.split() == numbers


def test_a_terminal_without_colours_gets_whole_actions(capsys, monkeypatch):
    for module in ("show", "output"):
        monkeypatch.setattr(f"dualpipe_jax.command.{module}.in_terminal", lambda: True)
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("NO_COLOR", "1")
    lines = printed(capsys, "show", "zb_h1", "--ranks", "2", "--microbatches", "8").splitlines()
    assert lines[0].startswith("rank 0 0F0 0F1     0I0 0W0 0F2")
    assert [line.startswith("rank 0 ") for line in lines[:9]].count(True) == 2
    assert "zb_h1, 2 ranks, 8 microbatches: makespan 25, bubble 4.0 %" in lines
    assert all(len(line) <= 60 for line in lines)


def test_a_terminal_gets_names_unchanged(capsys, monkeypatch, saved):
    monkeypatch.setattr("dualpipe_jax.command.output.in_terminal", lambda: True)
    monkeypatch.setenv("COLUMNS", "200")
    path = saved(format_grid(zb_h1(2, 4)), "run:x:[b].txt")
    assert "run:x:[b].txt" in printed(capsys, "compare", path)


def test_a_terminal_gets_colours():
    ours, theirs = os.openpty()
    command = [sys.executable, "-m", "dualpipe_jax", "compare", "gpipe", "dualpipe", *SMALL]
    subprocess.run(command, stdout=theirs, env=os.environ | {"TERM": "xterm-256color"}, check=True)
    os.close(theirs)
    shown = os.read(ours, 4096).decode()
    os.close(ours)
    assert "\x1b[1;32mdualpipe" in shown and "gpipe" in shown


@pytest.mark.parametrize("name", ["gpipe", "dualpipe", "zb_v"])
def test_pictures_are_files(capsys, tmp_path, name):
    path = tmp_path / "schedule.svg"
    assert printed(capsys, "show", name, "--ranks", "2", "--microbatches", "4", "-o", str(path)) == ""
    assert xml.etree.ElementTree.parse(path).getroot().tag.endswith("svg")


def test_pictures_are_piped(capsysbinary):
    assert main(["show", "dualpipe", "--ranks", "2", "--microbatches", "4", "--format", "png"]) == 0
    assert capsysbinary.readouterr().out.startswith(b"\x89PNG")


def test_the_page_is_of_what_was_asked_for(capsys, monkeypatch):
    told = lambda *given, **more: repr((given, more))  # noqa: E731
    monkeypatch.setattr("dualpipe_jax.schedule.html_page", told)
    options = ["--FB", "2", "--parameters", "3", "--format", "html"]
    out = printed(capsys, "show", "dualpipe_v", *SMALL, *options)
    given = dualpipe_v(4, 8), CostModel(FB=2.0), MemoryModel(parameters=3.0)
    assert out == repr((given, {"units": Units(), "chain": None})) + "\n"


def test_a_file_is_shown_too(capsys, saved):
    file = saved(format_grid(dualpipe(2, 4)))
    assert parse_grid(printed(capsys, "show", file, "--FB", "2")) == dualpipe(2, 4)
    assert "drop --ranks and --microbatches" in refused(capsys, 2, "show", file, *SMALL)
    broken = saved(format_grid(dualpipe(2, 4)).replace("3F0 0F1", "0F1 3F0").replace("0B0", "0B1"))
    assert "<-- here" in refused(capsys, 1, "show", broken)


QUICK = ["--ranks", "2", "--microbatches", "4", "--effort", "0.02"]


def test_search_keeps_what_it_found_and_compares_it(capsys, tmp_path):
    path = tmp_path / "found.json"
    costs = ["--FB", "2.25", "--memory-limit", "2"]
    lines = printed(capsys, "search", *QUICK, *costs, "-o", str(path)).splitlines()
    assert lines[0] == "2 ranks, 4 microbatches, F 1, I 1, W 1, FB 2.25, memory limit 2"
    names = [line.split()[0] for line in lines[2:-1]]
    assert {"search", "one_f_one_b", "zb_h1"} <= set(names)
    assert not {"gpipe", "dualpipe"} & set(names)  # 4 and 3 activations
    assert lines[-1].endswith(f"written to {path}")
    found = validate(from_json(path.read_text()))
    makespan = simulate(found, CostModel(FB=2.25).for_schedule(found)).makespan
    assert makespan <= min(simulate(recipe(2, 4)).makespan for recipe in (one_f_one_b, zb_h1))
    row = next(line for line in lines if line.startswith("search"))
    assert float(row.split()[2]) == pytest.approx(makespan, abs=1e-3)


@pytest.mark.parametrize("ending", ["json", "txt"])
def test_a_file_stands_where_a_name_does_and_remembers_its_costs(capsys, tmp_path, ending):
    path = tmp_path / f"found.{ending}"
    costs = ["--FB", "2.25", "--send", ".1", "--last", ".5", ".25", "0", "--stash", "2"]
    printed(capsys, "show", "dualpipe_v", "--ranks", "3", "--microbatches", "6", *costs, "-o", str(path))
    schedule = dualpipe_v(3, 6)
    known = CostModel(FB=2.25, send=0.1, extra={-1: (0.5, 0.25, 0)})
    expected = simulate(schedule, known.for_schedule(schedule)).makespan
    told = json.loads(printed(capsys, "check", str(path), "--json"))
    assert told["makespan"] == pytest.approx(expected)
    rows = {row["name"]: row for row in facts_of(capsys, "compare", str(path), "zb_v")["schedules"]}
    assert rows[path.name]["makespan"] == pytest.approx(expected)
    sizes = MemoryModel(stash=2).for_schedule(schedule)
    assert rows[path.name]["memory"] == max(simulate(schedule, known.for_schedule(schedule)).memory(sizes))
    assert set(rows) == {path.name, "zb_v"}
    again = json.loads(printed(capsys, "check", str(path), "--json", "--send", ".3"))
    dearer = CostModel(FB=2.25, send=0.3, extra=known.extra)
    assert again["makespan"] == pytest.approx(simulate(schedule, dearer.for_schedule(schedule)).makespan)
    counts = "--ranks", "2", "--microbatches", "5"
    other = facts_of(capsys, "compare", "zb_h1", *counts, "--costs", str(path))
    assert other["schedules"][0]["makespan"] == simulate(zb_h1(2, 5), known).makespan


def test_costs_come_from_a_file_of_their_own_too(capsys, saved):
    path = saved('{"costs": {"F": 2, "I": 3, "W": 1, "send": 0.5, "extra": {"-1": [1, 1, 1]}}}')
    costs = CostModel(2, 3, 1, send=0.5, extra={-1: (1, 1, 1)})
    facts = json.loads(printed(capsys, "show", "zb_h1", *SMALL, "--json", "--costs", path))
    assert facts["makespan"] == simulate(zb_h1(4, 8), costs).makespan
    line = ["--F", "2", "--I", "3", "--FB", "6", "--send", ".5", "--last", "1", "1", "1"]
    known = '"costs": {"F": 2, "I": 3, "send": 0.5, "extra": {"-1": [1, 1, 1]}}'
    more = saved("{" + known + ', "of": "anything", "measured": {}}')
    assert printed(capsys, "compare", *SMALL, "--costs", more) == printed(capsys, "compare", *SMALL, *line)
    alone = saved('{"F": 2, "I": 3, "W": 1, "send": 0.5, "last": [1, 1, 1], "of": "it"}')
    assert printed(capsys, "compare", *SMALL, "--costs", alone) == printed(capsys, "compare", *SMALL, *line)
    line[1] = line[5] = "5"
    wins = printed(capsys, "compare", *SMALL, "--costs", more, "--F", "5", "--FB", "5")
    assert wins == printed(capsys, "compare", *SMALL, *line)
    missing = "show", "zb_h1", *SMALL, "--costs", "nowhere.json"
    assert "nowhere.json: No such file" in refused(capsys, 2, *missing)
    for text, message in (
        ("{}", "no costs; give JSON such as"),
        ('{"costs": {"G": 1}}', "costs that cannot be read: "),
        ('{"costs": {"F": -1}}', "costs must be finite and at least 0, got F=-1"),
        ('{"costs": 3}', "costs that cannot be read"),
        ("{", "not JSON"),
    ):
        assert message in refused(capsys, 2, "show", "zb_h1", *SMALL, "--costs", saved(text))


def test_small_costs_are_printed_like_large_ones(capsys, saved):
    """The same digits in a unit of time a thousand times as long. Idle ranks' 0 is 0, and no rounding's rest."""
    ones = [word for name in "FIW" for word in (f"--{name}", "0.0123")]
    small = [word.replace("0.0123", "0.0000123") for word in ones]
    rows = []
    for costs in (ones, small):
        told = printed(capsys, "compare", "gpipe", "dualpipe", *SMALL, *costs).splitlines()
        rows.append([[float(word) for word in re.findall(r"[\d.]+(?:e-\d+)?", line)] for line in told[2:]])
        assert told[0].split(", ")[2] == f"F {float(costs[1]):.3g}"
    for one, other in zip(*rows, strict=True):
        assert one[1] == pytest.approx(other[1] * 1000) and other[1] > 0
    step = saved(printed(capsys, "show", "dualpipe", *SMALL, *small, "--json"), "small.json")
    told = [line.split() for line in printed(capsys, "replay", step).splitlines()]
    assert told[4][-1] != "0" and [line[-1] for line in told[5:7]] == ["0", "0"]


GIVEN_BACK = [
    ("--send", "0"),
    ("--send-inside", "2"),
    ("--ranks-per-node", "1"),
    ("--no-blocking",),
    ("--first", "0", "0", "0"),
    ("--last", "0", "0", "0"),
    *(("--" + name, "1") for name in "FIW"),
    ("--FB", "6"),
    ("--residual-i", "1"),
    *((f"--{name}", "0") for name in ("residual-w", "stash", "boundary", "parameters", "fixed")),
    ("--first-parameters", "0"),
    ("--last-parameters", "0"),
]
"""Options as they are when left out, FB and a node's transfers as they follow from the file's others."""


@pytest.mark.parametrize("option", GIVEN_BACK, ids=" ".join)
def test_an_option_given_as_it_is_without_a_file_wins_over_the_file(capsys, saved, option):
    ends = {"0": [5, 0, 0], "-1": [1, 2, 3]}
    costs = {
        "F": 2,
        "I": 2,
        "W": 2,
        "FB": 5,
        "send": 2,
        "send_inside": 0.5,
        "ranks_per_node": 2,
        "blocking": True,
    }
    sizes = dict.fromkeys(("residual_i", "residual_w", "stash", "boundary", "parameters", "fixed"), 7)
    entries = {"costs": costs | {"extra": ends}, "memory": sizes | {"extra": {"0": 9, "-1": 9}}}
    said = "show", "dualpipe", *SMALL, "--json", "--costs", saved(json.dumps(entries), "full.json")
    file = json.loads(printed(capsys, *said))["of_a_share"]
    asked = json.loads(printed(capsys, *said, *option))["of_a_share"]
    name, *values = option[0].lstrip("-").replace("-", "_"), *map(float, option[1:])
    kind = "costs" if name in costs or name in ("no_blocking", "first", "last") else "memory"
    stage = {"first": "0", "last": "-1"}.get(name.removesuffix("_parameters"))
    if stage is not None:
        del file[kind]["extra"][stage]
    else:
        file[kind][name.removeprefix("no_")] = False if name == "no_blocking" else values[0]
    assert asked == file


def test_a_pair_that_gains_nothing_follows_the_options(capsys, saved):
    """--FB says so: F + I + W where it is left out, of the file or not. A pair of its own stays as the file has it."""
    schedule = dualpipe(4, 8)
    for known, costs in (
        ('"F": 1, "I": 1, "W": 1', CostModel(10, 1, 1)),
        ('"F": 1, "I": 1, "W": 1, "FB": 3', CostModel(10, 1, 1)),
        ('"F": 1, "I": 1, "W": 1, "FB": 2.25', CostModel(10, 1, 1, FB=2.25)),
        # Rounded each by itself, as `dualpipe dryrun --write-costs` writes them where no pair was compiled.
        (
            f'"F": 0.1, "I": 0.2, "W": 0.7, "FB": {math.nextafter(0.1 + 0.2 + 0.7, 2)}',
            CostModel(10, 0.2, 0.7),
        ),
    ):
        path = saved('{"costs": {' + known + "}}")
        (row,) = facts_of(capsys, "compare", "dualpipe", *SMALL, "--costs", path, "--F", "10")["schedules"]
        assert row["makespan"] == simulate(schedule, costs.for_schedule(schedule)).makespan
    ones, twos = ([word for name in "FIW" for word in (f"--{name}", time)] for time in "12")
    step = saved(printed(capsys, "show", "one_f_one_b", *SMALL, *twos, "--json"), "step.json")
    assert json.loads(printed(capsys, "check", step, *ones, "--json"))["makespan"] == 33
    assert facts_of(capsys, "replay", step, "--F", "1")["makespan"]["simulated"] == 33


def test_a_transfer_blocks_or_does_not(capsys):
    told = refused(capsys, 2, "show", "gpipe", *SMALL, "--blocking", "--no-blocking")
    assert told == "error: --blocking and --no-blocking: give one of them, or neither\n"


IN_MS = """{
  "costs": {"F": 60, "I": 60, "W": 40, "send": 2, "send_inside": 0.5, "ranks_per_node": 2, "extra": {"-1": [-5, 0, 0]}},
  "memory": {"residual_i": 1073741824, "parameters": 17179869184, "extra": {"0": 2147483648}, "fixed": 536870912},
  "units": {"time": "ms", "memory": "B"}
}"""


def test_units_of_a_file_are_written_by_every_subcommand(capsys, saved, tmp_path):
    costs = ["--costs", saved(IN_MS)]
    words = "F 60, I 60, W 40, FB 160, send 2, 0.5 in a node of 2, last -5/+0/+0 ms"
    known = CostModel(60, 60, 40, send=2, send_inside=0.5, ranks_per_node=2, extra={-1: (-5, 0, 0)})
    schedule = zb_h1(4, 8)
    makespan = f"{simulate(schedule, known).makespan:g} ms"
    shown = printed(capsys, "show", "zb_h1", *SMALL, *costs).splitlines()
    assert f"# makespan {makespan}, bubble" in shown[5] and shown[5].endswith("memory 22.5 GiB")
    assert shown[6] == f"# cost of a stage: {words}"
    assert re.split(" {2,}", shown[7])[1:] == ["idle, ms", "of the step", "activations", "memory"]
    file = str(tmp_path / "kept.json")
    printed(capsys, "show", "zb_h1", *SMALL, *costs, "-o", file)
    checked = printed(capsys, "check", file)
    assert f"makespan {makespan}, bubble" in checked, "a schedule's file keeps its units"
    assert printed(capsys, "diff", "gpipe", "1f1b", *SMALL, *costs).splitlines()[0].endswith(f" ms; {words}")
    for command in (["compare"], ["choose", "--memory-limit", "23e9"], ["search", "--effort", "0.01"]):
        head, title, *rows = printed(capsys, *command, *SMALL, *costs).splitlines()
        assert words in head and "makespan, ms" in title and " GiB " in rows[0]
    chosen = printed(capsys, "choose", "--memory-limit", "23e9", *SMALL, *costs)
    assert "needs 24.5 GiB on rank 0, but the limit is 21.42 GiB" in chosen
    assert f"the step takes {makespan}" in printed(capsys, "show", "zb_h1", *SMALL, *costs, "--why", "path")
    for command in ("compare", "choose"):
        facts = json.loads(printed(capsys, command, *SMALL, *costs, "--json"))
        assert facts["units"] == {"time": "ms", "memory": "B"}
    told = refused(capsys, 2, "compare", *SMALL, "--costs", saved('{"costs": {}, "units": {"time": 3}}'))
    assert "Units: time=3; give a short word, such as ms for times" in told


def test_a_schedule_too_fine_for_an_extra_is_refused_and_no_other(capsys):
    arguments = "compare", "gpipe", "hanayo", *SMALL, "--last", "-0.5", "0", "0"
    out = printed(capsys, *arguments).splitlines()
    assert out[2].startswith("gpipe ")
    assert "hanayo  CostModel: extra[-1]=(-0.5, 0.0, 0.0) takes more away" in out[4]
    facts = json.loads(printed(capsys, "choose", *arguments[3:], "--json"))
    assert "hanayo" in facts["refused"] and "gpipe" in [row["name"] for row in facts["schedules"]]


def test_the_chain_is_marked_in_pictures_and_traces(capsys, tmp_path):
    arguments = "show", "1f1b", "--ranks", "2", "--microbatches", "2"
    trace = json.loads(printed(capsys, *arguments, "--format", "trace", "--why", "path"))
    found = [event["name"] for event in trace["traceEvents"] if event.get("cat") == "chain"]
    chain = {0: ["0F0", "0B1"], 1: ["1F0", "1B0", "1F1", "1B1"]}
    assert set(found) == {f"{slot} on rank {rank}" for rank, slots in chain.items() for slot in slots}
    picture = tmp_path / "why.svg"
    printed(capsys, *arguments, "--why", "0@3", "-o", str(picture))
    assert 'id="chain"' in picture.read_text()
    links = json.loads(printed(capsys, *arguments, "--why", "0@3", "--json"))["why"]
    found = [(link["rank"], link["slot"], link["start"], link["sent"]) for link in links]
    assert found == [(0, "0B0", 4, False), (1, "1B0", 2, True)]
    as_csv = "--why", "path", "--format", "csv"
    assert "--why: CSV holds orders alone" in refused(capsys, 2, *arguments, *as_csv)
    told = tmp_path / "why.txt"
    printed(capsys, *arguments, "--why", "0@3", "-o", str(told))
    assert told.read_text().startswith("rank 0 at 3: idle until 4")


def test_why_a_rank_is_idle(capsys):
    arguments = "show", "1f1b", "--ranks", "2", "--microbatches", "2", "--why"
    assert printed(capsys, *arguments, "0@3").splitlines() == [
        "rank 0 at 3: idle until 4, where it runs",
        "  rank 0: 0B0 from 4 to 6, which waits for what comes from",
        "  rank 1: 1B0 from 2 to 4",
    ]
    assert printed(capsys, *arguments, "path").splitlines() == [
        "the step takes 9, last",
        "  rank 0: 0B1 from 7 to 9, which waits for what comes from",
        "  rank 1: 1B1 from 5 to 7, which follows on",
        "  rank 1: 1F1 from 4 to 5, which follows on",
        "  rank 1: 1B0 from 2 to 4, which follows on",
        "  rank 1: 1F0 from 1 to 2, which waits for what comes from",
        "  rank 0: 0F0 from 0 to 1",
    ]
    slack = json.loads(printed(capsys, *arguments[:-1], "--json"))["slack"]
    assert slack == [[0, 2, 1, 0], [0, 0, 0, 0]]  # 0F1 may end when 1F1 starts, 0B0 when 0B1 does
    assert "rank 0 at 0.5: works" in printed(capsys, *arguments, "0@0.5")
    wanted = "--why 'now': expected a rank and a time, such as 5@21, or path"
    assert wanted in refused(capsys, 2, *arguments, "now")
    assert "there are ranks 0 to 1" in refused(capsys, 2, *arguments, "7@1")


def test_where_two_schedules_part(capsys, tmp_path):
    out = printed(capsys, "diff", "gpipe", "one_f_one_b", *SMALL)
    assert out.splitlines() == [
        "gpipe and one_f_one_b: makespan 33 and 33; F 1, I 1, W 1, FB 3",
        "rank  part at slot  gpipe  one_f_one_b  part at time",
        "0                4    0F4          0B0             4",
        "1                3    1F3          1B0             4",
        "2                2    2F2          2B0             4",
        "3                1    3F1          3B0             4",
    ]
    found = json.loads(printed(capsys, "diff", "gpipe", "1f1b", *SMALL, "--json"))
    assert found["makespans"] == [33, 33]
    assert found["ranks"][3] == {"rank": 3, "slot": 1, "one": "3F1", "other": "3B0", "time": 4}
    file = str(tmp_path / "limited.json")
    printed(capsys, "show", "zb_v", *SMALL, "--max-stash", "1", "-o", file)
    assert "part at slot" in printed(capsys, "diff", file, "zb_v")
    assert printed(capsys, "diff", file, file).endswith("the same on every rank, in order and in time\n")
    assert "place their stages differently" in refused(capsys, 2, "diff", file, "gpipe")
    counts = "--ranks", "4", "--microbatches", "9"
    assert "has 4 ranks and 8 microbatches" in refused(capsys, 2, "diff", file, "zb_v", *counts)


def test_a_measured_step_is_replayed(capsys, saved):
    costs = saved(IN_MS, "ms.json")
    step = saved(printed(capsys, "show", "zb_v", *SMALL, "--costs", costs, "--json"), "step.json")
    told = printed(capsys, "replay", step, "--top", "2").splitlines()
    assert told[0].startswith("zb_v, 4 ranks, 8 microbatches; cost of a stage: F 30, I 30, W 20, FB 80, ")
    assert told[3].split("  ")[0] == "step" and told[3].endswith("makespan, ms  more")
    rows = ["simulated at these costs", "each unit as long as it took", "measured"]
    assert [line.split("  ")[0] for line in told[4:7]] == rows
    assert told.index("units that differ most") - told.index("ranks whose work differs most") == 5
    other = "--F 80 --I 60 --W 40 --last -5 0 0"  # a stage's F is 40 instead of 30
    facts = facts_of(capsys, "replay", step, *other.split())
    assert {unit["kind"] for unit in facts["by_unit"][:8]} == {"F"}
    assert [unit["difference"] for unit in facts["by_unit"][:8]] == [-80] * 8
    assert facts["units"]["time"] == "ms"
    again = facts_of(capsys, "replay", step, "--costs", saved(json.dumps(facts), "facts.json"))
    assert again["costs"]["F"] == 80 and again["makespan"] == facts["makespan"]
    seconds = saved('{"costs": {"F": 1}, "units": {"time": "s"}}', "s.json")
    wanted = "the step is in ms, the costs in s; give both in one unit"
    assert wanted in refused(capsys, 2, "replay", step, "--costs", seconds)
    assert "read_measured: not JSON" in refused(capsys, 2, "replay", saved("3F0", "no.json"))


def test_counts_beside_files(capsys, saved):
    path = saved(printed(capsys, "show", "zb_v", *SMALL), "mine.txt")
    facts = facts_of(capsys, "compare", "gpipe", path)
    assert (facts["ranks"], facts["microbatches"]) == (4, 8)
    other = facts_of(capsys, "compare", path, "gpipe", "--ranks", "2", "--microbatches", "8")
    assert other["refused"] == {path: "has 4 ranks and 8 microbatches"}
    assert "add --ranks and --microbatches, or name a file" in refused(capsys, 2, "compare", "gpipe")
    bare = saved(format_grid(dualpipe(2, 4)).partition("\n")[2])
    assert printed(capsys, "show", bare, "--pipes", "(0 1) (1 0)").startswith("# parsed, ranks 2")
    told = refused(capsys, 1, "compare", path, "--ranks", "2")
    assert told.startswith("error: no schedule takes 2 ranks:\n"), "the microbatches are the file's"
    whole = saved(printed(capsys, "show", "dualpipe", *SMALL, "--json"), "mine.json")
    assert "--pipes Placement(pipes=((0, 1),)); drop" in refused(
        capsys, 1, "check", whole, "--pipes", "(0 1)"
    )
    told = refused(capsys, 2, "show", path, "--stages-per-rank", "4")
    assert "is a file, cut as it is; drop --stages-per-rank and --waves" in told
    told = refused(capsys, 2, "compare", path, "--stages-per-rank", "4")
    assert "--stages-per-rank: none of these schedules takes it" in told


def test_stashes_are_limited_everywhere(capsys):
    limited = limit_stash(dualpipe(4, 8), 1)
    grid = printed(capsys, "show", "dualpipe", *SMALL, "--max-stash", "1")
    assert parse_grid(grid) == limited != dualpipe(4, 8)
    for command in (["compare", "dualpipe"], ["choose"]):
        facts = json.loads(printed(capsys, *command, *SMALL, "--max-stash", "1", "--json"))
        row = next(row for row in facts["schedules"] if row["name"] == "dualpipe")
        assert row["makespan"] == simulate(limited).makespan > simulate(dualpipe(4, 8)).makespan
    for command in (["show", "dualpipe"], ["compare"], ["choose"]):
        told = refused(capsys, 2, *command, *SMALL, "--max-stash", "-1")
        assert told == "error: --max-stash -1: must not be negative\n"


def test_search_for_programs(capsys):
    facts = json.loads(printed(capsys, "search", *QUICK, "--placement", "v", "--json"))
    found = from_json(json.dumps(facts["schedule"]))
    assert found.placement == Placement.v(2)
    assert facts["found"]["makespan"] == simulate(found, CostModel().for_schedule(found)).makespan
    shown = printed(capsys, "search", *QUICK, "--placement", "v").splitlines()
    best = facts["named"][0]  # on a placement that was not asked for
    assert facts["found"]["makespan"] > best["makespan"]
    assert f" longer than {best['name']}, the best of the named that fit" in shown[-1]


def test_search_in_no_memory_is_status_1(capsys):
    message = refused(capsys, 1, "search", *QUICK, "--memory-limit", ".25")
    assert "--memory-limit 0.25" in message
    assert "try --memory-limit 1 or more" in message
    odd = "--ranks", "2", "--microbatches", "5", "--placement", "bidirectional"
    assert "must be a positive multiple of 2; try 4 or 6" in refused(capsys, 2, "search", *odd)


def test_choose_ranks_what_fits_and_says_why_not(capsys):
    named = {recipe.__name__ for recipe in ALL_SCHEDULES}
    lines = printed(capsys, "choose", *SMALL, "--FB", "2.25", "--memory-limit", "4.5").splitlines()
    assert lines[0] == "4 ranks, 8 microbatches, F 1, I 1, W 1, FB 2.25, memory limit 4.5"
    assert lines[2].split()[0] == "dualpipe_v"
    cut = lines.index("refused:")
    makespans = [float(line.split()[2]) for line in lines[2:cut]]
    assert makespans == sorted(makespans)
    assert {line.split()[0] for line in (*lines[2:cut], *lines[cut + 1 :])} == named
    gpipe = next(line for line in lines[cut:] if line.startswith("  gpipe "))
    assert gpipe.endswith("needs 8 of memory on rank 0, but the limit is 4.5")
    facts = json.loads(printed(capsys, "choose", *SMALL, "--search", "0.02", "--memory-limit", "3", "--json"))
    assert "search" in [row["name"] for row in facts["schedules"]]
    assert facts["memory_limit"] == 3
    assert set(facts["refused"]) >= {"dualpipe", "gpipe"}


def test_choose_in_no_memory_is_status_1(capsys):
    message = refused(capsys, 1, "choose", *SMALL, "--memory-limit", ".5")
    assert "no schedule fits 4 ranks, 8 microbatches, F 1, I 1, W 1, FB 3, memory limit 0.5:\n" in message
    assert "needs 8 of memory on rank 0, but the limit is 0.5" in message
