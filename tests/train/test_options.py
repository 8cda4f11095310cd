"""Where options come from: presets, files, flags; what is written out comes back; what is wrong is named."""

import dataclasses
import json
import os
from pathlib import Path

import pytest

from train.checks import check
from train.config import FLAGS, ConfigError, TrainConfig, configure, make_schedule, option, replaced
from train.figures.folder import write_config
from train.options import PRESETS, apply, options_as_dict, parse

FILES = {
    "options.toml": 'seed = 7\n[step]\npp = 2\n[data]\npaths = ["a", "b"]\n[optimizer]\nclip = 2\n',
    "options.yaml": "seed: 7\nstep: {pp: 2}\ndata: {paths: [a, b]}\noptimizer: {clip: 2}\n",
    "options.json": '{"seed": 7, "step": {"pp": 2}, "data": {"paths": ["a", "b"]}, "optimizer": {"clip": 2}}',
}


def test_no_option_is_the_default():
    assert parse([]).options == TrainConfig()


def test_a_flag_reaches_its_section():
    given = parse(["--pp", "2", "--steps", "3", "--model", "tiny", "--data", "a", "b", "--log-every", "5"])
    expected = {
        "step": {"pp": 2},
        "optimizer": {"steps": 3},
        "model": {"name": "tiny"},
        "data": {"paths": ["a", "b"]},
        "log": {"every": 5},
    }
    assert given.options == apply(TrainConfig(), expected, "here")
    assert given.options == configure(pp=2, steps=3, model="tiny", data=("a", "b"), log_every=5)


def test_flags_may_be_written_with_their_section():
    long = ["--step.pp", "2", "--step.capacity-factor=3.5", "--model.name", "tiny", "--log.every", "5"]
    assert parse(long).options == configure(pp=2, capacity_factor=3.5, model="tiny", log_every=5)


@pytest.mark.parametrize("name", FILES)
def test_a_file_gives_options_and_flags_win(name, tmp_path):
    file = tmp_path / name
    file.write_text(FILES[name])
    expected = configure(seed=7, pp=2, data=("a", "b"), clip=2.0)
    assert parse(["--config", str(file)]).options == expected
    assert parse([f"--config={file}", "--pp", "8"]).options == configure(expected, pp=8)


def test_a_file_wins_over_the_preset(tmp_path):
    file = tmp_path / "more.toml"
    file.write_text("[step]\npp = 1\n")
    options = parse(["--preset", "quick", "--config", str(file)]).options
    assert (options.step.pp, options.step.ep) == (1, PRESETS["quick"]["step"]["ep"])


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_options_that_fit_together(name):
    options = parse(["--preset", name]).options
    assert options != TrainConfig()
    check(options)
    make_schedule(options)


def test_what_is_written_out_comes_back(tmp_path):
    options = configure(name="x", data=("a",), layers=6, precision="bfloat16", runs=Path("elsewhere"))
    file = tmp_path / "config.json"
    file.write_text(json.dumps(options_as_dict(options)))
    assert parse(["--config", str(file)]).options == options
    sections = {path[0] for path in FLAGS.values() if len(path) > 1}
    assert sections <= json.loads(file.read_text()).keys()


def test_every_option_has_a_flag_of_its_own():
    leaves = sum(
        len(dataclasses.fields(value)) if dataclasses.is_dataclass(value) else 1
        for value in vars(TrainConfig()).values()
    )
    assert len(FLAGS) == leaves
    assert option(TrainConfig(), "--pp") == 4


REFUSED = {
    "no such preset": (["--preset", "quik"], "", "--preset quik: did you mean quick? there are "),
    "no such file": (["--config", "none.toml"], "", "none.toml: cannot read it: No such file"),
    "no such format": (["--config", "{file}.ini"], "", "must end in .toml, .yaml or .json"),
    "broken": (["--config", "{file}.toml"], "[mesh", "Expected ']'"),
    "broken yaml": (["--config", "{file}.yaml"], "a: [", "expected the node content"),
    "too deep": (["--config", "{file}.json"], "[" * 200_000, "--config it.json: "),
    "a run's own file": (["--runs", ".", "--name", "r", "--resume"], "{", "--resume: r/config.json: Expecting prop"),
    "no sections": (["--config", "{file}.json"], "[1]", "must hold sections of options, holds list"),
    "no such option": (["--config", "{file}.toml"], "[step]\nschedul = 1", "step.schedul; did you mean schedule?"),
    "no such section": (["--config", "{file}.toml"], "[stop]\npp = 1", "no option stop; did you mean step?"),
    "no section": (["--config", "{file}.toml"], "step = 3", "step is a section, got 3"),
    "text for a number": (["--config", "{file}.toml"], "[step]\npp = '2'", "step.pp is '2', must be int"),
    "truth for a number": (["--config", "{file}.toml"], "seed = true", "seed is True, must be int"),
    "choice": (["--config", "{file}.toml"], "[launch]\ndevices = 'gpu'", "devices is 'gpu', must be one of cpu, acc"),
    "path for paths": (["--config", "{file}.toml"], "[data]\npaths = 'a'", "data.paths is 'a', must be a list of str"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_option_is_named(case, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments, text, message = REFUSED[case]
    for ending in ("toml", "yaml", "json", "ini"):
        (tmp_path / f"it.{ending}").write_text(text)
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "config.json").write_text(text)
    with pytest.raises(ConfigError) as raised:
        parse([argument.format(file="it") for argument in arguments])
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_configure_knows_its_options():
    with pytest.raises(TypeError, match="configure: no option ppp; there are --name"):
        configure(ppp=1)


def test_without_a_name_the_newest_run_goes_on(tmp_path):
    with pytest.raises(
        ConfigError, match=f"--resume: there is no run in {tmp_path}; --runs says where to look"
    ):
        parse(["--runs", str(tmp_path), "--resume"])
    for name, when in (("b", 300), ("a", 500), ("c", 400)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"seed": when}))
        os.utime(tmp_path / name / "config.json", (when, when))
    assert parse(["--runs", str(tmp_path), "--resume"]).options == configure(
        name="a", runs=tmp_path, seed=500
    )


@pytest.mark.parametrize(
    ("section", "name", "value"),
    [
        ("checkpoint", "export", "out"),
        ("launch", "patience", 60.0),
        ("launch", "restarts", 9),
        ("launch", "shrink", True),
        ("launch", "straggler_every", 7),
        ("launch", "process_id", 1),
        ("launch", "num_processes", 2),
        ("launch", "coordinator", "a:1"),
        ("launch", "coordinator_bind", "a:1"),
    ],
)
def test_a_resumed_run_has_its_options_but_those_of_one_start(section, name, value, tmp_path):
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "config.json").write_text(json.dumps({section: {name: value}, "seed": 7}))
    command = ["--runs", str(tmp_path), "--name", "x", "--resume"]
    options = parse(command).options
    assert options == configure(name="x", runs=tmp_path, seed=7)
    check(options)
    # Nor does another run inherit them that takes its options from there.
    write_config(replaced(TrainConfig(), (section, name), value), tmp_path / "x")
    assert parse(["--config", str(tmp_path / "x" / "config.json")]).options == TrainConfig()
    given = () if value is True else (str(value),)
    asked = parse([*command, f"--{name.replace('_', '-')}", *given]).options
    assert str(getattr(getattr(asked, section), name)) == str(value)
