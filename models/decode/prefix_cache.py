"""Blocks of latents kept on disk, so that another engine, or another process, need not compute a beginning again.

A block is a file, named by the model and by the block's key, written whole or not at all; any number of
processes may share a folder. Files are checked when they are read: one that is damaged, cut off or of other
content is ignored.
"""

import contextlib
import dataclasses
import hashlib
import os
import re
import threading
import time
import uuid
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np
from jax import Array
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from dualpipe_jax.arguments import typechecked
from dualpipe_jax.functional import Tree
from models.config import Config
from models.lazy import on_host

FORMAT = "latents of a block, 1"
DELETABLE = re.compile(r"[0-9a-f]{32}/[0-9a-f]{64}\.safetensors(\.[0-9a-f]{32}\.part)?")
"""The names of files that may be deleted to make room."""

ABANDONED_SECONDS = 3600.0
"""The seconds after which an unfinished file counts as abandoned, and may be deleted."""


@typechecked
@dataclasses.dataclass(frozen=True)
class PrefixFolder:
    """A folder in which blocks are kept.

    Attributes:
      path: the path of the folder, which is created if it is missing; several models may share it.
      max_bytes: the most bytes of all files in it together, give or take a sixteenth for each process that
        writes; the least recently used files are deleted first.
      warn: a function that is called with a message about a file that cannot be used, or about why no more
        are written.

    Raises:
      ValueError: ``max_bytes`` is not positive.
    """

    path: Path
    max_bytes: int = 10 << 30
    warn: Callable[[str], None] = warnings.warn

    def __post_init__(self) -> None:
        if self.max_bytes < 1:
            raise ValueError(f"PrefixFolder: max_bytes is {self.max_bytes}, must be at least 1")

    def check_room(self, shape: tuple[int, ...], dtype: np.dtype) -> None:
        """Raise a ValueError if there is no room for 16 blocks of latents of this shape and dtype."""
        if 16 * (need := int(np.prod(shape)) * np.dtype(dtype).itemsize) > self.max_bytes:
            raise ValueError(
                f"PrefixFolder: max_bytes is {self.max_bytes}, and a block alone takes {need}; give room for 16"
            )


def model_digest(config: Config, weights: Tree, *inputs: object) -> str:
    """Return a digest of all that latents depend on besides the tokens: config, weights, and the further arguments.

    The weights' leaves are copied to the host one by one.
    """
    digest = hashlib.sha256(repr((FORMAT, config, inputs)).encode())
    for path, leaf in jax.tree_util.tree_leaves_with_path(weights):
        digest.update(f"{jax.tree_util.keystr(path)} {leaf.dtype} {leaf.shape}".encode())
        digest.update(np.ascontiguousarray(on_host(leaf)).view(np.uint8).data)
    return digest.hexdigest()[:32]


class DiskBlocks:
    """The blocks of one model (see ``model_digest``) in a folder. Reads are synchronous; a thread of its own writes."""

    MAX_PENDING = 256
    """The largest number of blocks that wait to be written; further ones are not kept."""

    def __init__(self, folder: PrefixFolder, model: str, shape: tuple[int, ...], dtype: np.dtype):
        self._folder, self._model, self._shape, self._dtype = folder, model, shape, np.dtype(dtype)
        self._pending: set[bytes] = set()
        self._unusable: set[bytes] = set()  # keys of unusable files, to be written again
        self._lock = threading.Lock()
        self._writer = ThreadPoolExecutor(1, "kept blocks")
        # Bytes written since the folder was last scanned; so many at the start that the first write scans it.
        self._num_unscanned_bytes = folder.max_bytes
        self._has_warned = False

    def should_write(self, key: bytes) -> bool:
        """Whether to write a block: it is not kept yet, and not too many are waiting."""
        with self._lock:
            if key in self._pending or len(self._pending) >= self.MAX_PENDING:
                return False
            # A Path's exists() raises where this says False: in a folder that we have no right to look into.
            return key in self._unusable or not os.path.exists(self._file(key))

    def write(self, key: bytes, block: Array) -> None:
        with self._lock:
            self._pending.add(key)
        self._writer.submit(self._write, key, block)

    def flush(self) -> None:
        """Wait until everything is written."""
        self._writer.submit(lambda: None).result()

    def read(self, key: bytes) -> np.ndarray | None:
        """Return a block; None if it is not there, or cannot be used."""
        file = self._file(key)
        try:
            with safe_open(file, "numpy") as opened:
                metadata, data = opened.metadata(), opened.get_tensor("latents")
            problem = self._find_error(key, metadata or {}, data)
        except FileNotFoundError:
            return None
        except (OSError, SafetensorError) as error:
            problem = str(error)
        if problem:
            self._folder.warn(f"{file} is left aside: {problem}")
            with self._lock:
                self._unusable.add(key)
            return None
        with contextlib.suppress(OSError):  # the file was deleted meanwhile, or the folder is read-only
            os.utime(file)
        return data.view(self._dtype).reshape(self._shape)

    def _find_error(self, key: bytes, metadata: dict[str, str], data: np.ndarray) -> str | None:
        expected = self._metadata(key)
        differing = [name for name in expected if metadata.get(name) != expected[name]]
        if differing:
            return f"its {', '.join(differing)} is another's; was it renamed?"
        if data.dtype != np.uint8 or data.nbytes != np.prod(self._shape) * self._dtype.itemsize:
            return f"it holds {data.shape} of {data.dtype}, not {self._shape} of {self._dtype}"
        if metadata.get("sha256") != hashlib.sha256(data.data).hexdigest():
            return "it is damaged: its checksum is another"
        return None

    def _metadata(self, key: bytes) -> dict[str, str]:
        return {
            "format": FORMAT,
            "model": self._model,
            "key": key.hex(),
            "dtype": str(self._dtype),
            "shape": str(self._shape),
        }

    def _file(self, key: bytes) -> Path:
        return self._folder.path / self._model / f"{key.hex()}.safetensors"

    # In the writer's thread.

    def _write(self, key: bytes, block: Array) -> None:
        file = self._file(key)
        part = file.with_name(f"{file.name}.{uuid.uuid4().hex}.part")
        try:
            data = np.ascontiguousarray(np.asarray(block)).reshape(-1).view(np.uint8)
            metadata = self._metadata(key) | {"sha256": hashlib.sha256(data.data).hexdigest()}
            content = save({"latents": data}, metadata)
            self._delete_oldest(len(content))
            file.parent.mkdir(parents=True, exist_ok=True)
            part.write_bytes(content)
            part.replace(file)
        except OSError as error:
            if not self._has_warned:
                self._folder.warn(f"{self._folder.path}: blocks are not kept: {error}")
            self._has_warned = True
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)
        finally:
            with self._lock:
                self._pending.discard(key)
                self._unusable.discard(key)

    def _delete_oldest(self, size: int) -> None:
        self._num_unscanned_bytes += size
        if self._num_unscanned_bytes <= self._folder.max_bytes // 16:
            return
        self._num_unscanned_bytes = size
        files = []
        for path in self._folder.path.glob("*/*"):
            if not DELETABLE.fullmatch("/".join(path.parts[-2:])):
                continue
            with contextlib.suppress(FileNotFoundError):  # others make room too
                status = path.stat()
                if path.suffix != ".part":
                    files.append((status.st_mtime, status.st_size, path))
                elif status.st_mtime + ABANDONED_SECONDS < time.time():
                    path.unlink()
        total = size + sum(num_bytes for _, num_bytes, _ in files)
        for _, num_bytes, path in sorted(files):
            if total <= self._folder.max_bytes // 16 * 15:
                return
            path.unlink(missing_ok=True)
            total -= num_bytes
