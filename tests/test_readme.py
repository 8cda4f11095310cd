"""What the README shows is true."""

import pathlib
import re

import jax
import numpy as np

from dualpipe_jax import sequential_value_and_grad, unplace_stages
from dualpipe_jax.schedule import CostModel, dualpipe, format_grid

README = (pathlib.Path(__file__).parent.parent / "README.md").read_text()


def test_the_example_runs_and_is_right():
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(example.splitlines()) <= 25
    names = {}
    exec(example, names)
    params = names["params"] | {"stages": unplace_stages(names["params"]["stages"], names["schedule"])}
    model = names["PipelineModel"](names["embed"], names["stage"], names["head_loss"])
    tokens = names["tokens"]
    plain = jax.jit(sequential_value_and_grad(model))
    loss, _ = plain(jax.device_get(params), tokens, jax.numpy.roll(tokens, -1, axis=-1))
    np.testing.assert_allclose(names["loss"], loss, rtol=1e-6)


def test_the_drawing_is_what_the_code_prints():
    assert format_grid(dualpipe(4, 10), CostModel(FB=2)).split("\n", 1)[1] in README


def test_the_two_commands_stand_first():
    first = README.split("```")[1].split()
    assert first[0] == "scripts/train" and "scripts/test" in first
