"""What the README and the page to start with show is true."""

import contextlib
import io
import pathlib
import re

import jax
import numpy as np
import pytest

from dualpipe_jax import reference_value_and_grad, sequential_value_and_grad, unplace_stages

ROOT = pathlib.Path(__file__).parent.parent
README, START = (ROOT / "README.md").read_text(), (ROOT / "docs" / "quickstart.md").read_text()

EXAMPLES = re.findall(r"```python\n(.*?)```", START, re.DOTALL)
(KINDS,) = [block for block in EXAMPLES if "import Out, Pipeline, StagedModel" in block]


@pytest.fixture(scope="module")
def example():
    """The names that the first example leaves."""
    assert len(EXAMPLES[0].splitlines()) <= 25
    names = {}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(EXAMPLES[0], names)
    return names | {"printed": printed.getvalue()}


def test_the_readme_has_the_first_example_of_its_page():
    assert re.findall(r"```python\n(.*?)```", README, re.DOTALL) == EXAMPLES[:1]


def test_the_readme_is_short():
    assert len(README.splitlines()) <= 90


def test_the_example_runs_and_is_right(example):
    params = example["params"] | {"stages": unplace_stages(example["params"]["stages"], example["schedule"])}
    model = example["PipelineModel"](example["embed"], example["stage"], example["head_loss"])
    tokens = example["tokens"]
    # One long sum, which rounds 5e-6 off unless it is taken in vectors.
    plain = jax.jit(sequential_value_and_grad(model), compiler_options={"xla_backend_optimization_level": 2})
    loss, _ = plain(jax.device_get(params), tokens, jax.numpy.roll(tokens, -1, axis=-1))
    np.testing.assert_allclose(example["loss"], loss, rtol=1e-6)
    assert example["printed"] == "4.605\n"


def test_the_example_of_kinds_goes_on_from_there_and_is_right(example):
    names = dict(example)
    exec(KINDS, names)
    pipeline, batch = names["pipeline"], {"tokens": names["tokens"]}
    params = jax.device_get(pipeline.unplace(names["params"]))
    (loss, report), grads = jax.jit(reference_value_and_grad(names["model"], num_parts=2))(params, batch)
    np.testing.assert_allclose(names["loss"], loss, rtol=1e-6)
    np.testing.assert_allclose(names["report"].metrics["squares"], report.metrics["squares"], rtol=1e-5)
    found = jax.tree.leaves(jax.device_get(pipeline.unplace(names["grads"])))
    for got, want in zip(found, jax.tree.leaves(grads), strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=2e-6 * np.abs(want).max())


def test_the_two_commands_stand_first():
    first = README.split("```")[1].split()
    assert first[0] == "scripts/train" and "scripts/test" in first
