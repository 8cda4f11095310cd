"""The lists of mutants against the tests they name; scripts/mutants applies them, CI a thirtieth at a time."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def test_each_edit_fits_the_code_as_it_is():
    done = subprocess.run(
        [sys.executable, "scripts/_mutants.py", "--list"], cwd=ROOT, capture_output=True, text=True
    )
    stale = [line for line in done.stdout.splitlines() if "STALE" in line]
    assert (stale, done.returncode) == ([], 0), done.stderr


def test_a_word_of_no_name_is_an_error_and_does_not_mean_that_all_were_caught():
    done = subprocess.run(
        [sys.executable, "scripts/_mutants.py", "adamv"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 2 and "no name has adamv in it" in done.stderr


@pytest.mark.slow
def test_each_mutant_names_tests_that_are_there():
    done = subprocess.run(
        [sys.executable, "scripts/_mutants.py", "--collect"], cwd=ROOT, capture_output=True, text=True
    )
    assert (done.stdout, done.returncode) == ("", 0), done.stderr
