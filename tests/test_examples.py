"""Every example in a docstring of the library prints what it says."""

import doctest
import importlib.util
import pkgutil
from pathlib import Path

import pytest

import dualpipe_jax

MODULES = sorted(
    module.name
    for module in pkgutil.walk_packages(dualpipe_jax.__path__, "dualpipe_jax.")
    if ">>>" in Path(importlib.util.find_spec(module.name).origin).read_text()
)


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    module = importlib.import_module(name)
    flags = doctest.NORMALIZE_WHITESPACE
    assert doctest.testmod(module, optionflags=flags).failed == 0


def test_that_there_are_examples():
    assert len(MODULES) > 40
