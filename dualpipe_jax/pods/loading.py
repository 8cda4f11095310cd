"""Find programs by name: registered ones, such as the trainer's, and those in users' files and modules."""

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
"""The group of entry points that register programs. Each is a module with ``named(NAME)``, which returns the maker of
a plain name, and ``study``, which answers requests about a step of serving."""

Maker = Callable[..., Program]
"""``maker(setting, **changes) -> Program``."""


def make(name: str, setting: Setting, changes: dict[str, Any]) -> Program:
    """Make the program of a name, in a setting.

    Raises:
      ValueError: there is no such maker, it does not take these changes, or it does not return a ``Program``.
      Whatever the maker raises.
    """
    maker = find(name)
    try:
        program = maker(setting, **changes)
    except TypeError as error:
        # Only if the maker was never entered: a TypeError inside it reaches its author unchanged.
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
    """The maker of a name: FILE.py:function, package.module:function, or a registered one for a plain name.

    Raises:
      ValueError: there is none; the message lists what the module has.
    """
    where, colon, function = name.rpartition(":")
    if not colon:
        return registered(
            f"--program {name}: a name without a module is a model of the trainer, which is"
        ).named(name)
    if not where or not function:
        raise ValueError(f"--program {name}: wants FILE.py:name or package.module:name")
    module = _load_file(name, Path(where)) if where.endswith(".py") else _load_module(name, where)
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
    """Load the installed module that is registered for ``GROUP``.

    Args:
      what: what is asked for, the words with which an error message begins.

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


def _load_file(name: str, path: Path) -> ModuleType:
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


def _load_module(name: str, where: str) -> ModuleType:
    try:
        return importlib.import_module(where)
    except ModuleNotFoundError as error:
        if error.name is not None and not f"{where}.".startswith(f"{error.name}."):
            raise  # the module exists, and imports another that does not
        raise ValueError(
            f"--program {name}: there is no module {where} on Python's path or in this folder; a file is "
            "named FILE.py:name"
        ) from None
