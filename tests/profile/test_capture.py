"""A trace is read back, under whatever filters of warnings its reader has set."""

import os
import subprocess
import sys

ON_CPU = os.environ | {"JAX_PLATFORMS": "cpu"}
TRACED_AND_READ = """
import pathlib, sys, warnings
import jax, jax.numpy as jnp
from dualpipe_jax.profile import Profiler, read_events

folder = pathlib.Path(sys.argv[1])
profiler = Profiler(folder, num_steps=1, skip=0)
profiler.before(0)
jax.block_until_ready(jax.jit(lambda x: x @ x)(jnp.ones((64, 64))))
assert profiler.after()
warnings.simplefilter("error")
assert any(event.program for event in read_events(folder))
assert warnings.filters[0][0] == "error", "the filters are as they were"
"""


def test_a_trace_is_read_where_warnings_are_errors(tmp_path):
    """In a process of its own: JAX 0.12's reader warned, once in a process, and then aborted it."""
    code = [sys.executable, "-c", TRACED_AND_READ, str(tmp_path)]
    done = subprocess.run(code, capture_output=True, text=True, env=ON_CPU)
    assert done.returncode == 0, done.stderr
