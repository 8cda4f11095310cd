"""The command line: options from a preset, a plan, a file and flags; each of these overrides those before it."""

import argparse
import dataclasses
import difflib
import json
import os
import sys
import tomllib
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import tyro

from dualpipe_jax.command.line import read
from dualpipe_jax.pods.plan import read_plan
from train.config import FLAGS, ConfigError, TrainConfig, configure, option, replaced

DESCRIPTION = """Train a DeepSeek-V3-like mixture-of-experts model, pipelined over pp ranks, experts over ep.

Without options: DualPipe, pp 4 x ep 2 on 8 virtual CPU devices, on the source text of Python's standard library,
byte by byte. Everything about the run is left in runs/NAME, its options in config.json, which --config takes."""

PRESETS: Mapping[str, Mapping[str, Any]] = {
    # Runs everything within a minute on two cores.
    "quick": {
        "model": {"name": "tiny", "layers": 2},
        "step": {"pp": 2, "ep": 1, "microbatches": 4, "microbatch_size": 2, "sequence": 32},
        "data": {"eval_sequences": 16},
        "optimizer": {"steps": 20, "warmup": 2},
    },
    # Twenty million parameters, hours on a laptop.
    "small": {
        "model": {"name": "small"},
        "step": {"microbatches": 16, "microbatch_size": 8, "sequence": 256},
        "optimizer": {"steps": 5000, "warmup": 200},
    },
}
"""Name for --preset -> sections of options, in the form of a file; the rest are the defaults of ``TrainConfig``."""


@dataclasses.dataclass(frozen=True)
class Command(TrainConfig):
    """The command line as read: the options of a run, where they come from, and what to do instead of training."""

    COMMON: ClassVar = (
        "data", "model", "schedule", "pp", "ep", "microbatches", "microbatch-size", "sequence", "steps", "devices",
        "name", "resume", "preset", "config",
    )  # fmt: skip

    preset: Annotated[str | None, tyro.conf.arg(metavar="{" + ",".join(PRESETS) + "}")] = None
    """Options to start from, by name."""
    config: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """File with options (.toml, .yaml or .json) in the sections model, step, experts, data, optimizer,
    checkpoint, log and launch. A run's config.json is one. Flags win over it, and it wins over the preset."""
    plan: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """File that `dualpipe plan` wrote: the model and the options of its step. --config and flags win over it."""
    resume: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Go on with the run of this --name, or with the newest, from its latest checkpoint that is whole. The
    run keeps its options, but those given here win. A run that has saved nothing yet begins again."""
    check: Annotated[Path | None, tyro.conf.arg(metavar="RUN")] = None
    """Train nothing, but read every checkpoint of a run's folder and say which are whole."""

    compare: Annotated[tuple[Path, ...], tyro.conf.arg(metavar="RUN ...")] = ()
    """Train nothing, but lay the curves of finished runs side by side and say whether they are bitwise equal.
    The exit code is 0 if they are, else 1."""
    report: Annotated[Path | None, tyro.conf.arg(metavar="RUN")] = None
    """Train nothing, but write a run's report.html again from the files in its folder."""

    @property
    def options(self) -> TrainConfig:
        return TrainConfig(**_values(self))


def parse(arguments: Sequence[str] | None = None) -> Command:
    """Read the command line (``sys.argv`` if None). Exits with code 2 where it cannot be read.

    Flags may also be written with their section: ``--step.pp 4`` is ``--pp 4``.

    Raises:
      ConfigError: there is no such preset, or a file cannot be read or holds an unknown option.
    """
    written = [_without_section(argument) for argument in (sys.argv[1:] if arguments is None else arguments)]
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    first.add_argument("--preset")
    first.add_argument("--config")
    first.add_argument("--plan", type=Path)
    first.add_argument("--name")
    first.add_argument("--runs", type=Path, default=TrainConfig().runs)
    first.add_argument("--resume", action="store_true")
    try:
        sources, _ = first.parse_known_args(written)
    # A flag without its value: tyro reports it below.
    except argparse.ArgumentError:
        sources = first.parse_args([])
    options = resumed(sources.name, sources.runs) if sources.resume else TrainConfig()
    if sources.preset is not None:
        options = apply(options, find_preset(sources.preset), f"--preset {sources.preset}")
    if sources.plan is not None:
        options = apply(options, from_plan(sources.plan), f"--plan {sources.plan}")
    if sources.config is not None:
        where = f"--config {sources.config}"
        options = apply(options, read_file(Path(sources.config), where), where)
    default = Command(**_values(options))
    return read(Command, "scripts/train", written, default, DESCRIPTION, paired=True)


_START_OPTIONS = (
    "--coordinator", "--coordinator-bind", "--num-processes", "--process-id", "--restarts", "--shrink", "--patience",
    "--straggler-every", "--export",
)  # fmt: skip
"""Options that hold for one process or for one start of a run only, so that a resumed run does not keep them."""


def resumed(name: str | None, runs: Path) -> TrainConfig:
    """The options that a run had, from its folder; the defaults if it has not begun.

    Raises:
      ConfigError: no name is given and there is no run.
    """
    if name is None:
        found = sorted(runs.glob("*/config.json"), key=lambda file: file.stat().st_mtime)
        if not found:
            raise ConfigError(
                f"--resume: there is no run in {runs}; --runs says where to look, --name for which"
            )
        name = found[-1].parent.name
    file, options = runs / name / "config.json", TrainConfig()
    # False, not an error, also for a folder that may not be read; a later error names that folder.
    if os.path.exists(file):
        where = f"--resume: {file}"
        options = apply(options, read_file(file, where), where)
    return configure(without_start_options(options), name=name, runs=runs)


def without_start_options(options: TrainConfig) -> TrainConfig:
    """The options, with those of one start reset to their defaults.

    With the --process-id of an earlier start, for example, a process would wait for the others forever.
    """
    for flag in _START_OPTIONS:
        options = replaced(options, FLAGS[flag], option(TrainConfig(), flag))
    return options


def find_preset(name: str) -> Mapping[str, Any]:
    """A preset's options. Raises ConfigError where there is none of that name."""
    if name not in PRESETS:
        raise ConfigError(f"--preset {name}: {_suggestion(name, PRESETS)}there are {', '.join(PRESETS)}")
    return PRESETS[name]


def from_plan(file: Path) -> Mapping[str, Any]:
    """A plan's options, in sections. Raises ConfigError if the file cannot be read, or plans another program or
    ``layers-per-stage``."""
    try:
        plan = read_plan(file)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if ":" in plan.model:
        raise ConfigError(f"--plan {file}: --program {plan.model}: this trains the published models only")
    if plan.layers_per_stage is not None:
        raise ConfigError(
            f"--plan {file}: layers-per-stage {plan.layers_per_stage}: say how many layers there are by --layers, and "
            "where they stand by --stage-layers; or plan without it"
        )
    counts = {"microbatches": plan.num_microbatches, "microbatch_size": plan.batch}
    return {
        "model": {"name": plan.model, "numbers": plan.set},
        "step": dataclasses.asdict(plan.step) | counts,
    }


def read_file(path: Path, where: str) -> Mapping[str, Any]:
    """A file's options, not checked yet. Raises ConfigError, which begins with ``where``, if it cannot be read."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where}: cannot read it: {getattr(error, 'strerror', None) or error}") from None
    loads: Callable[[str], Any]
    wrong: type[Exception] = ValueError
    match path.suffix:
        case ".toml":
            loads = tomllib.loads
        case ".json":
            loads = json.loads
        case ".yaml" | ".yml":
            # Imported only for a YAML file.
            import yaml

            loads, wrong = yaml.safe_load, yaml.YAMLError
        case _:
            raise ConfigError(f"{where}: must end in .toml, .yaml or .json")
    try:
        found = loads(text)
    except (ValueError, RecursionError, wrong) as error:
        raise ConfigError(f"{where}: {' '.join(str(error).split())}") from None
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise ConfigError(f"{where}: must hold sections of options, holds {type(found).__name__}")
    return found


def apply(base: TrainConfig, given: Mapping[str, Any], where: str) -> TrainConfig:
    """``base`` with the options of a file. Names and types are checked; error messages begin with ``where``.

    Raises:
      ConfigError: there is no option of a given name, or it has another type.
    """

    def visit(config: Any, kind: Any, given: Mapping[str, Any], path: tuple[str, ...]) -> Any:
        hints = typing.get_type_hints(kind)
        for name, value in given.items():
            dotted = ".".join((*path, str(name)))
            if name not in hints:
                raise ConfigError(
                    f"{where}: no option {dotted}; {_suggestion(str(name), hints)}there are {', '.join(hints)}"
                )
            if dataclasses.is_dataclass(hints[name]):
                if not isinstance(value, Mapping):
                    raise ConfigError(f"{where}: {dotted} is a section, got {value!r}")
                value = visit(getattr(config, name), hints[name], value, (*path, name))
            else:
                value = _convert(hints[name], value, f"{where}: {dotted}")
            config = replaced(config, (name,), value)
        return config

    return visit(base, TrainConfig, given, ())


def options_as_dict(config: TrainConfig) -> dict[str, Any]:
    """All options in the form of a file, which ``apply`` reads back."""

    def value(node: Any) -> Any:
        if isinstance(node, dict):
            return {name: value(part) for name, part in node.items()}
        if isinstance(node, tuple):
            return [value(part) for part in node]
        return str(node) if isinstance(node, Path) else node

    return value(dataclasses.asdict(config))


def _values(config: TrainConfig) -> dict[str, Any]:
    return {field.name: getattr(config, field.name) for field in dataclasses.fields(TrainConfig)}


def _without_section(argument: str) -> str:
    flag, equals, value = argument.partition("=")
    return _DOTTED.get(flag.replace("_", "-"), flag) + equals + value


_DOTTED = {f"--{'.'.join(path)}".replace("_", "-"): flag for flag, path in FLAGS.items()}
"""Flag with its section -> flag, such as "--step.pp" -> "--pp"."""


def _convert(kind: Any, value: Any, where: str) -> Any:
    """A file's value converted to an option's type; files hold paths as strings and tuples as lists."""
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        if value is None:
            return None
        (kind,) = (part for part in parts if part is not type(None))
        return _convert(kind, value, where)
    if origin is Literal:
        if value in parts:
            return value
        raise ConfigError(f"{where} is {value!r}, must be one of {', '.join(map(str, parts))}")
    if origin is tuple and isinstance(value, list | tuple):
        return tuple(_convert(parts[0], part, where) for part in value)
    if kind is Path and isinstance(value, str):
        return Path(value)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if kind in (int, float, str, bool) and type(value) is kind:
        return value
    needed = f"a list of {parts[0].__name__}" if origin is tuple else getattr(kind, "__name__", str(kind))
    raise ConfigError(f"{where} is {value!r}, must be {needed.lower()}")


def _suggestion(name: str, names: Any) -> str:
    near = difflib.get_close_matches(name, names, n=1)
    return f"did you mean {near[0]}? " if near else ""
