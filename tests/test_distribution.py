"""What is handed out beside the code: the licence, how to cite, types for those who check theirs."""

import hashlib
import re
import tomllib
from pathlib import Path

import yaml

import dualpipe_jax

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
APACHE_2 = "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30"
"""SHA-256 of https://www.apache.org/licenses/LICENSE-2.0.txt."""


def test_the_licence_is_apaches_to_the_letter():
    text, owner = (ROOT / "LICENSE").read_text(), "Copyright 2026 The dualpipe-jax authors"
    assert text.count(owner) == 1
    blank = text.replace(owner, "Copyright [yyyy] [name of copyright owner]")
    assert hashlib.sha256(blank.encode()).hexdigest() == APACHE_2
    assert PROJECT["project"]["license"] == "Apache-2.0"


def test_the_citation_is_of_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= set(citation), "what the format requires"
    assert citation["title"] == PROJECT["project"]["name"]
    assert citation["version"] == dualpipe_jax.__version__
    assert citation["license"] == PROJECT["project"]["license"]


def test_the_package_says_that_it_is_typed():
    """PEP 561: a type checker reads annotations only of packages that hold this file, so it must be installed too."""
    assert (Path(dualpipe_jax.__file__).parent / "py.typed").read_bytes() == b""
    assert "py.typed" in PROJECT["tool"]["setuptools"]["package-data"]["dualpipe_jax"]


def test_the_page_on_installing_says_what_every_extra_is_for():
    page = (ROOT / "docs" / "quickstart.md").read_text()
    (body,) = re.findall(r"^\| extra \|.*\n((?:\|.*\n)+)", page, re.M)
    table = re.findall(r"^\| (`.+?`) \|", body, re.M)
    named = [name for row in table for name in re.findall(r"`([^`]+)`", row)]
    assert sorted(named) == sorted(PROJECT["project"]["optional-dependencies"])
