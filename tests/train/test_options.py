"""Where options come from: presets, files, flags; what is written out comes back; what is wrong is named."""

import dataclasses
import json
from pathlib import Path

import pytest

from train.config import FLAGS, ConfigError, TrainConfig, check, configure, make_schedule, option
from train.options import apply, parse, plain
from train.presets import PRESETS

FILES = {
    "options.toml": 'seed = 7\n[mesh]\npp = 2\n[data]\npaths = ["a", "b"]\n[optimizer]\nclip = 2\n',
    "options.yaml": "seed: 7\nmesh: {pp: 2}\ndata: {paths: [a, b]}\noptimizer: {clip: 2}\n",
    "options.json": '{"seed": 7, "mesh": {"pp": 2}, "data": {"paths": ["a", "b"]}, "optimizer": {"clip": 2}}',
}


def test_no_option_is_the_default():
    assert parse([]).options == TrainConfig()


def test_a_flag_reaches_its_section():
    given = parse(["--pp", "2", "--steps", "3", "--model", "tiny", "--data", "a", "b", "--log-every", "5"])
    expected = {
        "mesh": {"pp": 2},
        "optimizer": {"steps": 3},
        "model": {"name": "tiny"},
        "data": {"paths": ["a", "b"]},
        "log": {"every": 5},
    }
    assert given.options == apply(TrainConfig(), expected, "here")
    assert given.options == configure(pp=2, steps=3, model="tiny", data=("a", "b"), log_every=5)


def test_flags_may_be_written_with_their_section():
    long = ["--mesh.pp", "2", "--model.capacity-factor=3.5", "--model.name", "tiny", "--log.every", "5"]
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
    file.write_text("[mesh]\npp = 1\n")
    options = parse(["--preset", "quick", "--config", str(file)]).options
    assert (options.mesh.pp, options.mesh.ep) == (1, PRESETS["quick"]["mesh"]["ep"])


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_options_that_fit_together(name):
    options = parse(["--preset", name]).options
    assert options != TrainConfig()
    check(options)
    make_schedule(options)


def test_what_is_written_out_comes_back(tmp_path):
    options = configure(name="x", data=("a",), layers=6, precision="bfloat16", runs=Path("elsewhere"))
    file = tmp_path / "config.json"
    file.write_text(json.dumps(plain(options)))
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
    "no sections": (["--config", "{file}.json"], "[1]", "must hold sections of options, holds list"),
    "no such option": (["--config", "{file}.toml"], "[mesh]\nschedul = 1", "mesh.schedul; did you mean schedule?"),
    "no such section": (["--config", "{file}.toml"], "[mash]\npp = 1", "no option mash; did you mean mesh?"),
    "no section": (["--config", "{file}.toml"], "mesh = 3", "mesh is a section, got 3"),
    "text for a number": (["--config", "{file}.toml"], "[mesh]\npp = '2'", "mesh.pp is '2', must be int"),
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
    with pytest.raises(ConfigError) as raised:
        parse([argument.format(file="it") for argument in arguments])
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_configure_knows_its_options():
    with pytest.raises(TypeError, match="configure: no option ppp; there are --name"):
        configure(ppp=1)
