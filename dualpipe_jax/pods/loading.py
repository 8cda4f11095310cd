"""Programs by name: those that are registered, as the trainer's are, and those in files and modules of users."""

import difflib
import importlib
import importlib.metadata
import importlib.util
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from dualpipe_jax.pods.program import Program, Setting

GROUP = "dualpipe_jax.programs"
"""Entry points of this group are modules with ``named(NAME)``, the maker of a plain name, and ``study``, which
answers what is asked of a step of serving."""

Maker = Callable[..., Program]
"""``maker(setting, **changes) -> Program``."""


def make(name: str, setting: Setting, changes: dict[str, Any]) -> Program:
    """The program of a name, in a setting.

    Raises:
      ValueError: there is none, it does not take these changes, or makes something else.
      Whatever the maker raises.
    """
    maker = find(name)
    try:
        program = maker(setting, **changes)
    except TypeError as error:
        # Only where it was never entered: a mistake inside is its author's to see.
        if error.__traceback__ is not None and error.__traceback__.tb_next is None:
            raise ValueError(
                f"--program {name}: {error}; it is called with a setting and --set's numbers"
            ) from None
        raise
    if not isinstance(program, Program):
        raise ValueError(
            f"--program {name}: returns {type(program).__name__}; it must be a function of a "
            "dualpipe_jax.pods.Setting that returns a dualpipe_jax.pods.Program"
        )
    return program


def find(name: str) -> Maker:
    """The function of a name: FILE.py:function, package.module:function, or a registered one for a plain name.

    Raises:
      ValueError: there is none; says what is there.
    """
    where, colon, function = name.rpartition(":")
    if not colon:
        return registered(
            f"--program {name}: a name without a module is a model of the trainer, which is"
        ).named(name)
    if not where or not function:
        raise ValueError(f"--program {name}: wants FILE.py:name or package.module:name")
    module = _file(name, Path(where)) if where.endswith(".py") else _module(name, where)
    found = getattr(module, function, None)
    if not callable(found):
        own = [
            n
            for n, v in vars(module).items()
            if callable(v) and getattr(v, "__module__", "") == module.__name__
        ]
        near = difflib.get_close_matches(function, own, n=1)
        meant = f"; did you mean {near[0]}?" if near else f"; it has {', '.join(own) or 'none'}"
        raise ValueError(f"--program {name}: {where} has no function {function}{meant}")
    return found


def registered(what: str) -> ModuleType:
    """The module that is registered for ``GROUP`` and there; ``what`` is asked for, in words that an error begins with.

    Raises:
      ValueError: there is none.
    """
    for point in importlib.metadata.entry_points(group=GROUP):
        if importlib.util.find_spec(point.module.partition(".")[0]) is not None:
            return point.load()
    raise ValueError(
        f"{what} in the repository and not in the installed package; run .venv/bin/dualpipe of a checkout, which "
        "scripts/train --help sets up, or name a program of your own, FILE.py:name or package.module:name"
    )


def _file(name: str, path: Path) -> ModuleType:
    if not path.is_file():
        raise ValueError(f"--program {name}: there is no file {path}")
    called = "program_in_" + re.sub(r"\W", "_", path.stem)
    spec = importlib.util.spec_from_file_location(called, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[called] = module  # dataclasses look there for their own module
    sys.path.insert(0, str(path.absolute().parent))  # as where the file is run
    spec.loader.exec_module(module)
    return module


def _module(name: str, where: str) -> ModuleType:
    try:
        return importlib.import_module(where)
    except ModuleNotFoundError as error:
        if error.name is not None and not f"{where}.".startswith(f"{error.name}."):
            raise  # it is there, and wants another that is not
        raise ValueError(
            f"--program {name}: there is no module {where} on Python's path or in this folder; a file is "
            "named FILE.py:name"
        ) from None
