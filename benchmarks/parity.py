"""The model against Hugging Face transformers, as a table with a row for each case; cases and measure are the tests'.

python benchmarks/parity.py
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
sys.path.append(str(Path(__file__).parent.parent / "tests" / "models"))

import pytest
from test_parity import CASES, MORE, measure


def main():
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    rows: list[str] = []
    for name, case in (CASES | MORE).items():
        with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
            errors = measure(case, folder, patch)
        if not rows:
            rows += ["| case | " + " | ".join(errors) + " |", "| --- |" + " ---: |" * len(errors)]
            print(*rows, sep="\n")
        shown = (f"{value:.0%}" if key == "experts" else f"{value:.1e}" for key, value in errors.items())
        rows.append(f"| {name} | " + " | ".join(shown) + " |")
        print(rows[-1], flush=True)


if __name__ == "__main__":
    main()
