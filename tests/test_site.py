"""What makes the site: its link check finds what is wrong, docstrings' lists are lists. `scripts/docs` builds it."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.loading import load

ROOT = Path(__file__).parent.parent


links, docstrings = load(ROOT / "scripts" / "_links.py"), load(ROOT / "docs" / "docstrings.py")


@pytest.fixture
def site(tmp_path):
    """Two pages, and all that is right about links between them."""
    (tmp_path / "sub").mkdir()
    (tmp_path / "a%b.png").touch()
    (tmp_path / "index.html").write_text(
        '<h1 id="top">x</h1><a href="#top">x</a><a href="sub/page.html#there">x</a><img src="a%25b.png">'
        '<a href="sub/page.html#old">x</a>'
        '<a href="https://example.org/nowhere">x</a><a href="mailto:a@b.c">x</a><img src="data:image/png;base64,AA">'
    )
    other = '<p id="there"><a href="../index.html">x</a><a name="old"></a>'
    (tmp_path / "sub" / "page.html").write_text(other)
    return tmp_path


def test_a_site_whose_links_lead_somewhere(site):
    assert links.problems(site) == []
    command = [sys.executable, "scripts/_links.py", site]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "every link inside it leads somewhere" in done.stderr


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ('<a href="page2.html">', "page2.html: no such file"),
        ('<a href="sub/page.html#here">', "sub/page.html#here: no such place in that page"),
        ('<a href="#bottom">', "#bottom: no such place in that page"),
        ('<a href="../up.html">', "../up.html: leads out of the site"),
        ('<a href="sub/">', "sub/: no such file"),
        ('<img src="https://example.org/x.png">', "https://example.org/x.png: loaded from elsewhere"),
        ('<script src="//example.org/x.js"></script>', "//example.org/x.js: loaded from elsewhere"),
        ('<link rel="stylesheet" href="https://example.org/x.css">', "x.css: loaded from elsewhere"),
        ('<iframe src="player.html"></iframe>', "player.html: no such file"),
    ],
)
def test_what_is_wrong_is_named(site, wrong, why):
    (site / "index.html").write_text((site / "index.html").read_text() + wrong)
    (found,) = links.problems(site)
    assert found.startswith("index.html: ") and found.endswith(why)
    done = subprocess.run([sys.executable, ROOT / "scripts/_links.py", site], capture_output=True, text=True)
    assert done.returncode == 1 and why in done.stderr


def test_a_folder_that_is_no_site(tmp_path):
    command = [sys.executable, ROOT / "scripts/_links.py", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and "no index.html there: not a built site" in done.stderr


def test_lists_in_docstrings_become_definition_lists():
    given = """What it does: this.

params: a tree, which
  goes on here.
x, y: arrays.

What they are for:
  TPU: one.
    More of it.
  GPU: two.

Source: one line
and another, which is a sentence.

Rank: a sentence by itself.

Arguments:
  a: stays.
  b: as it is."""
    wanted = """What it does: this.

params
  a tree, which
  goes on here.
x, y
  arrays.


What they are for:

  TPU
    one.
    More of it.
  GPU
    two.


Source: one line
and another, which is a sentence.

Rank: a sentence by itself.

Arguments:
  a: stays.
  b: as it is."""
    assert docstrings.listed(given.splitlines()) == wanted.splitlines()
