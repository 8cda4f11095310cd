"""Access to files and folders behind URLs, by fsspec."""

import os
from pathlib import Path
from typing import Any

from dualpipe_jax.installing import install_command
from train.data.errors import DataError


def is_url(path: str | Path) -> bool:
    """Whether ``path`` is a URL with a protocol for fsspec, like ``s3://bucket/folder``."""
    return "://" in str(path)


def is_local(url: str) -> bool:
    """Whether a path or URL is of a file or folder that this machine's paths name."""
    return not is_url(url) or url.startswith("file://")


def cache_folder() -> Path:
    """The folder for fetched data: ``$XDG_CACHE_HOME/dualpipe-jax``, by default ~/.cache/dualpipe-jax."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dualpipe-jax"


def open_filesystem(url: str) -> tuple[Any, str]:
    """The fsspec filesystem of a URL or path, and the path in it. Raises DataError without fsspec or its plug-in."""
    try:
        import fsspec
    except ModuleNotFoundError:
        raise DataError(f"{url}: needs fsspec: {install_command('fsspec')}") from None
    if is_local(url):
        # Not by url_to_fs, which takes the two colons in the name "std::vector" for those of a chain of URLs.
        local = fsspec.filesystem("file")
        return local, local._strip_protocol(url)
    try:
        return fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise DataError(f"{url}: {error}") from None
