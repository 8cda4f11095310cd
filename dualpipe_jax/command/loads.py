"""Read loads of experts from a file: arrays, JSON, or the counts of a training run."""

import json
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from dualpipe_jax.command.options import CommandError

_NAMES = "loads", "load", "weight", "counts"
"""Names by which the array is found in a file that has several, in this order."""

_FORMS = "[layers, experts] or [windows, layers, experts]"


def read_loads(path: Path) -> np.ndarray:
    """Loads in a .npz, .npy or .json, a run's metrics.jsonl or folder: [layers, experts] or [windows, layers, experts].

    In metrics.jsonl every step with a "load" is a window.

    Raises:
      CommandError: there are none, or they are not numbers with two or three dimensions; says what was found.
    """
    if path.is_dir():
        path = path / "metrics.jsonl"
    ending = path.suffix.lower()
    if ending in (".npz", ".npy"):
        return _numbers(path, _array(path))
    text = path.read_text(encoding="utf-8", errors="replace")
    if ending == ".jsonl":
        return _metrics(path, text)
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CommandError(
            f"{path}: not JSON: {error}; give .npz, .npy, .json, or a run's metrics.jsonl"
        ) from None
    if isinstance(found, dict):
        name = next((name for name in _NAMES if name in found), None)
        if name is None:
            raise CommandError(
                f"{path}: has none of {', '.join(_NAMES)}; give numbers {_FORMS} under one of these"
            )
        found = found[name]
    return _numbers(path, found)


def _array(path: Path) -> np.ndarray:
    try:
        with path.open("rb") as file:
            loaded = np.load(file, allow_pickle=False)
            if isinstance(loaded, np.ndarray):
                return loaded
            name = next((name for name in _NAMES if name in loaded.files), None)
            if name is None and len(loaded.files) == 1:
                name = loaded.files[0]
            if name is not None:
                return loaded[name]
    except (ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise CommandError(f"{path}: no arrays of NumPy: {error}") from None
    raise CommandError(
        f"{path}: has arrays {', '.join(loaded.files) or '(none)'}; name the one with loads {_NAMES[0]!r}"
    )


def _metrics(path: Path, text: str) -> np.ndarray:
    windows, lines = [], text.split("\n")
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
        except ValueError:
            if number == len(lines):  # empty, or cut short where the run was killed
                break
            raise CommandError(f"{path}: line {number} is damaged; take it out") from None
        if isinstance(record, dict) and record.get("load"):
            windows.append(record["load"])
    if not windows:
        raise CommandError(
            f"{path}: no step has a load; a model with experts writes it every `scripts/train --load-every` steps"
        )
    return _numbers(path, windows)


def _numbers(path: Path, found: Any) -> np.ndarray:
    try:
        numbers = np.array(found)
    except ValueError:
        numbers = np.empty(0, object)
    if numbers.ndim not in (2, 3) or numbers.dtype.kind not in "iuf":
        raise CommandError(f"{path}: {numbers.dtype} {list(numbers.shape)}; loads are numbers {_FORMS}")
    return numbers
