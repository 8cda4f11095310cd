"""The plan of a training step on a pod: its program and its options. Loads no JAX."""

import dataclasses
import json
import typing
from pathlib import Path
from typing import Annotated

from beartype import BeartypeConf, FrozenDict
from beartype.door import is_bearable
from tyro.conf import arg

from dualpipe_jax.arguments import NUMBERS
from dualpipe_jax.pods.plain import filled
from dualpipe_jax.ranges import AtLeastOne
from dualpipe_jax.step_options import Count, StepOptions, numbers_by_name


@dataclasses.dataclass(frozen=True)
class _ProgramOptions:
    """The options that name the program. A base class, so that help prints them before a step's options."""

    model: Annotated[str, arg(name="program", aliases=["--model"], metavar="NAME")] = "v3"
    """The program: v3, v2, v2-lite, 67b-a2b, small, tiny or byte of this repository, or a function of your
    own that returns a dualpipe_jax.pods.Program, as FILE.py:name or package.module:name."""
    layers_per_stage: Count = None
    """Number of layers with experts in each stage, instead of the model's own number of layers."""
    set: Annotated[tuple[str, ...], arg(metavar="NAME=NUMBER ...")] = ()
    """Numbers of the model that are not its own, such as dim=2048 expert_hidden=512. For a program of your
    own these are its keyword arguments."""


@dataclasses.dataclass(frozen=True)
class Plan(StepOptions, _ProgramOptions):
    """A training step: of one of DeepSeek's models, or of a program of your own."""

    sequence: AtLeastOne = dataclasses.field(default=4096, kw_only=True)
    """Tokens of a sequence."""

    @property
    def changes(self) -> dict[str, int | float]:
        """The numbers of ``set`` by name.

        Raises:
          ValueError: an entry is not NAME=NUMBER.
        """
        return numbers_by_name(self.set)

    def check_each(self) -> None:
        """Check each option by itself, ``set`` too. Raises ValueError."""
        super().check_each()
        _ = self.changes

    @property
    def step(self) -> StepOptions:
        """The options alone, without the program."""
        return StepOptions(
            **{field.name: getattr(self, field.name) for field in dataclasses.fields(StepOptions)}
        )


def read_plan(file: Path) -> Plan:
    """Read the plan that a file of `dualpipe plan` holds.

    Raises:
      ValueError: the file cannot be read, holds no plan, or has options that this version does not know, or values
        that an option cannot have.
    """
    where = f"--plan {file}"
    try:
        found = json.loads(file.read_text())
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise ValueError(f"{where}: cannot read it: {getattr(error, 'strerror', None) or error}") from None
    if not isinstance(found, dict) or not isinstance(found.get("plan"), dict):
        raise ValueError(f"{where}: holds no plan; `dualpipe plan -o {file.name}` writes one")
    unknown = found["plan"].keys() - {field.name for field in dataclasses.fields(Plan)}
    if unknown:
        raise ValueError(f"{where}: a plan has no {', '.join(sorted(unknown))}; it is of another version")
    try:
        plan = filled(Plan, found["plan"])
    except TypeError as error:
        raise ValueError(f"{where}: holds no plan: {error}") from None
    numbers = BeartypeConf(hint_overrides=FrozenDict(NUMBERS), is_random=False)
    for name, kind in typing.get_type_hints(Plan).items():
        if not is_bearable(getattr(plan, name), kind, conf=numbers):
            raise ValueError(
                f"{where}: {name} is {getattr(plan, name)!r}, which --{name.replace('_', '-')} cannot be"
            )
    return plan
