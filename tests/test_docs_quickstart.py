"""The page to start with: its code runs from top to bottom, as a reader would type it, and says what the page shows."""

import contextlib
import io
import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

PAGE = Path(__file__).parent.parent / "docs" / "quickstart.md"
TEXT = PAGE.read_text()
FENCES = re.findall(r"^```(\w*)\n(.*?)^```$", TEXT, re.M | re.S)
BLOCKS = [body for language, body in FENCES if language == "python"]
SHOWN = [body for language, body in FENCES if language == "text"]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def page():
    """What the blocks define, and as "printed" what each said; an error tells the line of the page."""
    names: dict = {}
    printed = []
    with jax.numpy_dtype_promotion("standard"):  # optax raises floats to the power of an integer count
        for block in BLOCKS:
            line = TEXT[: TEXT.index(block)].count("\n")
            with contextlib.redirect_stdout(io.StringIO()) as said:
                exec(compile("\n" * line + block, PAGE, "exec"), names)
            printed.append(said.getvalue())
    return names | {"printed": printed}


def test_each_block_prints_what_the_page_shows_below_it(page):
    """But for the last digits of differences, which are of the machine."""
    first, differs, losses, kinds, layers, plain = page["printed"]
    assert (first, layers) == ("4.605\n", "")
    assert len(SHOWN) == 4
    digits = re.compile(r"\de-\d\d")
    assert digits.sub("", differs).startswith(digits.sub("", SHOWN[0]).rstrip(".\n"))
    for said, shown in zip((losses, kinds, plain), SHOWN[1:], strict=True):
        assert set(shown.splitlines()) <= set(said.splitlines())


def test_the_loss_falls_in_ten_steps(page):
    losses = [float(loss) for loss in re.findall(r"^step +\d+  loss ([\d.]+)$", page["printed"][2], re.M)]
    assert len(losses) == 10
    assert all(later <= sooner for sooner, later in itertools.pairwise(losses))


def test_gradients_are_compared_leaf_by_leaf(page):
    """In both comparisons no leaf is zero, and a leaf that is wrong in its fourth digit is refused."""
    with pytest.raises(AssertionError):
        page["compare"](1.0001 * np.ones(3), np.ones(3))
    assert page["printed"][1].count("differs by") == len(jax.tree.leaves(page["found"])) == 4
    assert all(np.any(leaf) for leaf in jax.tree.leaves((page["found"], page["wanted"])))
    found = jax.device_get(page["pipeline"].unplace(page["grads"]))
    assert jax.tree.structure(found) == jax.tree.structure(page["wanted"])
    for got, want in zip(jax.tree.leaves(found), jax.tree.leaves(page["wanted"]), strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * np.abs(want).max())


@pytest.mark.parametrize("way", ["export", "import jax; "])
def test_either_way_to_eight_devices_is_enough_for_the_example(way):
    """The page's own line, in a process of its own that has no other setting."""
    (line,) = [body for language, body in FENCES if not language and body.startswith(way)]
    variables = dict(re.findall(r"(\w+)=(\S+)", line)) if way == "export" else {"JAX_PLATFORMS": "cpu"}
    environ = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"} | variables
    program = BLOCKS[0] if way == "export" else line + BLOCKS[0]
    environ["PYTHONPATH"] = str(PAGE.parent.parent)
    done = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "4.605\n"), done.stderr
