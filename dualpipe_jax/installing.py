"""The command that installs a missing package in the user's environment; imports the standard library alone."""

import importlib.metadata
import importlib.util
import re
import shlex
import shutil
import sys
from pathlib import Path

_NAME = "dualpipe-jax"
_ROOT = Path(__file__).resolve().parent.parent


def install_command(*packages: str, extra: str | None = None) -> str:
    """A shell command that installs packages for the Python that runs this.

    With an ``extra`` it installs all packages of that extra: in a checkout as ``-e CHECKOUT[EXTRA]``, since
    this package is on no registry; elsewhere the packages that the installed package's metadata lists for it,
    or ``packages`` if it lists none.
    """
    wanted: list[str] = [*packages]
    if extra is not None and _is_checkout():
        wanted = ["-e", f"{_ROOT}[{extra}]"]
    elif extra is not None:
        wanted = _required(extra) or wanted
    pip = [sys.executable, "-m", "pip", "install"]
    if importlib.util.find_spec("pip") is None and shutil.which("uv"):  # environments made by uv have no pip
        pip = ["uv", "pip", "install", "--python", sys.executable]
    return shlex.join([*pip, *wanted])


def _is_checkout() -> bool:
    project = _ROOT / "pyproject.toml"
    return project.is_file() and f'name = "{_NAME}"' in project.read_text()


def _required(extra: str) -> list[str]:
    """The packages that the installed package's metadata requires for an extra."""
    try:
        known = importlib.metadata.requires(_NAME) or []
    except importlib.metadata.PackageNotFoundError:
        return []
    return [
        match[1]
        for line in known
        if (match := re.fullmatch(rf'([^;]+?) *; *extra == ["\']{extra}["\']', line))
    ]
