"""What Orbax has to say of files that it cannot read or write, in a line."""

import functools
import logging
import re
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

RAISED = "Failed to json parse", "Failed to get metadata for", "TensorStore data files not found"
"""What it logs, without a traceback, before it raises."""


def reason(error: BaseException) -> str:
    """Why, of an exception and those that led to it: the first one's kind and words, a line of at most 240 characters.

    What TensorStore opened on the way, and how, is left out.
    """
    while (
        earlier := error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    ) is not None:
        error = earlier
    lines = re.split(r" \[[a-z_]+(?:\[\d+\])?=", str(error))[0].strip().splitlines()
    text = re.sub(r'Error opening "\w+" driver: ', "", lines[0] if lines else "")
    text = text if len(text) <= 200 else f"{text[:80]} ... {text[-115:]}"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


@contextmanager
def quiet() -> Iterator[None]:
    """Print nothing of what Orbax raises as well: tracebacks in its log, and of the reads that it abandons.

    For whoever says why, see ``reason``. All else is printed as before.
    """
    _ignore_abandoned_reads()
    logs = logging.getLogger("absl"), logging.getLogger()
    for log in logs:
        log.addFilter(_is_news)
    try:
        yield
    finally:
        for log in logs:
            log.removeFilter(_is_news)


def _is_news(record: logging.LogRecord) -> bool:
    """Whether it is more than what Orbax raises as well: told by the traceback, for a logger that is older than absl
    takes absl's own file for that of whoever logs."""
    error = record.exc_info[1] if record.exc_info else None
    if error is None:
        return not any(words in str(record.msg) for words in RAISED)
    return not any("orbax" in place for place in (record.pathname, *_files(error)))


def _is_awaited(record: logging.LogRecord) -> bool:
    """Whether what asyncio says of a coroutine or a future that nobody awaits is of others than Orbax."""
    places = [record.getMessage(), *_files(record.exc_info[1] if record.exc_info else None)]
    return not any(name in place.lower() for name in ("orbax", "tensorstore", "ocdbt") for place in places)


def _files(error: BaseException | None) -> list[str]:
    return [
        frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__ if error else None)
    ]


@functools.cache
def _ignore_abandoned_reads() -> None:
    """Say nothing of reads that nobody awaits: where one fails Orbax waits for no other, and they end at any time."""
    logging.getLogger("asyncio").addFilter(_is_awaited)
    warnings.filterwarnings("ignore", "coroutine '_read_array_index.*' was never awaited", RuntimeWarning)
    before = sys.unraisablehook

    def hook(found: Any) -> None:
        files = _files(found.exc_value)
        files.append(getattr(getattr(found.object, "cr_code", None), "co_filename", ""))
        late = "Event loop is closed" in str(found.exc_value) and any("uvloop" in file for file in files)
        if not late and not any("orbax" in file for file in files):
            before(found)

    sys.unraisablehook = hook
