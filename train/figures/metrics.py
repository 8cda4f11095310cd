"""What a run reports while it trains: one JSON line per step for programs, a progress display for people."""

import collections
import json
import math
import os
import shutil
import statistics
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import IO, Any, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column

from dualpipe_jax.present.numbers import how_many


class MetricsFile:
    """``metrics.jsonl``: one JSON object per line, written immediately, so that a run that is cut short keeps them.

    Attributes:
      earlier_records: the records of an earlier part of the run that stay.
      damage: what was wrong with the file, in words; None if nothing was.
    """

    earlier_records: list[dict[str, Any]]
    _file: IO[bytes] | None

    def __init__(self, path: Path | None, upto: int = -1):
        """Open the file. Of an earlier part of the run, the records up to that of step ``upto`` stay.

        Lines that cannot be read are left out. If there are any, except a last line that was cut short by a kill, the
        whole old file is kept under another name. Without a path nothing is written: of several processes one writes.
        """
        self.damage: str | None = None
        self._path, self._unwritten = path, b""
        if path is None:
            self.earlier_records, self._file = [], None
            return
        records, bad = read_records(path)
        if bad:
            aside = path.with_name(f"{path.name}.damaged.{time.time_ns()}")
            shutil.copyfile(path, aside)
            numbers = ", ".join(map(str, bad[:5])) + (" ..." if len(bad) > 5 else "")
            self.damage = f"{path} has lines that cannot be read ({numbers}); as it was it is kept in {aside}"
        # All before the step that the run goes on from stays, also what tells of later steps that it gave up before.
        steps = [place for place, record in enumerate(records) if "loss" in record and record["step"] <= upto]
        before = steps[-1] if steps else 0
        self.earlier_records = [r for place, r in enumerate(records) if place < before or r["step"] <= upto]
        # Written under another name and renamed, so that a kill leaves the old file or the new one.
        whole = path.with_suffix(".new")
        whole.write_text("".join(json.dumps(record) + "\n" for record in self.earlier_records))
        os.replace(whole, path)
        self._file = path.open("ab", buffering=0)

    def write(self, record: Mapping[str, Any]) -> None:
        """Append a record. Numbers that JSON cannot hold, NaN and infinities, become null.

        Raises OSError if it cannot be written; then it is kept, and written before the next record.
        """
        if self._file is None:
            return
        self._unwritten += (json.dumps(_without_nonfinite(record)) + "\n").encode()
        self._flush()

    def close(self) -> None:
        """Write what is still waiting and close the file. Raises OSError, saying how many records are lost."""
        if self._file is None:
            return
        try:
            self._flush()
        except OSError as error:
            lost = self._unwritten.count(b"\n")
            raise OSError(
                error.errno, f"{error.strerror}; lost at its end: {how_many(lost, 'record')}", str(self._path)
            ) from None
        finally:
            self._file.close()

    def _flush(self) -> None:
        assert self._file is not None
        # A disk that is nearly full may take only a part.
        while self._unwritten:
            self._unwritten = self._unwritten[self._file.write(self._unwritten) :]


def read_records(path: Path) -> tuple[list[dict[str, Any]], list[int]]:
    """The records, and the numbers (from 1) of lines that are no records, except a last line that was cut short."""
    text = path.read_text(errors="replace") if path.exists() else ""
    records, bad = [], []
    for number, line in enumerate(text.split("\n"), start=1):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        if isinstance(record, dict) and isinstance(record.get("step"), int):
            records.append(record)
        elif number <= text.count("\n"):
            bad.append(number)
    return records, bad


class Display:
    """A progress bar on a terminal, from step ``first`` on; elsewhere a plain line every ``every`` steps."""

    def __init__(self, console: Console, num_steps: int, every: int, first: int = 1):
        self._console, self._num_steps, self._every, self._first = console, num_steps, every, first
        # Of the latest steps without the first, which compiles.
        self._seconds: collections.deque[float] = collections.deque(maxlen=20)
        self._bar: Progress | None = None
        if console.is_terminal:
            line = TextColumn("{task.description}", table_column=Column(no_wrap=True, overflow="crop"))
            self._bar = Progress(BarColumn(bar_width=12), line, console=console)
            self._task = self._bar.add_task("compiling the step ...", total=num_steps, completed=first - 1)

    def step(self, step: int, record: dict[str, Any]) -> None:
        """Show a finished step. Steps are counted from 1."""
        if step != self._first:
            self._seconds.append(record["step_s"])
        count = f"{step:>{len(str(self._num_steps))}}/{self._num_steps}"
        left = _remaining(self._seconds, self._num_steps - step)
        text = f"{count}  {describe(record, left, step == self._first)}"
        if self._bar is not None:
            self._bar.update(self._task, completed=step, description=text)
        elif step % self._every == 0 or step in (self._first, self._num_steps):
            self._console.print(f"step {text}", soft_wrap=True, highlight=False)

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()


def _remaining(seconds: Collection[float], num_steps: int) -> str:
    """Estimated time that ``num_steps`` more steps take by the median of these, as minutes:seconds or
    hours:minutes:seconds."""
    if not seconds:
        return "-:--"
    minutes, rest = divmod(round(statistics.median(seconds) * num_steps), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def describe(record: dict[str, Any], remaining: str, compiled: bool = False) -> str:
    """A step in one line. A step that was compiled first has no rates, because most of its time was compilation."""
    mfu = f"{record['mfu']:.1%}" if "mfu" in record else "n/a"
    memory = next((size for name, size in record.items() if name.endswith("memory_gib")), 0.0)
    speed = (
        f"{record['step_s']:.1f} s with compiling"
        if compiled
        else f"{record['tokens_per_s']:,.0f} tokens/s  {record['tflops_per_s']:.3g} TFLOP/s  MFU {mfu}  "
        f"{record['step_s']:.2f} s/step"
    )
    text = (
        f"loss {record['loss']:.3f}  {speed}  {memory:.1f} GiB  {remaining} left  "
        f"grad {record['grad_norm']:.2f}  MaxVio {record['max_vio']:.2f}"
    )
    if "device_load" in record:
        text += f"  devices {record['device_load']:.2f}"
    return f"{text}  dropped {record['drop_rate']:.1%}" if record["dropped"] else text


def _without_nonfinite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _without_nonfinite(part) for name, part in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def say(console: Console, text: str) -> None:
    """Print text as it is: rich neither wraps nor colours it."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)
