"""The page on models of one's own: its code runs from top to bottom, as a reader would type it."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dualpipe_jax

PAGE = Path(__file__).parent.parent / "docs" / "own_model.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.M | re.S)


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def page():
    """What the blocks define; compiled one after another, so that an error tells the line of the page."""
    names: dict = {}
    text = PAGE.read_text()
    for block in BLOCKS:
        if "import Pipeline" in block and not hasattr(dualpipe_jax, "Pipeline"):
            continue
        line = text[: text.index(block)].count("\n")
        exec(compile("\n" * line + block, PAGE, "exec"), names)
    return names


def test_the_page_runs(page):
    assert len(BLOCKS) == 8
    assert set(page["report"].losses) == {"lm", "balance"}


def test_dropout_follows_the_key(page):
    """Other keys give other masks; to evaluate, none gives none, and a stage is the module in its eval mode."""
    layer = page["pure_nnx"](page["Layer"], evaluate=True)
    params, x = layer.init(jax.random.key(0)), jnp.ones((2, 3, page["DIM"]))
    one, again, other = (layer.apply(params, x, key=jax.random.key(seed))[0] for seed in (1, 1, 2))
    np.testing.assert_array_equal(one, again)
    assert np.any(one != other)
    module = page["Layer"](page["nnx"].Rngs(0))
    page["nnx"].update(module, page["nnx"].State(params))
    module.eval()
    np.testing.assert_allclose(layer.apply(params, x)[0], module(x)[0], rtol=1e-6)
