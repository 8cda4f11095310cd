"""Prepared folders: ``manifest.json`` lists the shards of tokens and their checksums."""

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import resource
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from train.data.corpus import Source
from train.data.errors import DataError
from train.data.remote import cache_folder, open_filesystem
from train.data.streams import ArrayStream
from train.data.vocabulary import Vocabulary, forget_tokenizers

MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"
FORMAT = "dualpipe-jax tokens"
VERSION = 1
SPLITS = ("train", "heldout")
SHARD_FILES = re.compile(rf"({'|'.join(SPLITS)})-[0-9]{{6,}}\.(bin|index\.npy)")
"""The names of shards' files and of their indices."""


@dataclasses.dataclass(frozen=True)
class Shard:
    """A file of tokens, little-endian, and an index file of where its documents begin and end.

    Attributes:
      file: the file's name, ending in .bin; the index, uint64 [documents + 1], has the same name ending in .index.npy.
      tokens: the number of tokens.
      documents: the number of documents; the last token of each is the separator.
      sha256: the SHA-256 of the file.
      index_sha256: the SHA-256 of the index.
    """

    file: str
    tokens: int
    documents: int
    sha256: str
    index_sha256: str

    @property
    def index(self) -> str:
        return self.file.removesuffix(".bin") + ".index.npy"


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The content of a prepared folder.

    Attributes:
      dtype: the dtype of tokens: uint8, uint16 or uint32.
      vocab: the vocabulary size; all tokens are below it.
      separator: the token after every document.
      tokenizer: the SHA-256 of tokenizer.json; None if tokens are bytes.
      train: the shards to train on.
      heldout: the held-out shards.
      origin: how the folder was made: sources, options, versions, what was dropped and why.
    """

    dtype: str
    vocab: int
    separator: int
    tokenizer: str | None
    train: tuple[Shard, ...]
    heldout: tuple[Shard, ...]
    origin: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def shards(self) -> tuple[Shard, ...]:
        return self.train + self.heldout

    @property
    def files(self) -> dict[str, str]:
        """The SHA-256 of every file that the manifest describes, by the file's name."""
        found: dict[str, str] = {}
        for shard in self.shards:
            found |= {shard.file: shard.sha256, shard.index: shard.index_sha256}
        return found if self.tokenizer is None else found | {TOKENIZER: self.tokenizer}

    @property
    def fingerprint(self) -> str:
        """A hash of everything but the origin. If it is equal, the tokens and their order are equal."""
        return _digest({**_content(self), "origin": None})

    def dumps(self) -> str:
        content = _content(self)
        return json.dumps({**content, "checksum": _digest(content)}, indent=1) + "\n"


def loads(text: str | bytes, where: str) -> Manifest:
    """A manifest from its text. Raises DataError if the text is no manifest, has another version or was changed.

    ``where`` names the text in these errors.
    """
    try:
        content = json.loads(text)
        known = content.get("format") == FORMAT
    except (ValueError, AttributeError):
        raise DataError(f"{where} is damaged: it is not JSON; remove it and prepare the data again") from None
    if not known:
        raise DataError(f"{where} is not a manifest of {FORMAT}")
    if content.get("version") != VERSION:
        raise DataError(
            f"{where}: version {content.get('version')}, this program reads {VERSION}; remove it and prepare the "
            "data again"
        )
    if _digest({name: value for name, value in content.items() if name != "checksum"}) != content.get(
        "checksum"
    ):
        raise DataError(
            f"{where} is damaged or was edited: its checksum is another; remove it and prepare the data again"
        )
    for name in ("format", "version", "checksum"):
        del content[name]
    shards = {split: tuple(Shard(**shard) for shard in content.pop(split)) for split in SPLITS}
    return Manifest(**(content | shards))


def is_prepared(folder: Path) -> bool:
    """Whether a folder has a manifest. Raises DataError if it has shards but no manifest."""
    if (folder / MANIFEST).is_file():
        return True
    if folder.is_dir() and any(next(folder.glob(f"{split}-*.bin"), None) for split in SPLITS):
        raise DataError(
            f"--data {folder}: has shards of prepared text and no {MANIFEST}; prepare the data again, or "
            "name the text itself"
        )
    return False


def has_shards(folder: Path) -> bool:
    """Whether a folder's files have the names of a prepared one's; other programs have manifests of this name, too."""
    return (folder / MANIFEST).is_file() and any(map(SHARD_FILES.fullmatch, os.listdir(folder)))


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a folder. Raises DataError if there is none or it is damaged."""
    try:
        return loads((folder / MANIFEST).read_bytes(), str(folder / MANIFEST))
    except OSError as error:
        raise DataError(
            f"{folder}: cannot read {MANIFEST}: {error.strerror}; it is written last, so is scripts/prepare done?"
        ) from None


def open_prepared(folder: Path) -> tuple[Source, Vocabulary]:
    """A prepared folder's tokens, mapped into memory and read when they are needed, and its vocabulary.

    Raises:
      DataError: a file is missing or has another length than the manifest says, or there are more files than a process
        may have open. Content is checked by ``find_damage``.
    """
    manifest = read_manifest(folder)
    dtype = np.dtype(manifest.dtype).newbyteorder("<")

    def stream(shards: Sequence[Shard]) -> ArrayStream:
        for shard in shards:
            _check_length(folder, shard, dtype)
        files = [folder / shard.file for shard in shards]
        _allow_open_files(len(files))
        try:
            arrays = [np.memmap(file, dtype=dtype, mode="r") for file in files]
        except OSError as error:
            raise DataError(
                f"--data {folder}: cannot map its {len(files)} shards into memory: {error.strerror}; if they are too "
                "many for this system, prepare the data again with a larger --shard-mb"
            ) from None
        return ArrayStream(arrays, manifest.vocab, list(map(str, files)))

    train = stream(manifest.train)
    source = Source(
        str(folder),
        train,
        heldout=stream(manifest.heldout),
        num_documents=sum(shard.documents for shard in manifest.shards),
        fingerprint=manifest.fingerprint,
        weight=max(1, len(train)),
    )
    return source, open_prepared_vocabulary(folder, manifest)


def open_prepared_vocabulary(folder: Path, manifest: Manifest) -> Vocabulary:
    """The vocabulary of a prepared folder. Raises DataError if its tokenizer is missing or has changed."""
    if manifest.tokenizer is None:
        return Vocabulary(manifest.vocab, manifest.separator)
    file = folder / TOKENIZER
    if not file.is_file():
        raise DataError(f"--data {folder}: {TOKENIZER} is missing")
    if sha256(file) != manifest.tokenizer:
        raise DataError(f"--data {folder}: {TOKENIZER} is not the one that its tokens were made with")
    forget_tokenizers()
    return Vocabulary(manifest.vocab, manifest.separator, file)


def fetch_prepared(url: str | Path) -> Path:
    """Copy a prepared folder into the cache and return the copy's path. Files that are there already are not fetched
    again: a file gets its name only when it is complete.

    There is one copy for each content of the manifest.

    Raises:
      DataError: the folder cannot be read, or is not a prepared folder.
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
    # Another process that fetches the same may be reading it.
    part = folder / f".{MANIFEST}.{os.getpid()}"
    part.write_bytes(text)
    part.replace(folder / MANIFEST)
    return folder


def find_damage(folder: Path) -> list[str]:
    """All differences between a prepared folder and its manifest, in words. Reads all files.

    Raises:
      DataError: there is no manifest, or it is damaged.
    """
    expected = read_manifest(folder).files
    found = []
    for name, digest in expected.items():
        try:
            if sha256(folder / name) != digest:
                found.append(f"{name}: damaged, its checksum is another")
        except FileNotFoundError:
            found.append(f"{name}: missing")
        except OSError as error:
            found.append(f"{name}: cannot be read: {error.strerror}")
    strange = sorted(file.name for file in folder.glob("*.bin") if file.name not in expected)
    return found + [f"{name}: not in the manifest" for name in strange]


def sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _check_length(folder: Path, shard: Shard, dtype: np.dtype) -> None:
    expected = shard.tokens * dtype.itemsize
    try:
        found = (folder / shard.file).stat().st_size
    except OSError as error:
        raise DataError(f"--data {folder}: cannot read shard {shard.file}: {error.strerror}") from None
    if found != expected:
        raise DataError(
            f"--data {folder}: shard {shard.file} has {found} bytes, its manifest says {expected}: it was cut short or "
            "is another's; prepare the data again"
        )


def _allow_open_files(number: int) -> None:
    """Let this process have so many more files open, if the system does: a usual limit is 1024, and each array that is
    mapped from a file keeps it open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY:
        wanted = soft + number if hard == resource.RLIM_INFINITY else min(soft + number, hard)
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _content(manifest: Manifest) -> dict[str, Any]:
    return {"format": FORMAT, "version": VERSION, **dataclasses.asdict(manifest)}


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
