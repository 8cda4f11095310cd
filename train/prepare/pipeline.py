"""A preparation from its options to the manifest, in passes that each go on where a killed one stopped."""

import collections
import contextlib
import dataclasses
import fcntl
import hashlib
import json
import platform
import shutil
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from train.data import DataError, Vocabulary
from train.data.inputs import File, Piece, find, pieces
from train.data.manifest import MANIFEST, SPLITS, TOKENIZER, Manifest, Shard, loads, sha256
from train.data.remote import cache_folder, is_url, open_filesystem
from train.data.vocabulary import BYTES, open_vocabulary
from train.prepare import query
from train.prepare.files import partial, write, write_json
from train.prepare.options import Options
from train.prepare.partition import BAD, Parts, partition
from train.prepare.plan import Plan, choose_num_buckets, make_plan
from train.prepare.tokenise import Shop, tokenise, train_tokenizer
from train.prepare.workers import Report, share_out

DONE = "bucket-"


def prepare(options: Options, report: Report) -> Manifest:
    """Do what is left to do, and write the manifest.

    Raises:
      DataError: data that cannot be read, or OUT holds something else.
    """
    remote = is_url(options.out)
    out = "" if remote else str(Path(options.out).absolute())
    files = find(options.data, leave_out=out)
    vocabulary = None
    if options.train_tokenizer is None:
        vocabulary = open_vocabulary(options.tokenizer, options.separator)
    job = {
        "options": options.job,
        "files": [dataclasses.astuple(file) for file in files],
        "tokenizer": None if vocabulary is None else vocabulary.fingerprint,
    }
    job = json.loads(json.dumps(job))  # as it will be read back
    ready = _finished(options.out, job)
    if ready is not None:
        report.say(f"{options.out}: is prepared already")
        return ready
    work = _work_folder(options)
    shards = work / "shards" if remote else Path(out)
    with _held(work):
        _claim(work, job, options.out)
        shards.mkdir(exist_ok=True)
        manifest = _make(options, files, vocabulary, job, work, shards, report)
        if remote:
            _send(shards, options.out, report)
        shutil.rmtree(work)
    return manifest


def _make(
    options: Options,
    files: Sequence[File],
    vocabulary: Vocabulary | None,
    job: dict[str, Any],
    work: Path,
    shards: Path,
    report: Report,
) -> Manifest:
    if options.sql is not None:
        report.say("running the query ...")
        result = query.select(files, options.sql, options.text_key, work, options.workers)
        files = [File(f"file://{result}", "parquet", result.stat().st_size)]
    parts, plan, dropped = _first_pass(options, pieces(files), work, report)
    shop = Shop(parts, plan, vocabulary or BYTES, work, shards)
    if options.train_tokenizer is not None:
        report.say(f"training a tokenizer on {options.sample_mb:g} MB at most ...")
        trained = train_tokenizer(shop, options.train_tokenizer, options.sample_mb * 1e6, work / TOKENIZER)
        shop = dataclasses.replace(shop, vocabulary=trained)
    jobs = [(bucket, shop) for bucket in range(plan.num_buckets)]
    done = report.follow("shards", share_out(tokenise, jobs, options.workers), len(jobs))
    origin = {
        **job,
        "documents": sum(plan.documents),
        "bytes": sum(receipt["bytes"] for receipt in done.values()),
        "dropped": dropped,
        "versions": _versions(),
    }
    manifest = _manifest(shop.vocabulary, [done[bucket] for bucket in range(plan.num_buckets)], origin)
    if shop.vocabulary.file is not None:
        write(shards / TOKENIZER, shop.vocabulary.file.read_bytes())
    write(shards / MANIFEST, manifest.dumps().encode())
    return manifest


def _first_pass(
    options: Options, some: Sequence[Piece], work: Path, report: Report
) -> tuple[Parts, Plan, dict[str, int]]:
    folder = work / "read"
    folder.mkdir(exist_ok=True)
    jobs = [(number, piece, options, folder) for number, piece in enumerate(some)]
    read = report.follow("reading", share_out(partition, jobs, options.workers), len(jobs))
    size = sum(receipt["bytes"] for receipt in read.values())
    parts = Parts(folder, len(jobs))
    num_buckets = choose_num_buckets(size, options.shard_mb * 1e6)
    plan = make_plan(parts, num_buckets, options.held_out, options.near_duplicates is not None, work)
    counts = collections.Counter({"exact duplicates": plan.duplicates, "near duplicates": plan.near})
    for receipt in read.values():
        counts.update(receipt["dropped"])
    dropped = {why: count for why, count in sorted(counts.items()) if count}
    if dropped.get(BAD, 0) > options.skip_bad:
        raise DataError(f"--data: {dropped[BAD]} {BAD}, more than --skip-bad {options.skip_bad}")
    if not sum(plan.documents):
        why = ", ".join(f"{count} {why}" for why, count in dropped.items())
        raise DataError(
            f"--data: nothing is left to train on; dropped: {why or 'nothing, there are no documents'}"
        )
    return parts, plan, dropped


def _manifest(vocabulary: Vocabulary, receipts: Sequence[dict[str, Any]], origin: dict[str, Any]) -> Manifest:
    shards = {
        split: tuple(Shard(**receipt[split]) for receipt in receipts if receipt[split] is not None)
        for split in SPLITS
    }
    tokenizer = None if vocabulary.file is None else sha256(vocabulary.file)
    dtype = np.dtype(vocabulary.dtype).name
    return Manifest(
        dtype, vocabulary.size, vocabulary.separator, tokenizer, shards["train"], shards["heldout"], origin
    )


def _finished(out: str, job: dict[str, Any]) -> Manifest | None:
    """The manifest that is there already. Raises DataError if it is of other data or options."""
    filesystem, path = open_filesystem(out)
    try:
        manifest = loads(filesystem.cat_file(f"{path}/{MANIFEST}"), f"{out}/{MANIFEST}")
    except OSError:
        return None
    there = {name: manifest.origin.get(name) for name in job}
    if there != job:
        raise DataError(
            f"{out} is prepared otherwise: {_difference(there, job)}; remove it or name another OUT"
        )
    return manifest


def _claim(work: Path, job: dict[str, Any], out: str) -> None:
    """Note what is being made. Raises DataError if something else is half done there."""
    file = work / "job.json"
    if not file.exists():
        write_json(file, job)
        return
    there = json.loads(file.read_text())
    if there != job:
        raise DataError(
            f"{out}: a preparation of other data or options is half done: {_difference(there, job)}; give the same "
            f"again to go on with it, or remove {work}"
        )


def _difference(there: dict[str, Any], job: dict[str, Any]) -> str:
    before, now = there.get("options") or {}, job["options"]
    options = [
        f"--{name.replace('_', '-')} was {before.get(name)!r}"
        for name in now
        if before.get(name) != now[name]
    ]
    if not options and before and there.get("tokenizer") != job["tokenizer"]:
        return "--tokenizer was another file"
    return ", ".join(options[:3]) or "the files of --data have changed"


def _work_folder(options: Options) -> Path:
    if options.work is not None:
        work = options.work
    elif is_url(options.out):
        work = cache_folder() / "prepare" / hashlib.sha256(options.out.encode()).hexdigest()[:16]
    else:
        work = Path(options.out) / ".work"
    try:
        work.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"cannot make {work}: {error.strerror}") from None
    return work.absolute()


@contextlib.contextmanager
def _held(work: Path) -> Iterator[None]:
    """One process at a time. Raises DataError for the second."""
    with (work / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise DataError(f"another process is at work in {work}") from None
        yield


def _send(shards: Path, url: str, report: Report) -> None:
    """Copy all files, the manifest last: where it is, everything is."""
    filesystem, path = open_filesystem(url)
    names = sorted(file.name for file in shards.iterdir() if file != partial(file))
    names.remove(MANIFEST)
    filesystem.makedirs(path, exist_ok=True)
    for name in [*names, MANIFEST]:
        filesystem.put_file(str(shards / name), f"{path}/{name}")
    report.say(f"sent {len(names) + 1} files to {url}")


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("numpy", "tokenizers", "pyarrow", "duckdb"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found
