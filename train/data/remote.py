"""Prepared folders elsewhere: fetched once, then read as files."""

import hashlib
import os
from pathlib import Path
from typing import Any

from dualpipe_jax.installing import install_command
from train.data.errors import DataError
from train.data.manifest import MANIFEST, loads


def is_url(path: str | Path) -> bool:
    """Whether it is a place that fsspec knows by a protocol, like ``s3://bucket/folder``."""
    return "://" in str(path)


def cache_folder() -> Path:
    """Where fetched data lies: ``$XDG_CACHE_HOME/dualpipe-jax``, by default in ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dualpipe-jax"


def open_filesystem(url: str) -> tuple[Any, str]:
    """The fsspec filesystem of a URL or path, and the path in it. Raises DataError without fsspec or its plug-in."""
    try:
        import fsspec
    except ModuleNotFoundError:
        raise DataError(f"{url}: needs fsspec: {install_command('fsspec')}") from None
    try:
        return fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise DataError(f"{url}: {error}") from None


def fetch(url: str | Path) -> Path:
    """A local copy of a prepared folder; files of the right length that are there already stay.

    The copy is one for each content of the manifest.

    Raises:
      DataError: it cannot be read, or is not a prepared folder.
    """
    filesystem, path = open_filesystem(str(url))
    try:
        text = filesystem.cat_file(f"{path}/{MANIFEST}")
    except OSError as error:
        raise DataError(f"--data {url}: cannot read {MANIFEST}: {error}") from None
    manifest = loads(text, f"{url}/{MANIFEST}")
    folder = cache_folder() / hashlib.sha256(text).hexdigest()[:24]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        for name in manifest.files:
            if not (folder / name).exists():
                part = folder / f".{name}.{os.getpid()}"
                filesystem.get_file(f"{path}/{name}", str(part))
                part.replace(folder / name)
    except OSError as error:
        raise DataError(f"--data {url}: cannot fetch {name}: {error}") from None
    (folder / MANIFEST).write_bytes(text)
    return folder
