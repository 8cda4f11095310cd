"""Reports of Orbax about files that it cannot read or write, reduced to one line."""

import functools
import logging
import re
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

LOGGED_AND_RAISED = "Failed to json parse", "Failed to get metadata for", "TensorStore data files not found"
"""Words of the messages that Orbax logs without a traceback before it raises."""


def root_cause(error: BaseException) -> str:
    """Return, in one line, the type and message of the first of the exceptions that led to this one.

    The message is cut to 200 characters. TensorStore's account of what it opened, and how, is left out.
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
def silence_orbax() -> Iterator[None]:
    """Print none of the errors that Orbax also raises: tracebacks in its log, and those of reads that it abandons.

    The caller reports the error itself, see ``root_cause``. Everything else is printed as before.
    """
    _ignore_abandoned_reads()
    loggers = logging.getLogger("absl"), logging.getLogger()
    # A context within another one must not end that one's silence.
    logs = [log for log in loggers if _is_not_raised_again not in log.filters]
    for log in logs:
        log.addFilter(_is_not_raised_again)
    try:
        yield
    finally:
        for log in logs:
            log.removeFilter(_is_not_raised_again)


def _is_not_raised_again(record: logging.LogRecord) -> bool:
    """Return whether a log record says more than the error that Orbax also raises.

    The traceback shows where the record comes from. Its ``pathname`` alone does not: a logger created before absl's
    reports absl's own file as the caller's.
    """
    error = record.exc_info[1] if record.exc_info else None
    if error is None:
        return not any(words in str(record.msg) for words in LOGGED_AND_RAISED)
    return not any("orbax" in place for place in (record.pathname, *_files(error)))


def _is_not_from_orbax(record: logging.LogRecord) -> bool:
    """Return whether asyncio's message about something that nobody awaits concerns other code than Orbax's."""
    places = [record.getMessage(), *_files(record.exc_info[1] if record.exc_info else None)]
    return not any(name in place.lower() for name in ("orbax", "tensorstore", "ocdbt") for place in places)


def _files(error: BaseException | None) -> list[str]:
    return [
        frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__ if error else None)
    ]


@functools.cache
def _ignore_abandoned_reads() -> None:
    """Silence reads that nobody awaits: if one fails, Orbax does not wait for the others, which end at any time."""
    logging.getLogger("asyncio").addFilter(_is_not_from_orbax)
    warnings.filterwarnings("ignore", "coroutine '_read_array_index.*' was never awaited", RuntimeWarning)
    before = sys.unraisablehook

    def unraisable_hook(found: Any) -> None:
        files = _files(found.exc_value)
        files.append(getattr(getattr(found.object, "cr_code", None), "co_filename", ""))
        late = "Event loop is closed" in str(found.exc_value) and any("uvloop" in file for file in files)
        if not late and not any("orbax" in file for file in files):
            before(found)

    sys.unraisablehook = unraisable_hook
