"""The options of a preparation."""

import dataclasses
import os
import re
import sys
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

from tyro.conf import Positional, arg

from dualpipe_jax.command.line import read
from dualpipe_jax.ranges import AboveZero, AtLeastOne, NotNegative, out_of_range
from train.data import DataError

DESCRIPTION = """Turn documents into shards of tokens, deduplicated, filtered, shuffled, for scripts/train --data OUT.

Reads text files (a document each), JSONL and Parquet (a document a row), gzip and the like too, ArrayRecord files and
Hugging Face data sets on disk; from folders, globs and fsspec URLs such as s3://bucket/folder. The same command goes
on where a killed one stopped."""


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of a preparation."""

    COMMON: ClassVar = (
        "out", "data", "text-key", "tokenizer", "train-tokenizer", "held-out", "workers", "check",
    )  # fmt: skip

    out: Annotated[str, Positional, arg(metavar="OUT")]
    """Folder for the shards, or an fsspec URL."""
    data: Annotated[tuple[str, ...], arg(metavar="PATH ...")] = ()
    """Files, folders, globs or URLs of documents."""
    text_key: Annotated[str, arg(metavar="NAME")] = "text"
    """The field or column that holds the text, where documents have several."""
    tokenizer: Annotated[str, arg(metavar="FILE")] = "bytes"
    """bytes, a tokenizer.json, or a folder with one."""
    separator: Annotated[str | None, arg(metavar="TOKEN")] = None
    """The tokenizer's token between documents. If left out, its end-of-text token."""
    train_tokenizer: Annotated[int | None, arg(metavar="SIZE")] = None
    """Train a byte-pair tokenizer with at most this number of tokens on the documents first, and use it."""
    sample_mb: AboveZero = 64.0
    """Megabytes of text, from documents that are not held out, on which a tokenizer is trained."""
    held_out: float = 0.05
    """Share of documents that is never trained on. If that is less than one document, the end of each document."""
    skip_bad: Annotated[NotNegative, arg(metavar="N")] = 0
    """Number of JSON lines that may be left out because they cannot be read or have no text. One more is an error."""
    min_bytes: AtLeastOne = 1
    """Number of bytes below which a document is dropped."""
    max_bytes: int | None = None
    """Number of bytes above which a document is dropped."""
    min_letters: float = 0.0
    """Documents with a smaller share of letters among their characters, except white space, are dropped."""
    max_repeated_lines: float = 1.0
    """Documents with a larger share of lines that repeat an earlier line are dropped."""
    reject: Annotated[str | None, arg(metavar="REGEX")] = None
    """Documents in which this regular expression is found are dropped."""
    near_duplicates: Annotated[float | None, arg(metavar="SIMILARITY")] = None
    """Of documents with about this similarity or more (Jaccard, of runs of five words; for example 0.8) only one is
    kept. Exact duplicates are dropped in any case."""
    sql: Annotated[str | None, arg(metavar="QUERY")] = None
    """Prepare the rows of this query over the table documents, which holds all of --data. DuckDB runs the query, on
    disk if memory is short."""
    shard_mb: AboveZero = 64.0
    """Approximate megabytes of text in a shard. A worker holds one shard in memory."""
    workers: AtLeastOne | None = None
    """Number of processes. If left out, one for each core of this machine."""
    ray: Annotated[str | None, arg(metavar="ADDRESS")] = None
    """Work on a Ray cluster that this machine is a node of, with all its cores: HOST:PORT of its head, or auto."""
    work: Annotated[str | None, arg(metavar="FOLDER")] = None
    """Folder or URL for intermediate files alone, removed at the end. If left out, OUT/.work, or a folder in ~/.cache
    if OUT is a URL and --ray is not given."""
    check: bool = False
    """Prepare nothing, but read OUT and compare every file with its checksum."""

    @property
    def job(self) -> dict[str, Any]:
        """The options that determine the shards."""
        asked = dataclasses.asdict(self)
        return {name: asked[name] for name in asked if name not in ("out", "workers", "ray", "work", "check")}

    @property
    def num_workers(self) -> int:
        """The number of processes on this machine."""
        return self.workers or os.cpu_count() or 1


def parse(arguments: Sequence[str] | None = None) -> Options:
    """Read the command line (``sys.argv`` if None). Exits with code 2 where it cannot be read."""
    words = sys.argv[1:] if arguments is None else arguments
    return read(Options, "scripts/prepare", words, description=DESCRIPTION)


def check(options: Options) -> None:
    """Raise DataError for the first option that is out of range or does not fit the others."""
    if not options.data:
        raise DataError("--data: name files or folders of documents")
    for (name,), value, why in out_of_range(options):
        raise DataError(f"--{name.replace('_', '-')} {value}: {why}")
    if not 0 < options.held_out < 1:
        raise DataError(f"--held-out {options.held_out}: must be between 0 and 1, both left out")
    if options.near_duplicates is not None and not 0 < options.near_duplicates <= 1:
        raise DataError(f"--near-duplicates {options.near_duplicates}: must be above 0 and at most 1")
    if options.sql is not None and options.skip_bad:
        raise DataError(
            f"--skip-bad {options.skip_bad}: with --sql DuckDB reads lines, and leaves none out; leave out --skip-bad"
        )
    if options.ray is not None and options.workers is not None:
        raise DataError(
            f"--workers {options.workers}: with --ray the cluster's cores are the workers; leave one out"
        )
    try:
        re.compile(options.reject or "")
    except re.error as error:
        raise DataError(f"--reject {options.reject}: is no regular expression: {error}") from None
    if options.train_tokenizer is not None:
        if options.tokenizer != "bytes" or options.separator is not None:
            raise DataError("--train-tokenizer: makes a tokenizer; leave out --tokenizer and --separator")
        if options.train_tokenizer < 257:
            raise DataError(
                f"--train-tokenizer {options.train_tokenizer}: must be at least 257, all bytes and the separator"
            )
