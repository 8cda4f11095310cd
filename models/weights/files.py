"""Tensors in a folder of safetensors files: found by name, read one at a time, never mapped into memory.

Nothing in a folder is executed: files that need Python's unpickling (``pytorch_model.bin``) are not read.
"""

import json
import math
import os
from collections.abc import Iterable, Iterator
from operator import index
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

DTYPES: dict[str, Any] = {
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
}
"""The NumPy type of each type of tensor that is read, by its name in safetensors files."""
SCALE_SUFFIX = "_scale_inv"
"""The suffix that makes the name of a quantised tensor's scales from the tensor's name."""


class StoredTensor(NamedTuple):
    """The place of a tensor: its file, the position of its first byte there, its dtype and shape."""

    file: Path
    start: int
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * np.dtype(DTYPES[self.dtype]).itemsize


class Folder:
    """The tensors of a checkpoint, and what is wrong with its files.

    Attributes:
      tensors: every whole tensor by name.
      complaints: texts about files that are missing or damaged, and tensors that are cut off or occur twice.
    """

    def __init__(self, path: Path):
        self.path = path
        self.tensors: dict[str, StoredTensor] = {}
        self.complaints: list[str] = []
        files = sorted(path.glob("*.safetensors"))
        if not files:
            others = ", ".join(sorted(p.name for p in path.glob("*.bin")))
            there = f" (there is {others}, which is not read)" if others else ""
            self.complaints.append(f"no *.safetensors file{there}")
        for file in files:
            self._add(file)
        self._check_index({file.name for file in files})

    def _add(self, file: Path) -> None:
        try:
            header, data = read_header(file)
        except (OSError, ValueError, RecursionError) as error:
            self.complaints.append(f"{file.name}: {error}")
            return
        size = file.stat().st_size
        for name, about in header.items():
            if name == "__metadata__":
                continue
            try:
                start, end = (data + index(offset) for offset in about["data_offsets"])
                stored = StoredTensor(file, start, str(about["dtype"]), tuple(map(index, about["shape"])))
            except (KeyError, TypeError, ValueError):
                self.complaints.append(f"{name}: {file.name} describes it as {about!r}")
                continue
            if name in self.tensors:
                self.complaints.append(f"{name}: both in {self.tensors[name].file.name} and {file.name}")
            elif stored.dtype not in DTYPES:
                self.complaints.append(f"{name}: type {stored.dtype}, must be one of {', '.join(DTYPES)}")
            elif end - stored.start != stored.nbytes:
                self.complaints.append(
                    f"{name}: {end - stored.start} bytes, {stored.dtype} {list(stored.shape)} takes {stored.nbytes}"
                )
            elif not data <= stored.start <= end <= size:
                self.complaints.append(f"{name}: cut off, it ends at byte {end} of the {size} in {file.name}")
            else:
                self.tensors[name] = stored
                continue
            self.tensors.pop(name, None)

    def _check_index(self, there: set[str]) -> None:
        index = self.path / "model.safetensors.index.json"
        if not index.exists():
            return
        try:
            wanted = set(json.loads(index.read_text())["weight_map"].values())
        except (ValueError, RecursionError, KeyError, AttributeError, TypeError) as error:
            self.complaints.append(f"{index.name}: {error!r}")
            return
        self.complaints += [f"{name}: missing, {index.name} names it" for name in sorted(wanted - there)]

    def named_in_complaints(self, name: str) -> bool:
        """Return whether a complaint names the tensor, so that it need not be called missing, too."""
        return any(complaint.startswith(f"{name}: ") for complaint in self.complaints)


def read_header(file: Path) -> tuple[dict[str, Any], int]:
    """Return a safetensors file's table of tensors and the position of their first byte.

    Raises:
      ValueError: the file is cut off, or not in this format.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > size - 8:
            raise ValueError(f"cut off or no safetensors: {size} bytes, its header alone would take {length}")
        header = json.loads(stream.read(length))
    if not isinstance(header, dict):
        raise ValueError("its header is no table of tensors")
    return header, 8 + length


class Reader:
    """Reads tensors as float32, a few rows at a time; keeps a file descriptor for each file, and counts bytes.

    Use as a context manager: it closes the files.
    """

    def __init__(self, tensors: dict[str, StoredTensor], fp8_block: tuple[int, int] | None = None):
        self.tensors = tensors
        self.fp8_block = fp8_block
        self.num_bytes = 0
        self._descriptors: dict[Path, int] = {}

    def __enter__(self) -> "Reader":
        return self

    def __exit__(self, *_: object) -> None:
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])

    def read_into(self, out: np.ndarray, name: str, order: np.ndarray | None = None) -> None:
        """Write a tensor to ``out``, float32 of its shape, with its rows in the order ``order`` if that is given.

        A quantised tensor is multiplied by its blocks' scales; the last block of a row or column may be partial.
        """
        raw = self._raw(self.tensors[name])
        scales = self._raw(self.tensors[name + SCALE_SUFFIX]) if name + SCALE_SUFFIX in self.tensors else None
        rows = np.arange(len(raw)) if order is None else order
        for start in range(0, len(raw), ROWS_AT_ONCE):
            some = slice(start, start + ROWS_AT_ONCE)
            wide = to_float32(raw[some] if order is None else raw[rows[some]])
            if scales is not None:
                assert self.fp8_block is not None, "complaints_about has let it pass"
                of_row, of_column = self.fp8_block
                factors = np.repeat(to_float32(scales[rows[some] // of_row]), of_column, axis=1)
                wide *= factors[:, : wide.shape[1]]
            out[some] = wide

    def _raw(self, stored: StoredTensor) -> np.ndarray:
        if stored.file not in self._descriptors:
            self._descriptors[stored.file] = os.open(stored.file, os.O_RDONLY)
        raw = np.empty(stored.nbytes, np.uint8)
        view, done = raw.data, 0
        while done < len(raw):  # one read gives at most 2 GiB
            got = os.preadv(self._descriptors[stored.file], [view[done:]], stored.start + done)
            if got == 0:
                raise OSError(f"{stored.file}: ended while it was read")
            done += got
        self.num_bytes += len(raw)
        return raw.view(DTYPES[stored.dtype]).reshape(stored.shape)


ROWS_AT_ONCE = 64
"""The number of rows that are converted at a time, so that even transposed they are written from a cache."""


def to_float32(raw: np.ndarray) -> np.ndarray:
    """Convert an array of any of ``DTYPES`` to a new array of float32, exactly."""
    if raw.dtype == ml_dtypes.bfloat16:
        # The bits of bfloat16 are the upper half of a float32: this is twice as fast as the conversion.
        wide = np.ascontiguousarray(raw).view(np.uint16).astype(np.uint32)
        wide <<= 16
        return wide.view(np.float32)
    return raw.astype(np.float32)


def from_float32(wide: np.ndarray, dtype: str) -> np.ndarray:
    """Convert float32 to "float32" or, rounded to nearest even, to "bfloat16"; the result is contiguous."""
    return np.ascontiguousarray(wide, np.float32 if dtype == "float32" else ml_dtypes.bfloat16)


def complaints_about(
    folder: Folder,
    wanted: Iterable[tuple[str, tuple[int, ...]]],
    ignored: Iterable[str],
    fp8_block: tuple[int, int] | None,
) -> Iterator[str]:
    """Compare a folder's tensors with a model's names and shapes; yield a text for each missing, wrong or extra one."""
    yield from folder.complaints
    known = set(ignored)
    for name, shape in wanted:
        known |= {name, name + SCALE_SUFFIX}
        stored = folder.tensors.get(name)
        if stored is None:
            if not folder.named_in_complaints(name):
                yield f"{name}: missing, must be {list(shape)}"
            continue
        if stored.shape != shape:
            yield f"{name}: {list(stored.shape)}, must be {list(shape)}"
        yield from _complaints_about_scales(folder, name, stored, fp8_block)
    for name in folder.tensors:
        if not {name, name.removesuffix(SCALE_SUFFIX)} & known and not name.endswith("rotary_emb.inv_freq"):
            yield f"{name}: the model has no such tensor"


def _complaints_about_scales(
    folder: Folder, name: str, stored: StoredTensor, block: tuple[int, int] | None
) -> Iterator[str]:
    scales = folder.tensors.get(name + SCALE_SUFFIX)
    quantised = stored.dtype == "F8_E4M3"
    if quantised and block is None:
        yield f"{name}: FP8, but config.json has no quantization_config"
    elif quantised and scales is None:
        yield f"{name}{SCALE_SUFFIX}: missing, the scales of an FP8 tensor"
    elif quantised and block is not None and scales is not None:
        wanted = tuple(-(-n // b) for n, b in zip(stored.shape, block, strict=False))
        if scales.shape != wanted:
            yield f"{name}{SCALE_SUFFIX}: {list(scales.shape)}, must be {list(wanted)} for blocks of {list(block)}"
    elif scales is not None:
        yield f"{name}{SCALE_SUFFIX}: scales of a tensor that is not FP8"
