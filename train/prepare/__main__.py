"""The command line ``python -m train.prepare``: turn documents into shards of tokens, or verify prepared shards."""

import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from dualpipe_jax.present.numbers import how_many
from train.data import DataError
from train.data.manifest import Manifest, find_damage, read_manifest
from train.data.remote import is_url
from train.prepare.options import Options, check, parse
from train.prepare.pipeline import prepare
from train.prepare.workers import Report

USUAL_SEQUENCE = 64
"""Tokens of a sequence in the run that the summary proposes: as many as the recipe of the default model has."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from the command line.

    Returns the exit code: 1 if --check finds damage, 2 for invalid options or data, 130 after Ctrl-C, else 0.
    """
    options = parse(arguments)
    report = Report(Console())
    try:
        if options.check:
            return verify(options, report)
        check(options)
        manifest = prepare(options, report)
    except DataError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; the same command goes on", file=sys.stderr)
        return 130
    report.say(summary(manifest, options.out))
    return 0


def verify(options: Options, report: Report) -> int:
    if options.ray is not None:
        raise DataError("--check: reads on this machine alone; leave out --ray")
    if is_url(options.out):
        raise DataError(f"--check {options.out}: reads folders on this machine")
    damage = find_damage(Path(options.out))
    for line in damage:
        report.say(line)
    manifest = read_manifest(Path(options.out))
    damaged = f"{len(damage)} damaged" if damage else "all whole"
    report.say(f"{options.out}: {how_many(len(manifest.shards), 'shard')}, {damaged}")
    return 1 if damage else 0


def summary(manifest: Manifest, out: str) -> str:
    origin = manifest.origin
    train, heldout = (sum(shard.tokens for shard in shards) for shards in (manifest.train, manifest.heldout))
    dropped = ", ".join(f"{count} {why}" for why, count in origin["dropped"].items())
    then, usual, most = f"scripts/train --data {out}", USUAL_SEQUENCE, min(train, heldout) - 1
    if most < 1:
        then = "too few tokens to train on; give more documents, or another --held-out"
    elif most < usual:
        then += f" --sequence {most}, for no more can be cut; give more documents, or another --held-out, for {usual}"
    each = origin["bytes"] / max(1, train + heldout)
    return (
        f"documents  {origin['documents']} kept; dropped: {dropped or 'none'}\n"
        f"tokens     {train} to train on, {heldout} held out, {each:.2f} bytes each\n"
        f"vocabulary {manifest.vocab}, stored as {manifest.dtype}\n"
        f"files      {out}/: {how_many(len(manifest.shards), 'shard')}; {then}"
    )


if __name__ == "__main__":
    sys.exit(main())
