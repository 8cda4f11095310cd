"""A preparation from its options to the manifest, in passes that each continue where a killed one stopped."""

import collections
import contextlib
import dataclasses
import functools
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from train.data import DataError, Vocabulary
from train.data.inputs import File, Piece, cut_into_pieces, find_files
from train.data.manifest import MANIFEST, SHARD_FILES, SPLITS, TOKENIZER, Manifest, Shard, loads
from train.data.remote import cache_folder, is_local, is_url, open_filesystem
from train.data.vocabulary import BYTES, open_vocabulary
from train.lock import LockHeld, hold_lock
from train.prepare import cluster, query
from train.prepare.files import (
    Folder,
    create,
    drop_partial,
    is_partial,
    local_path,
    open_folder,
    read_json,
    url_of,
    write,
    write_json,
)
from train.prepare.options import Options
from train.prepare.partition import BAD_LINES, partition
from train.prepare.plan import Plan, choose_num_buckets, make_plan
from train.prepare.tokenise import BucketContext, tokenise, train_tokenizer
from train.prepare.workers import JobRunner, Report, run_jobs, versions

JOB, LOCK = "job.json", "lock"


def prepare(options: Options, report: Report) -> Manifest:
    """Do what is left of a preparation, and write its manifest.

    Raises:
      DataError: data cannot be read, or OUT or the folder of --work holds something else.
    """
    out = options.out if is_url(options.out) else str(Path(options.out).absolute())
    place = _work_url(options, out)
    # Through links and "..": OUT would be removed with it.
    inside, around = (here if is_url(here) else os.path.realpath(here) for here in (out, place))
    if f"{inside}/".startswith(f"{around.rstrip('/')}/"):
        raise DataError(
            f"--work {place}: is removed at the end, and {out} lies there; name a folder of its own"
        )
    files = find_files(options.data, leave_out=[ours for ours in (out, place) if not is_url(ours)])
    vocabulary = None
    if options.train_tokenizer is None:
        vocabulary = open_vocabulary(options.tokenizer, options.separator)
    job = {
        "options": options.job,
        "files": [dataclasses.astuple(file) for file in files],
        "tokenizer": None if vocabulary is None else vocabulary.fingerprint,
    }
    # With the types that it will have when it is read back.
    job = json.loads(json.dumps(job))
    ready = _finished_manifest(options.out, job)
    if ready is not None:
        report.say(f"{options.out}: is prepared already")
        return ready
    work, shards = open_folder(place), open_folder(out)
    # Without a lock of OUT's own, preparations with other --work would write over each other's shards.
    home = _work_url(dataclasses.replace(options, work=None), out)
    apart = home != place if is_url(place) else os.path.realpath(home) != os.path.realpath(place)
    with contextlib.ExitStack() as stack:
        runner = stack.enter_context(_job_runner(options, files, work, shards, report))
        stack.enter_context(_locked(work))
        if apart:
            stack.enter_context(_locked(open_folder(home), needed=False))
        _note_job(work, job, options.out)
        create(shards)
        manifest = _make(options, files, vocabulary, job, work, shards, runner, report)
        work.rm("", recursive=True)
        if apart and not is_url(home):
            # Another preparation of OUT, given up, may lie there.
            with contextlib.suppress(OSError):
                (Path(home) / LOCK).unlink()
                os.rmdir(home)
    return manifest


def _make(
    options: Options,
    files: Sequence[File],
    vocabulary: Vocabulary | None,
    job: dict[str, Any],
    work: Folder,
    shards: Folder,
    runner: JobRunner,
    report: Report,
) -> Manifest:
    inputs = files
    if options.sql is not None:
        report.say("running the query ...")
        folder = local_path(work)
        if folder is None:
            raise DataError(
                f"--sql: leaves its rows in --work, which must be a folder then; it is {url_of(work)}"
            )
        result = query.select(files, options.sql, options.text_key, folder, options.num_workers)
        inputs = [File(f"file://{result}", "parquet", result.stat().st_size)]
    plan, dropped = _first_pass(options, cut_into_pieces(inputs), work, runner, report)
    _check_unchanged(options, files, work)
    if options.ray is not None and vocabulary is not None and vocabulary.content is not None:
        write(work, TOKENIZER, vocabulary.content)  # where all nodes can read it
        vocabulary = dataclasses.replace(vocabulary, file=url_of(work, TOKENIZER))
    context = BucketContext(plan, vocabulary or BYTES, work, shards)
    if options.train_tokenizer is not None:
        report.say(f"training a tokenizer on {options.sample_mb:g} MB at most ...")
        trained = train_tokenizer(context, options.train_tokenizer, options.sample_mb * 1e6)
        context = dataclasses.replace(context, vocabulary=trained)
    jobs = [(bucket, context) for bucket in range(plan.num_buckets)]
    done = report.track("shards", runner(tokenise, jobs), len(jobs))
    origin = {
        **job,
        "documents": sum(plan.documents),
        "bytes": sum(receipt["bytes"] for receipt in done.values()),
        "dropped": dropped,
        "versions": versions(),
    }
    manifest = _manifest(context.vocabulary, [done[bucket] for bucket in range(plan.num_buckets)], origin)
    if (content := context.vocabulary.content) is not None:
        if shards.exists(TOKENIZER) and shards.cat_file(TOKENIZER) != content:
            raise DataError(
                f"{url_of(shards, TOKENIZER)}: is there already and another; move it, and the same command ends, or "
                "name another OUT"
            )
        write(shards, TOKENIZER, content)
    drop_partial(shards)
    _drop_others(shards, manifest)
    # Written last: a folder with a manifest is complete.
    write(shards, MANIFEST, manifest.dumps().encode())
    return manifest


def _drop_others(shards: Folder, manifest: Manifest) -> None:
    """Remove the shards that a preparation with other options has left, whose work was removed: they are no damage."""
    for name in (Path(path).name for path in shards.ls("", detail=False)):
        if SHARD_FILES.fullmatch(name) and name not in manifest.files:
            shards.rm_file(name)


def _first_pass(
    options: Options, some: Sequence[Piece], work: Folder, runner: JobRunner, report: Report
) -> tuple[Plan, dict[str, int]]:
    jobs = [(number, piece, options, work) for number, piece in enumerate(some)]
    read = report.track("reading", runner(partition, jobs), len(jobs))
    size = sum(receipt["bytes"] for receipt in read.values())
    num_buckets = choose_num_buckets(size, options.shard_mb * 1e6)
    documents = [read[number]["documents"] for number in range(len(jobs))]
    plan = make_plan(documents, num_buckets, options.held_out, options.near_duplicates is not None, work)
    counts = collections.Counter({"exact duplicates": plan.duplicates, "near duplicates": plan.near})
    for receipt in read.values():
        counts.update(receipt["dropped"])
    dropped = {why: count for why, count in sorted(counts.items()) if count}
    if dropped.get(BAD_LINES, 0) > options.skip_bad:
        raise DataError(f"--data: {dropped[BAD_LINES]} {BAD_LINES}, more than --skip-bad {options.skip_bad}")
    if not sum(plan.documents):
        why = ", ".join(f"{count} {why}" for why, count in dropped.items())
        raise DataError(
            f"--data: nothing is left to train on; dropped: {why or 'nothing, there are no documents'}"
        )
    return plan, dropped


def _check_unchanged(options: Options, files: Sequence[File], work: Folder) -> None:
    """Raise DataError for a file that changed since the first pass began, which may have read only a part of it."""
    changed = set(files) - set(find_files(options.data))
    if changed:
        raise DataError(
            f"--data: {min(file.url for file in changed)} has changed while it was read; remove {url_of(work)} and "
            "give the same again when nothing writes to it"
        )


def _manifest(vocabulary: Vocabulary, receipts: Sequence[dict[str, Any]], origin: dict[str, Any]) -> Manifest:
    shards = {
        split: tuple(Shard(**receipt[split]) for receipt in receipts if receipt[split] is not None)
        for split in SPLITS
    }
    content = vocabulary.content
    tokenizer = None if content is None else hashlib.sha256(content).hexdigest()
    dtype = np.dtype(vocabulary.dtype).name
    return Manifest(
        dtype, vocabulary.size, vocabulary.separator, tokenizer, shards["train"], shards["heldout"], origin
    )


def _finished_manifest(out: str, job: dict[str, Any]) -> Manifest | None:
    """The manifest that OUT has already, or None. Raises DataError if it was made from other data or options."""
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


def _note_job(work: Folder, job: dict[str, Any], out: str) -> None:
    """Note in ``work`` which job is being done. Raises DataError if another job is half done there."""
    there = read_json(work, JOB)
    if there == job:
        return
    names = [Path(name).name for name in (work.ls("", detail=False) if work.exists("") else ())]
    others = sorted(name for name in names if name not in (JOB, LOCK) and not is_partial(name))
    if there is None and others:
        raise DataError(
            f"--work {url_of(work)}: is removed at the end, and holds {others[0]}, which is none of a "
            "preparation's; name a folder of its own"
        )
    if others:
        raise DataError(
            f"{out}: a preparation of other data or options is half done: {_difference(there, job)}; give the same "
            f"again to go on with it, or remove {url_of(work)}"
        )
    # This may replace the note of another job that failed before it made anything, as with a wrong --text-key.
    write_json(work, JOB, job)


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


def _work_url(options: Options, out: str) -> str:
    if options.work is not None:
        return options.work if is_url(options.work) else str(Path(options.work).absolute())
    if is_url(out) and options.ray is None:
        return str(cache_folder() / "prepare" / _place_hash(out))
    return f"{out}/.work"


def _place_hash(place: str) -> str:
    return hashlib.sha256(place.encode()).hexdigest()[:16]


@contextlib.contextmanager
def _locked(work: Folder, *, needed: bool = True) -> Iterator[None]:
    """Lock a folder for one process at a time; if it is elsewhere, for one of this machine. Raises DataError for the
    second process, and if the folder's system has no locks unless the lock is not ``needed``."""
    create(work)
    file = (local_path(work) or cache_folder() / "prepare" / _place_hash(url_of(work))) / LOCK
    file.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as holding:
        try:
            holding.enter_context(hold_lock(file))
        except LockHeld as by:
            raise DataError(f"{by} is at work in {url_of(work)}; let it end first") from None
        except OSError as error:
            if needed:
                raise DataError(
                    f"cannot lock {file}: {error.strerror or error}; name another --work"
                ) from None
        yield


@contextlib.contextmanager
def _job_runner(
    options: Options, files: Sequence[File], work: Folder, shards: Folder, report: Report
) -> Iterator[JobRunner]:
    if options.ray is None:
        yield functools.partial(run_jobs, num_workers=options.num_workers)
        return
    folders = {url_of(folder) for folder in (work, shards) if local_path(folder)}
    folders |= {os.path.dirname(file.url.removeprefix("file://")) for file in files if is_local(file.url)}
    if folders:
        some = ", ".join(sorted(folders)[:4])
        report.say(f"--ray: all nodes must share the folders that paths name, where no URL does: {some}")
    with cluster.connected(options.ray, work, JOB, report) as runner:
        yield runner
