"""Texts that are given: files, and standard input."""

import sys
from pathlib import Path

from dualpipe_jax.command.options import CommandError


def read_text(name: str) -> str:
    """What a file holds, without a byte order mark.

    Raises:
      CommandError: nothing, or no text.
    """
    try:
        data = sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise CommandError(f"{name}: not a text; give a grid, JSON or PyTorch's CSV") from None
    text = data.removeprefix("\ufeff")
    if not text.strip():
        raise CommandError(f"{name}: empty; give a grid, JSON or PyTorch's CSV")
    return text
