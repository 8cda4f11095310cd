"""Measure this project on one GPU, in one command: parts, a layer, a step, the trainer, and PyTorch for comparison.

    scripts/bench gpu [--minutes 9] [--parts products,dropless] [--output gpu.json]
    scripts/bench gpu --compile-only        # no GPU: all is compiled for an H100, and what it calls is listed

The record of each function is printed as a line of JSON as soon as it is measured; a table follows. Parts run
in child processes: a part that fails or hangs is recorded, and the next one runs; a part for which no time is
left is recorded as not done. No network is needed. Without PyTorch its side is recorded as left out.
"""

import argparse
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from dualpipe_jax.inspect.compiler import IN_ORDER  # noqa: E402

IN_ONE_PROCESS = (
    *("products", "attention", "grouped", "shapes", "dropless", "capacity"),
    *("float8", "step", "repeat", "serving"),
)
DETERMINISTIC = "repeat_deterministic"
ALONE = (DETERMINISTIC, "trainer", "probe", "torch")
PARTS = (*IN_ONE_PROCESS, *ALONE)
ASKED = ("walks",)
"""Parts that run only if they are named in ``--parts``."""
SILENT_S = 180.0
"""The seconds without a record after which a part counts as hanging; the longest function compiles in half of
that."""
WRONG_USE = 2
"""The exit code of argparse's errors."""


def functions() -> dict[str, Callable]:
    """The functions of the parts that use JAX or PyTorch in their own process, by name."""
    from benchmarks.on_gpu import layer, parts, peers, repeat, serving, step

    of = functools.partial
    return {
        "products": parts.products,
        "attention": parts.attention,
        "grouped": parts.grouped,
        "shapes": parts.shapes,
        "walks": parts.walks,
        "dropless": of(layer.layer, dispatch="dropless"),
        "capacity": of(layer.layer, dispatch="capacity"),
        "float8": of(layer.layer, dispatch="capacity", payload="float8", matmul="float8", units="F FB"),
        "step": step.step,
        "repeat": repeat.repeat,
        DETERMINISTIC: repeat.repeat,
        "serving": serving.serving,
        "torch": peers.torch_parts,
    }


def main() -> None:
    """Parse the command line, run the parts and write the records."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=9.0, help="time for all parts together")
    parser.add_argument("--parts", help=f"some of {', '.join((*PARTS, *ASKED))}, separated by commas")
    parser.add_argument("--compile-only", action="store_true", help="compile for a GPU that is not here")
    parser.add_argument("--target", default="h100:1x1", help="GPU that --compile-only compiles for")
    parser.add_argument("--output", type=Path, default=Path("gpu.json"), help="file for all records")
    parser.add_argument("--texts", type=Path, help="folder for the compiled programs of a layer's units")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    wanted = PARTS if options.parts is None else [name.strip() for name in options.parts.split(",")]
    if unknown := [name for name in wanted if name not in (*PARTS, *ASKED)]:
        parser.error(f"no part named {', '.join(unknown)}; there are {', '.join((*PARTS, *ASKED))}")
    if options.here or options.compile_only:
        in_this_process(parser, options, wanted)
        return
    records = in_processes(options, wanted)
    table(records)
    print(f"all records are in {options.output}")


def in_this_process(
    parser: argparse.ArgumentParser, options: argparse.Namespace, wanted: Sequence[str]
) -> None:
    """Run parts in this process: as a child process, or only compile them."""
    if options.compile_only:
        os.environ["JAX_PLATFORMS"] = "cpu"
    known = functions()
    from benchmarks.on_gpu.bench import Bench

    if not options.compile_only:
        import jax

        if jax.default_backend() != "gpu" and wanted != ["torch"]:
            kind = jax.devices()[0].device_kind
            parser.error(f"JAX finds no GPU here, only {kind!r}; --compile-only compiles everything for one")
    from dualpipe_jax.inspect.target import MissingCompiler

    try:
        bench = Bench(options.target if options.compile_only else None, options.minutes, options.texts)
    except MissingCompiler as error:
        parser.error(str(error))
    for name in wanted:
        if name in known:
            with bench.going_on(name):
                known[name](bench)
        else:
            bench.part = name
            bench.say("left out", reason="it runs, and compiles for nothing that is not here")
    if options.compile_only:
        options.output.write_text(json.dumps(bench.records, indent=1) + "\n")


# ------------------------------------------------------------------------------------------ processes


def in_processes(options: argparse.Namespace, wanted: Sequence[str]) -> list[dict]:
    """Run parts in child processes, as many as possible in the same one, and return all records."""
    records: list[dict] = []
    end = time.monotonic() + 60 * options.minutes

    def say(record: dict) -> None:
        print(json.dumps(record), flush=True)
        records.append(record)
        options.output.write_text(json.dumps(records, indent=1) + "\n")

    say({"part": "machine", "name": "nvidia-smi", "told": smi()})
    left = [name for name in wanted if name in (*IN_ONE_PROCESS, *ASKED)]
    while left and time.monotonic() < end:
        child(options, left, end, say)
        tried = {record["part"] for record in records}
        left = [name for name in left if name not in tried]
    for name in left:
        say({"part": name, "name": "not done", "reason": "the minutes that were given are over"})
    for name in (name for name in wanted if name in ALONE):
        if time.monotonic() > end - 20:
            say({"part": name, "name": "not done", "reason": "the minutes that were given are over"})
        elif name == "probe":
            probe(end, say)
        elif name == "trainer":
            from benchmarks.on_gpu import trainer

            trainer.trainer(lambda what, **facts: say({"part": "trainer", "name": what, **facts}), end)
        else:
            flags = os.environ.get("XLA_FLAGS", "") + (f" {IN_ORDER}" if name == DETERMINISTIC else "")
            child(options, [name], end, say, XLA_FLAGS=flags.strip())
    return records


def child(
    options: argparse.Namespace,
    parts: Sequence[str],
    end: float,
    say: Callable[[dict], None],
    **environment: str,
) -> None:
    """Run parts in a process of their own, until the monotonic clock says ``end`` at the latest, or one hangs."""
    seconds = end - time.monotonic()
    command = [sys.executable, __file__, "--here", "--parts", ",".join(parts), "--minutes", str(seconds / 60)]
    command += ["--texts", str(options.texts)] if options.texts else []
    other: list[str] = []
    part = parts[0]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        env=os.environ | environment,
    ) as process:
        killer = kill_in(process, seconds)
        assert process.stdout is not None
        for line in process.stdout:
            if not line.startswith('{"part"'):
                other.append(line.rstrip())
                continue
            killer.cancel()
            killer = kill_in(process, end - time.monotonic())
            record = json.loads(line)
            say(record)
            part, other = record["part"], []
            if record["name"] == "took" and part != parts[-1]:
                part = parts[parts.index(part) + 1]
        killer.cancel()
    code = process.returncode
    if code == WRONG_USE:
        raise SystemExit("\n".join(other[-1:]))
    if code:
        late = "the minutes are over" if time.monotonic() >= end else f"nothing was said for {SILENT_S:.0f} s"
        reason = f"killed, for {late}" if code == -signal.SIGKILL else f"exit code {code}"
        say({"part": part, "name": "failed", "reason": reason, "tail": other[-12:]})


def kill_in(process: subprocess.Popen, seconds: float) -> threading.Timer:
    """Start and return a timer that kills the process after ``seconds``, or after SILENT_S if that is less."""
    timer = threading.Timer(max(0.0, min(seconds, SILENT_S)), process.kill)
    timer.start()
    return timer


def probe(end: float, say: Callable[[dict], None]) -> None:
    """Run ``dualpipe probe`` on one device, and record all its results."""
    command = [sys.executable, "-m", "dualpipe_jax", "probe", "--pp", "1", "--ep", "1"]
    with tempfile.TemporaryDirectory() as folder:
        rates = Path(folder) / "rates.json"
        try:
            done = subprocess.run(
                [*command, "-o", str(rates)],
                capture_output=True,
                text=True,
                timeout=end - time.monotonic(),
                cwd=ROOT,
            )
        except subprocess.TimeoutExpired:
            say({"part": "probe", "name": "not done", "reason": "the minutes that were given are over"})
            return
        found = json.loads(rates.read_text()) if rates.exists() else {"tail": done.stderr.splitlines()[-12:]}
    say({"part": "probe", "name": f"exit code {done.returncode}", **found})


def smi() -> str:
    """The output of nvidia-smi: driver, memory, and how busy the device is."""
    query = "name,driver_version,memory.total,memory.used,utilization.gpu,clocks.sm,power.draw"
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.strip()
    except OSError:
        return "there is no nvidia-smi"


def table(records: Sequence[dict]) -> None:
    """Print the timed records as a table."""
    from rich.console import Console
    from rich.table import Table

    shown = Table("part", "what", "ms", "TFLOP/s or TB/s", "of peak", "predicted", box=None)
    for record in records:
        if "ms" not in record:
            continue
        rate = record.get("tflops", record.get("tb_per_s"))
        shown.add_row(
            record["part"],
            record["name"],
            f"{record['ms']:.3f}",
            "" if rate is None else f"{rate:.3g}",
            f"{record['mfu']:.1%}" if "mfu" in record else "",
            f"{record['predicted_over_measured']:.2f}" if "predicted_over_measured" in record else "",
        )
    Console(width=120).print(shown)


if __name__ == "__main__":
    main()
