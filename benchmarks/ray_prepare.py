"""scripts/prepare --ray against one worker: how much faster it is, and what a dead node costs.

The same documents are prepared by one process, by a process for each core, by a Ray cluster of three nodes of
one core each on this machine, and by such a cluster in which a node is killed in the middle of each pass. All
must write the same bytes. Seconds are those of the whole command, with its start, and those of both passes,
from the first line of progress to the last. Nodes on one machine share its cores, so the speed-up is at most
the number of cores. All files have one size, and each is one piece, so for each piece that is begun again at
most that size is read twice.

    scripts/bench ray_prepare [--megabytes 32]
"""

import argparse
import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
NODE: dict[str, Any] = dict(num_cpus=1, object_store_memory=80 * 2**20, include_dashboard=False)


def write_documents(folder: Path, num_files: int, size: int) -> None:
    """Write JSONL files of exactly ``size`` bytes each, of random words and some repeated documents."""
    chance = random.Random(0)
    words = ["".join(chance.choices("etaoinshrdlu", k=chance.randint(2, 9))) for _ in range(20_000)]
    old: list[str] = []
    for number in range(num_files):
        lines, left = [], size
        while left > 4000:
            text = " ".join(chance.choices(words, k=chance.randint(20, 400)))
            if old and chance.random() < 0.1:
                text = chance.choice(old)
            old = [*old[-200:], text]
            lines.append(json.dumps({"text": text}) + "\n")
            left -= len(lines[-1])
        lines.append(json.dumps({"text": "x" * (left - len(json.dumps({"text": ""})) - 1)}) + "\n")
        (folder / f"{number:03d}.jsonl").write_text("".join(lines))
        assert (folder / f"{number:03d}.jsonl").stat().st_size == size


def start(out: Path, data: Path, options: Sequence[str]) -> subprocess.Popen[str]:
    command = [sys.executable, "-P", "-m", "train.prepare", str(out), "--data", str(data), *options]
    command += ["--near-duplicates", "0.8", "--shard-mb", "2"]
    command += ["--train-tokenizer", "4096", "--sample-mb", "1"]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def follow(process: subprocess.Popen[str], cluster: Any = None) -> tuple[str, float]:
    """The output of a process, and the seconds of both passes from their first line of progress to the last.

    If a cluster is given, one of its nodes is killed when half of each pass is done.
    """
    said, killed = "", set()
    times: dict[str, list[float]] = {}
    assert process.stdout is not None
    for line in process.stdout:
        said += line
        if found := re.match(r"(reading|shards): (\d+)/(\d+)", line):
            name, done, jobs = found[1], int(found[2]), int(found[3])
            times.setdefault(name, []).append(time.monotonic())
            if cluster is not None and name not in killed and 2 * done >= jobs:
                killed.add(name)
                kill_a_node(cluster)
    if process.wait():
        raise SystemExit(f"{process.args!r} ended with {process.returncode}: {said}")
    return said, sum(moments[-1] - moments[0] for moments in times.values())


def kill_a_node(cluster: Any) -> None:
    """Kill a node and its workers, which would live a moment longer because their machine still runs."""
    node = cluster.list_all_nodes()[-1]
    raylet = node.all_processes["raylet"][0].process.pid
    workers = Path(f"/proc/{raylet}/task/{raylet}/children").read_text().split()
    cluster.remove_node(node, allow_graceful=False)
    for worker in workers:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(worker), signal.SIGKILL)


def content(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def main() -> None:
    """Prepare the documents in each way, compare the bytes and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=32)
    given = parser.parse_args()
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "TOKENIZERS_PARALLELISM": "false"}  # a worker is one core
    from ray.cluster_utils import Cluster

    folder = Path(tempfile.mkdtemp())
    cluster = Cluster(initialize_head=True, head_node_args=NODE)
    try:
        for _ in range(2):
            cluster.add_node(**NODE)
        data, num_files = folder / "data", 16
        data.mkdir()
        size = given.megabytes * 10**6 // num_files
        write_documents(data, num_files, size)
        cases = {
            "one worker": ["--workers", "1"],
            "a worker a core": ["--workers", str(os.cpu_count())],
            "Ray, three nodes": ["--ray", cluster.address],
            "Ray, a node killed in each pass": ["--ray", cluster.address],
        }
        print(f"{given.megabytes} MB in {num_files} files, {os.cpu_count()} cores")
        print(f"{'':32} {'whole':>8} {'speed-up':>9} {'passes':>8} {'speed-up':>9}  same bytes")
        one: tuple[float, float] = (0.0, 0.0)
        for number, (name, options) in enumerate(cases.items()):
            began = time.monotonic()
            process = start(folder / str(number), data, options)
            said, passes = follow(process, cluster if "killed" in name else None)
            whole = time.monotonic() - began
            one = one if number else (whole, passes)
            same = content(folder / str(number)) == content(folder / "0")
            print(
                f"{name:32} {whole:7.1f}s {one[0] / whole:8.2f}x {passes:7.1f}s {one[1] / passes:8.2f}x  "
                f"{'yes' if same else 'NO'}",
                flush=True,
            )
            if not same:
                raise SystemExit("the bytes differ")
        again = [int(count) for count in re.findall(r"(\d+) of \d+ were begun again", said)]
        twice = re.search(r"reading:.*?(\d+) of \d+ were begun again.*?shards:", said, re.S)
        pieces = int(twice[1]) if twice else 0
        print(f"begun again after two nodes died: {sum(again)} pieces and shards")
        print(
            f"read twice: at most {pieces * size / 1e6:.1f} of {num_files * size / 1e6:.1f} MB of documents"
        )
    finally:
        cluster.shutdown()
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
