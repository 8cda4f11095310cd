"""A compiled program that JAX's compilation cache gave back."""

import os
import subprocess
import sys

import pytest

STEPS = """
import jax
from jax.experimental.serialize_executable import deserialize_and_load, serialize

from dualpipe_jax import make_mesh, pipeline_value_and_grad
from dualpipe_jax.schedule import chimera
from tests.engine import models

params, specs = models.init("moe", 4)
step = pipeline_value_and_grad(
    models.model("moe"), chimera(4, 8), make_mesh(4, 2), param_specs=specs, has_aux=True
)
data = models.data(8)
again = deserialize_and_load(*serialize(step.lower(params, *data).compile()))
for _ in range(20):
    models.assert_same(again(params, *data), models.oracle("moe", 4, 8))
"""


@pytest.mark.slow
def test_a_program_that_was_read_back_meets_in_the_same_order():
    """In a process of its own, as what is wrong there never ends: with a conditional for each channel two of two."""
    # What is read from the cache cannot be written again.
    environ = os.environ | {"JAX_ENABLE_COMPILATION_CACHE": "false"}
    subprocess.run([sys.executable, "-c", STEPS], check=True, timeout=300, env=environ)
