"""The files that hold documents, cut into pieces that can be read at the same time."""

import contextlib
import dataclasses
import functools
import importlib
import json
import lzma
import os
import stat
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from dualpipe_jax.installing import install_command
from train.data.errors import DataError
from train.data.manifest import MANIFEST, SHARD_FILES
from train.data.records import DATASET_INFO, is_records, read_records
from train.data.remote import is_local, is_url, open_filesystem

T = TypeVar("T")

PIECE = 2**26
"""The approximate number of bytes of files in one piece."""

COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
_LINES = (".jsonl", ".ndjson")
_LIBRARY_ERRORS = (
    ("pyarrow", "ArrowException"),
    ("backports.zstd", "ZstdError"),
    ("compression.zstd", "ZstdError"),
    ("aiohttp", "ClientError"),
    # Raised by huggingface_hub, for hf:// URLs.
    ("httpx", "HTTPError"),
    ("httpx2", "HTTPError"),
)
_VERSION_KEYS = ("mtime", "ETag", "etag", "LastModified", "Last-Modified", "updated")
"""The names that file systems use for the time of a file's last change, or for its version."""


@dataclasses.dataclass(frozen=True)
class File:
    """A file of documents.

    Attributes:
      url: the URL of the file.
      kind: text, lines (JSON, one object a line), parquet, or records.
      size: the number of bytes; 0 if the file system does not tell.
      changed: the time of the last change or the version, as the file system writes it; "" if it does not tell.
    """

    url: str
    kind: str
    size: int
    changed: str = ""


@dataclasses.dataclass(frozen=True)
class Piece:
    """A part of one file, or some small files.

    Attributes:
      kind: the kind of the files.
      urls: the URLs of the files; more than one only for text.
      start: the first byte of lines, or the first row group of Parquet.
      stop: the byte or row group before which the piece ends; None for the end of the file.
      size: the approximate number of bytes.
    """

    kind: str
    urls: tuple[str, ...]
    start: int = 0
    stop: int | None = None
    size: int = 0


def find_files(paths: Sequence[str], leave_out: Sequence[str] = ()) -> list[File]:
    """All files that paths, folders, globs and URLs stand for, each once; hidden ones are left out.

    Args:
      paths: the paths, folders, globs and URLs.
      leave_out: folders that are not read.

    Raises:
      DataError: a path is missing, or there is no file.
    """
    found: dict[str, File] = {}
    left_out = tuple(os.path.realpath(folder).rstrip("/") + "/" for folder in leave_out)
    real = functools.cache(os.path.realpath)
    for path in paths:
        if not is_url(path) and is_records(Path(path)):
            found[path] = File(str(Path(path).absolute()), "records", *_size_and_change(Path(path)))
            continue
        filesystem, inside = open_filesystem(path)
        with _readable(path):
            listed = dict(sorted(_list(filesystem, inside), key=lambda pair: pair[0]))
            for name, info in listed.items():
                folder, _, last = name.rpartition("/")
                if not (is_local(path) and f"{real(folder)}/{last}/".startswith(left_out)):
                    if SHARD_FILES.fullmatch(last) and f"{folder}/{MANIFEST}" in listed:
                        raise DataError(
                            f"--data {path}: holds prepared text, whose files are no documents: move {folder}, or "
                            "name what is to be read, each by itself"
                        )
                    url = filesystem.unstrip_protocol(name)
                    changed = next((str(info[key]) for key in _VERSION_KEYS if info.get(key)), "")
                    found[url] = File(url, kind_of(name), int(info["size"] or 0), changed)
    if not found:
        raise DataError(f"--data: nothing to read in {', '.join(paths)}")
    return list(found.values())


def cut_into_pieces(files: Sequence[File], size: int = PIECE) -> list[Piece]:
    """Pieces of about ``size`` bytes: large files are cut if their kind allows it, small texts are grouped."""
    found: list[Piece] = []
    texts: list[File] = []
    for file in files:
        if file.kind == "text":
            texts.append(file)
        elif file.kind == "lines" and not file.url.endswith(COMPRESSED):
            cuts = range(0, max(file.size, 1), size)
            found += [
                Piece(
                    "lines", (file.url,), cut, min(cut + size, file.size) or None, min(size, file.size - cut)
                )
                for cut in cuts
            ]
        elif file.kind == "parquet":
            found += _row_groups(file, size)
        else:
            found.append(Piece(file.kind, (file.url,), size=file.size))
    for some in grouped(texts, lambda file: file.size, size):
        urls = tuple(file.url for file in some)
        found.append(Piece("text", urls, size=sum(file.size for file in some)))
    return found


def grouped(items: Iterable[T], size: Callable[[T], int], enough: int) -> Iterator[list[T]]:
    """The items in order, in groups that each end as soon as their size is ``enough``; the last may be smaller."""
    some, total = list[T](), 0
    for item in items:
        some.append(item)
        total += size(item)
        if total >= enough:
            yield some
            some, total = [], 0
    if some:
        yield some


def _refuse(error: DataError) -> None:
    raise error


def documents(piece: Piece, key: str, on_bad_line: Callable[[DataError], None] = _refuse) -> Iterator[bytes]:
    """The documents of a piece, in order.

    Args:
      piece: the piece to read.
      key: the field or column that holds the text.
      on_bad_line: called with the error of a line of JSON that cannot be used. The line is left out, unless it raises
        the error, as it does by default.

    Raises:
      DataError: a file cannot be read or is not what its name says, or has no such field.
    """
    with _readable(piece.urls[0]):
        match piece.kind:
            case "text":
                for url in piece.urls:
                    with _readable(url), _open(url) as file:
                        yield file.read()
            case "lines":
                yield from _lines(piece, key, on_bad_line)
            case "parquet":
                yield from _rows(piece, key)
            case "records":
                records = read_records(Path(piece.urls[0]), key)
                yield from (records[number] for number in range(len(records)))


@contextlib.contextmanager
def _readable(place: str) -> Iterator[None]:
    """Turn any error that means that a place cannot be read into a DataError that names the place."""
    try:
        yield
    except DataError:
        raise
    except _read_errors() as error:
        why = getattr(error, "strerror", None) or error.__cause__ or error
        raise DataError(f"--data: cannot read {place}: {' '.join(str(why).split())}") from None


def _read_errors() -> tuple[type[Exception], ...]:
    """The errors for a file that cannot be read, was cut short or is damaged, with those of all loaded libraries."""
    loaded = ((sys.modules.get(module), error) for module, error in _LIBRARY_ERRORS)
    others = (getattr(module, error) for module, error in loaded if module is not None)
    # ValueError: fsspec raises it for servers that do not send parts of a file.
    return OSError, EOFError, ValueError, zlib.error, lzma.LZMAError, *others


def _lines(piece: Piece, key: str, on_bad_line: Callable[[DataError], None]) -> Iterator[bytes]:
    (url,) = piece.urls
    with _open(url) as file:
        at = piece.start
        if at:
            file.seek(at - 1)
            at += len(file.readline()) - 1
        while piece.stop is None or at < piece.stop:
            line = file.readline()
            if not line:
                return
            if not at and not json.detect_encoding(line).startswith("utf-8"):
                raise DataError(
                    f"--data: {url}: is {json.detect_encoding(line).upper()}, must be UTF-8: write it anew"
                )
            if line.strip():
                try:
                    text = _field(line, key, f"{url}, byte {at}")
                except DataError as error:
                    on_bad_line(error)
                else:
                    yield text
            at += len(line)


def _field(line: bytes, key: str, where: str) -> bytes:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"--data: {where}: is not JSON: {error}") from None
    if not isinstance(row, dict) or key not in row:
        there = ", ".join(row) if isinstance(row, dict) else f"a {type(row).__name__}"
        raise DataError(
            f"--data: {where}: no field {key!r}; there is {there}; scripts/prepare --text-key names the field"
        )
    if not isinstance(row[key], str | None):
        raise DataError(f"--data: {where}: {key!r} is not text but {row[key]!r:.40}")
    return (row[key] or "").encode("utf-8", "surrogatepass")


def _rows(piece: Piece, key: str) -> Iterator[bytes]:
    (url,) = piece.urls
    with _open(url) as file:
        table = _parquet(file, url)
        names = table.schema_arrow.names
        if (count := names.count(key)) != 1:
            which = f"{count} columns" if count else "no column"
            raise DataError(
                f"--data: {url}: {which} {key!r}; there is {', '.join(names)}; scripts/prepare --text-key names "
                "the column"
            )
        kind = table.schema_arrow.field(key).type
        values = getattr(kind, "value_type", kind) if str(kind).startswith("dictionary") else kind
        if str(values) not in ("string", "large_string", "string_view"):
            raise DataError(f"--data: {url}: column {key!r} is not text but {kind}")
        groups = list(range(piece.start, table.num_row_groups if piece.stop is None else piece.stop))
        for batch in table.iter_batches(batch_size=1024, row_groups=groups, columns=[key]):
            # As bytes, like a file of text: values need not be UTF-8, whatever the column's type says.
            yield from (value or b"" for value in batch.column(0).cast("large_binary").to_pylist())


def _row_groups(file: File, size: int) -> list[Piece]:
    with _readable(file.url), _open(file.url) as opened:
        table = _parquet(opened, file.url)
        sizes = [table.metadata.row_group(number).total_byte_size for number in range(table.num_row_groups)]
    return [
        Piece("parquet", (file.url,), some[0], some[-1] + 1, file.size * len(some) // len(sizes))
        for some in grouped(range(len(sizes)), sizes.__getitem__, size)
    ]


def _parquet(file: Any, url: str) -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ModuleNotFoundError:
        raise DataError(f"--data: {url}: Parquet needs pyarrow: {install_command('pyarrow')}") from None
    try:
        return pyarrow.parquet.ParquetFile(file)
    except pyarrow.ArrowInvalid as error:
        raise DataError(f"--data: {url}: is not Parquet: {error}") from None


@contextlib.contextmanager
def _open(url: str) -> Iterator[Any]:
    filesystem, path = open_filesystem(url)
    # Imported after open_filesystem, which reports a missing fsspec.
    from fsspec.core import OpenFile, get_compression

    if not url.endswith(".zst"):
        with OpenFile(filesystem, path, "rb", get_compression(path, "infer")) as file:
            yield file
        return
    zstd = _zstd(url)
    with OpenFile(filesystem, path, "rb") as packed, zstd.ZstdFile(packed) as file:
        yield file


def _zstd(url: str) -> Any:
    """A library that reads all frames of a file and notices a frame that is cut short; other libraries do not."""
    for name in ("compression.zstd", "backports.zstd"):
        with contextlib.suppress(ModuleNotFoundError):
            return importlib.import_module(name)
    raise DataError(f"--data: {url}: Zstandard needs a library: {install_command('backports.zstd')}")


def _list(filesystem: Any, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    if any(letter in path for letter in "*?[") and not filesystem.exists(path):
        matches = filesystem.glob(path)
        if not matches:
            raise DataError(f"--data: nothing is named like {path}")
        for match in matches:
            yield from _list(filesystem, match)
        return
    about = filesystem.info(path)
    # Over HTTP everything is a file, and a file with links in its text is also listed as a folder. Only a URL that ends
    # in a slash is taken for a folder.
    if about["type"] != "directory" and not about.get("url", "").endswith("/"):
        yield path, about
        return
    for name, info in filesystem.find(path, detail=True).items():
        if any(part.startswith(".") for part in name[len(path) :].split("/")):
            continue
        if name.endswith(f"/{DATASET_INFO}"):
            raise DataError(
                f"--data {path}: holds a data set, whose files are no documents: name "
                f"{name.removesuffix(f'/{DATASET_INFO}')} and what else is to be read, each by itself"
            )
        if info.get("islink"):
            # The size and time of the link's target, which may change.
            with _readable(name):
                info = filesystem.info(name)
        # To open a pipe would wait for its writer.
        if not stat.S_ISFIFO(info.get("mode", 0)):
            yield name, info


def _size_and_change(path: Path) -> tuple[int, str]:
    """The bytes of a file or folder, and the time of its last change; files of records are filled up to equal sizes."""
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    found = [file.stat() for file in files]
    return sum(one.st_size for one in found), str(max((one.st_mtime_ns for one in found), default=""))


def kind_of(name: str) -> str:
    """The kind of a file by its name, compressed or not: text, lines or parquet."""
    for ending in COMPRESSED:
        name = name.removesuffix(ending)
    return "lines" if name.endswith(_LINES) else "parquet" if name.endswith(".parquet") else "text"
