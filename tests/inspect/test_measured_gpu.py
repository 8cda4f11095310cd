"""What the roofline says of programs whose times are known, beside what it said with one share for all products.

Units of a layer of DeepSeek-V3: compiled on an H200 and timed there by ``scripts/bench gpu --parts
"dropless;capacity"`` on 2026-11-26, jax 0.11.2. Steps of ``benchmarks/on_gpu/step.py``: timed there that day, compiled
again for an H200 that was not there, by the same JAX; sums pass the barrier of branches in them, as they did. Guards:
``dualpipe probe``'s ticks of five, timed on an H100 on 2026-11-22, likewise compiled again. Of all texts metadata and
the kernels' own code are left out. Products alone: the same bench, docs/gpu.md, and for 4096 x 7168 x 576 the closing
note of that session. ``gpus._HOPPER`` was chosen by all of these together, eight numbers for twenty-six times; ``pytest
-s`` prints each.
"""

import dataclasses
import functools
import gzip
import json
import math
from pathlib import Path

import pytest

from dualpipe_jax.inspect import gpu_rates, overlap, read
from dualpipe_jax.inspect.gpus import GPUS
from dualpipe_jax.inspect.measured import measured_rates
from dualpipe_jax.inspect.roofline import flops, traffic
from dualpipe_jax.pods.units import cycles_of
from dualpipe_jax.schedule.lowering.unit_key import UnitKey

TEXTS = Path(__file__).parent / "texts"
CLOCK = GPUS["h200"].clock
UNITS = json.loads((TEXTS / "h200_layer" / "milliseconds.json").read_text())
ENDS = {UnitKey(op, (end,)): 8 for op in "FIW" for end in ("first", "last")}
BACK = {UnitKey("B", ("last",)): 2, UnitKey("I", ("first",)): 1, UnitKey("W", ("first",)): 1}
PAIRS = {UnitKey("FB", ("last", "first")): 7, UnitKey("FB", ("first", "last")): 6}
AHEAD = {UnitKey("F", ("first",)): 2, UnitKey("F", ("last",)): 1}
STEPS = {
    "plain": (308.4, 0, {}),
    "one_f_one_b": (301.3, 16, {UnitKey("F", ("only",)): 8, UnitKey("B", ("only",)): 8}),
    "zb_v": (317.9, 48, ENDS),
    "dualpipe_v.switch": (335.4, 20, AHEAD | BACK | PAIRS),
}
"""Milliseconds, ticks, and how often the table runs each unit."""
GUARDS = {"loop, skipped": 59, "loop, taken": 85, "switch, skipped": 8.4, "switch, taken": 11}
"""Microseconds of a tick beyond one whose work has no guard."""
PRODUCTS = {(1, 8192, 8192, 8192): 732, (8, 4096, 7168, 2048): 692, (1, 4096, 7168, 576): 574}
GROUPED = {
    "V3, F": ("bf16[32768,7168]", "bf16[8,7168,2048]", "bf16[32768,2048]", 695),
    "V3, dx": ("bf16[32768,2048]", "bf16[8,2048,7168]", "bf16[32768,7168]", 619),
    "V3, dw": ("bf16[32768,7168]", "bf16[32768,2048]", "f32[8,7168,2048]", 654),
    "V2-Lite, F": ("bf16[24576,2048]", "bf16[64,2048,1408]", "bf16[24576,1408]", 428),
    "V2-Lite, dw": ("bf16[24576,2048]", "bf16[24576,1408]", "f32[64,2048,1408]", 278),
}
"""TFLOP/s."""
OPERATIONS = {"V3": 2 * 32768 * 7168 * 2048, "V2-Lite": 2 * 24576 * 2048 * 1408}


def one_share(rates):
    """The rates of before: products by one share, however large; no guard costs anything."""
    peak = GPUS["h200"].flops / CLOCK
    kernels = {name: rate for name, rate in rates.kernel_flops.items() if "fmha" in name}
    return dataclasses.replace(
        rates,
        flops=0.695 * peak,
        kernel_flops=kernels | {"mosaic_gpu": 0.62 * peak},
        operands=None,
        launch=5e-6 * CLOCK,
        host=0.0,
    )


@functools.cache
def text(name):
    return read(gzip.decompress((TEXTS / f"{name}.hlo.gz").read_bytes()).decode())


def whole(module, rates):
    """Seconds of a program, and what of it has no price."""
    entry = overlap(module, rates).computations[module.entry]
    return entry.cycles / CLOCK, entry.unpriced


def step(name, rates):
    module, (_, ticks, runs) = text(f"h200_step/{name}"), STEPS[name]
    return cycles_of(overlap(module, rates), module, runs, ticks) / CLOCK


def guard(name, rates):
    """Seconds of a tick's guards beyond the tick that works without one."""

    def tick(form, **options):
        module = text(f"h100_guards/{form}")
        report = overlap(module, rates, **options)
        body = next(body for body, (holder, _) in module.loops.items() if holder == module.entry)
        return report.computations[body].cycles, module, report, body

    form, _, what = name.partition(", ")
    cycles, module, report, body = tick(form, trips={".": 0})
    if form == "switch" and what == "skipped":
        cycles -= max(report.computations[branch].cycles for branch in module.branches)
    elif what == "taken":
        loops = [inner for inner, (holder, _) in module.loops.items() if holder == body]
        cycles = tick(form, trips={rf"{inner}\b": 1 for inner in loops[:1]} | {".": 0})[0]
    return (cycles - tick("bare")[0]) / CLOCK


def product(batch, rows, inner, width):
    of = {"ab": (batch, rows, inner), "bc": (batch, inner, width), "ac": (batch, rows, width)}
    a, b, c = (f"bf16[{','.join(map(str, dims))}]" for dims in of.values())
    dims = "lhs_batch_dims={0}, rhs_batch_dims={0}, lhs_contracting_dims={2}, rhs_contracting_dims={1}"
    return alone(a, b, c, f"dot(%a, %b), {dims}")


def alone(a, b, c, what):
    """A program of one instruction."""
    return read(f"""HloModule alone, is_scheduled=true

ENTRY %main (a: {a}, b: {b}) -> {c} {{
  %a = {a} parameter(0)
  %b = {b} parameter(1)
  ROOT %c = {c} {what}
}}
""")


def kernel(a, b, c):
    return alone(a, b, c, 'custom-call(%a, %b), custom_call_target="mosaic_gpu_v2"')


def ratios(change=lambda rates: rates):
    """Predicted over measured, for everything that was recorded."""
    h200, h100 = change(gpu_rates("h200")), change(gpu_rates("h100"))

    def over(module, operations, tflops):
        return whole(module, h200)[0] / (operations / (tflops * 1e12))

    return {
        "units": {name: whole(text(f"h200_layer/{name}"), h200)[0] * 1e3 / ms for name, ms in UNITS.items()},
        "steps": {name: step(name, h200) * 1e3 / ms for name, (ms, _, _) in STEPS.items()},
        "guards": {name: guard(name, h100) * 1e6 / us for name, us in GUARDS.items()},
        "products": {
            shape: over(product(*shape), 2 * math.prod(shape), tflops) for shape, tflops in PRODUCTS.items()
        },
        "grouped": {
            name: over(kernel(*arrays), OPERATIONS[name.partition(",")[0]], tflops)
            for name, (*arrays, tflops) in GROUPED.items()
        },
    }


@pytest.fixture(scope="module")
def found():
    now, before = ratios(), ratios(one_share)
    for part, each in now.items():
        print(f"\n{part}: predicted over measured, before in brackets")
        for name, ratio in each.items():
            print(f"  {name!s:24} {ratio:.3f} ({before[part][name]:.3f})")
        print(f"  root mean square of errors {off(each):.3f} ({off(before[part]):.3f})")
    return now, before


def off(each):
    """Root mean square of what ratios are off from 1."""
    return math.sqrt(sum((ratio - 1) ** 2 for ratio in each.values()) / len(each))


@pytest.mark.parametrize(
    ("part", "most"), [("units", 0.03), ("steps", 0.02), ("guards", 0.11), ("products", 0.05)]
)
def test_a_prediction_is_as_near_as_it_is_said_to_be(found, part, most):
    assert {name: ratio for name, ratio in found[0][part].items() if not 1 - most < ratio < 1 + most} == {}


def test_grouped_products_of_many_small_groups_take_longer_by_their_bytes(found):
    """dw of 64 experts of 384 rows is predicted 0.77 of its time, and was 0.46 by one share."""
    now, before = (each["grouped"] for each in found)
    assert off(now) < off(before) / 2
    assert {name for name, ratio in now.items() if not 0.88 < ratio < 1.12} == {"V2-Lite, dw"}


def test_what_a_shape_and_a_guard_cost_is_worth_having(found):
    """Whole steps, above all the engine's over plain accumulation: one share said that 1F1B saves 7.5 %, it saves 2."""
    now, before = found
    assert off(now["steps"]) < off(before["steps"]) / 3
    assert off(now["products"]) < off(before["products"])
    measured = STEPS["one_f_one_b"][0] / STEPS["plain"][0]
    ours, of_before = (
        each["one_f_one_b"] / each["plain"] * measured for each in (now["steps"], before["steps"])
    )
    assert ours == pytest.approx(measured, abs=0.01) and of_before < measured - 0.04


def test_an_unknown_call_is_named(found):
    assert {name for unit in UNITS for name in whole(text(f"h200_layer/{unit}"), gpu_rates("h200"))[1]} == {
        "custom-call.2"  # the router's choice of 8 of 8 experts, and nothing else
    }


@pytest.mark.parametrize("unit", ["capacity_F", "capacity_W", "dropless_FB"])
def test_data_sheets_flatter(unit):
    seconds, _ = whole(text(f"h200_layer/{unit}"), gpu_rates("h200", published=True))
    assert 0.6 < seconds * 1e3 / UNITS[unit] < 0.8


PARTS = {"attention": {"forward": 525e12, "backward": 391e12}, "grouped": 655e12}
"""Operations a second on that H200, docs/gpu.md: a backward is what F and B take beside F, groups are F, dx and dw."""


@pytest.mark.parametrize("unit", UNITS)
def test_rates_of_a_probe_predict_as_well_once_it_has_parts(unit, tmp_path):
    """Nothing in them was chosen by these units. Of a large product and a copy alone, all ten come out too short."""
    file = tmp_path / "rates.json"
    bare = {"memory": 0.88 * 4.8e12, "flops": 732e12}
    of = []
    for rates in (bare, bare | PARTS):
        file.write_text(json.dumps({"rates": rates}))
        seconds, _ = whole(text(f"h200_layer/{unit}"), measured_rates(file, CLOCK, switched=True))
        of.append(seconds * 1e3 / UNITS[unit])
    assert of[0] < 0.93 and 0.9 < of[1] < 1.1


def test_a_gradient_that_is_added_to_its_sum_multiplies_as_much_and_reads_the_sum():
    x, dy, dw = "bf16[256,128]", "bf16[256,384]", "f32[2,128,384]"
    adds = read(f"""HloModule alone, is_scheduled=true

ENTRY %main (x: {x}, dy: {dy}, sum: {dw}) -> {dw} {{
  %x = {x} parameter(0)
  %dy = {dy} parameter(1)
  %sum = {dw} parameter(2)
  ROOT %c = {dw} custom-call(%x, %dy, %sum), custom_call_target="mosaic_gpu_v2"
}}
""")
    for module, times in ((kernel(x, dy, dw), 1), (adds, 2)):
        entry = module.computations[module.entry]
        assert flops(module, entry, entry.root) == 2 * 256 * 128 * 384
        assert traffic(module, entry, entry.root) == 256 * (128 + 384) * 2 + times * 2 * 128 * 384 * 4
