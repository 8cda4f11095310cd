"""What the roofline says of programs whose times are known: a layer of DeepSeek-V3 compiled on an H200 and timed there.

Texts and times are of ``scripts/bench gpu --parts "dropless;capacity"`` on 2026-11-26, jax 0.11.2, one H200, with
metadata and the kernels' own code left out. The share that products reach and the time of a launch were chosen by the
five units of capacity; grouped products, attention and memory were timed alone.
"""

import gzip
import json
from pathlib import Path

import pytest

from dualpipe_jax.inspect import gpu_rates, overlap
from dualpipe_jax.inspect.measured import measured_rates

FOLDER = Path(__file__).parent / "texts" / "h200_layer"
MILLISECONDS = json.loads((FOLDER / "milliseconds.json").read_text())
CLOCK = 1.83e9


PARTS = {"attention": {"forward": 525e12, "backward": 391e12}, "grouped": 655e12}
"""Operations a second on that H200, docs/gpu.md: a backward is what F and B take beside F, groups are F, dx and dw."""


def predicted(unit, rates=None, **options):
    text = gzip.decompress((FOLDER / f"{unit}.hlo.gz").read_bytes()).decode()
    report = overlap(text, rates or gpu_rates("h200", **options))
    whole = max(report.computations.values(), key=lambda one: one.cycles)
    return whole.cycles / CLOCK * 1e3, whole.unpriced


@pytest.mark.parametrize("unit", MILLISECONDS)
def test_a_prediction_is_within_a_tenth_of_the_time(unit):
    found, unpriced = predicted(unit)
    assert 0.9 < found / MILLISECONDS[unit] < 1.1
    assert set(unpriced) <= {"custom-call.2"}, "the router's choice of 8 of 8 experts, and nothing else"


@pytest.mark.parametrize("unit", ["capacity_F", "capacity_W", "dropless_FB"])
def test_data_sheets_flatter(unit):
    found, _ = predicted(unit, published=True)
    assert 0.6 < found / MILLISECONDS[unit] < 0.8


def test_grouped_products_are_what_makes_dropless_slower():
    """Nine kernels of 32,768 rows of 7,168 by 2,048, slower than the batched products elsewhere."""
    difference = MILLISECONDS["dropless_FB"] - MILLISECONDS["capacity_FB"]
    ours = predicted("dropless_FB")[0] - predicted("capacity_FB")[0]
    assert difference == pytest.approx(2.15, abs=0.01) and ours == pytest.approx(difference, rel=0.25)


@pytest.mark.parametrize("unit", MILLISECONDS)
def test_rates_of_a_probe_predict_as_well_once_it_has_parts(unit, tmp_path):
    """Nothing in them was chosen by these units. Of a large product and a copy alone, all ten come out too short."""
    file = tmp_path / "rates.json"
    bare = {"memory": 0.88 * 4.8e12, "flops": 732e12}
    of = []
    for rates in (bare, bare | PARTS):
        file.write_text(json.dumps({"rates": rates}))
        found, _ = predicted(unit, measured_rates(file, CLOCK, switched=True))
        of.append(found / MILLISECONDS[unit])
    assert of[0] < 0.93 and 0.9 < of[1] < 1.1
