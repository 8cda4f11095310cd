"""Every test runs on eight virtual CPU devices, with strict dtype promotion."""

import collections
import gc
import os
import shutil
import signal

from tests.chosen import changed_files, in_part, touched
from tests.quick import COMPILED, COMPILED_BYTES, QUICK, ROOT

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = " ".join(
    [
        QUICK,
        os.environ.get("XLA_FLAGS", ""),
        "--xla_force_host_platform_device_count=8",
        # Virtual devices share the machine's cores; on a busy one a permute may wait long for the last of them.
        "--xla_cpu_collective_call_warn_stuck_timeout_seconds=120",
        "--xla_cpu_collective_call_terminate_timeout_seconds=600",
    ]
)
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(COMPILED)  # the processes that tests start share it as well
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # As a shell has it for what it runs in the background. What is started here would ignore it, too, and a test that
    # interrupts would wait for ever.
    signal.signal(signal.SIGINT, signal.default_int_handler)
# However little a program took: a test that runs one operation at a time compiles dozens.
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"

import hypothesis
import jax
import pytest

hypothesis.settings.register_profile("however long it takes", deadline=None)
hypothesis.settings.load_profile("however long it takes")
jax.config.update("jax_numpy_dtype_promotion", "strict")


def pytest_addoption(parser):
    group = parser.getgroup("dualpipe-jax")
    group.addoption("--all", action="store_true", help="the slow tests too")
    group.addoption(
        "--changed",
        nargs="?",
        const="HEAD",
        metavar="REVISION",
        help="only the tests of what differs from a revision (HEAD if none is given): those of the changed files' own "
        "rooms, and those that import a changed module themselves",
    )
    group.addoption("--part", metavar="K/N", help="only every N-th test, from the K-th on")


def pytest_configure(config):
    if (since := config.getoption("--changed")) is not None:
        try:
            config.touched = touched(ROOT, changed_files(ROOT, since))
        except ValueError as error:
            raise pytest.UsageError(str(error)) from None
    if (part := config.getoption("--part")) is not None:
        try:
            in_part([], part)  # before workers are started: each would fail on its own
        except ValueError as error:
            raise pytest.UsageError(str(error)) from None
    is_worker = hasattr(config, "workerinput")
    if not is_worker and sum(file.stat().st_size for file in COMPILED.glob("*")) > COMPILED_BYTES:
        shutil.rmtree(COMPILED)


def pytest_ignore_collect(collection_path, config):
    if hasattr(config, "touched") and collection_path.is_file() and collection_path not in config.touched:
        return True
    return None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Of a grid marked ``thin(n)`` all cases but every n-th are slow; slow tests wait for --all, -m or their name.

    Of those that are left --part takes some.
    """
    seen = collections.Counter()
    for item in items:
        if (mark := item.get_closest_marker("thin")) is not None:
            test = item.nodeid.partition("[")[0]
            if seen[test] % mark.args[0]:
                item.add_marker(pytest.mark.slow)
            seen[test] += 1
    if config.getoption("--all") or config.option.markexpr:
        # A long test that begins last would run alone: files that have slow ones come first.
        heavy = {item.path for item in items if item.get_closest_marker("slow")}
        items.sort(key=lambda item: item.path not in heavy)
        chosen = items
    else:
        named = [argument for argument in config.args if "::" in argument]
        chosen = [item for item in items if not item.get_closest_marker("slow") or _named(item.nodeid, named)]
    if (part := config.getoption("--part")) is not None:
        chosen = in_part(chosen, part)
    if left := set(items).difference(chosen):
        config.hook.pytest_deselected(items=list(left))
        items[:] = chosen


def _named(nodeid, named):
    """Whether a test stands on the command line itself: `tests/x/test_y.py::test_z`, with or without its case."""
    return any(nodeid == name or nodeid.startswith((name + "[", name + "::")) for name in named)


def pytest_collection_finish():
    # Thousands of collected tests live to the end: looked through at each collection, they took a tenth of the time.
    gc.collect()
    gc.freeze()
    gc.set_threshold(200_000, 20, 50)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item, nextitem):
    """JAX keeps every program that it compiled: with those of all files a worker grew to six GiB."""
    if nextitem is None or nextitem.path != item.path:
        jax.clear_caches()


@pytest.fixture(autouse=True)
def no_word_of_what_takes_long(monkeypatch):
    """On a busy machine anything may, and commands would say so beside what tests expect of them."""
    monkeypatch.setattr("dualpipe_jax.command.output._QUIET_SECONDS", 3600.0)
