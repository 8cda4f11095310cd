"""Measured rates price what the compiler prices, too; what a file of them must hold."""

import json
import re

import pytest

from dualpipe_jax.inspect import overlap
from dualpipe_jax.inspect.measured import measured_rates, read_rates
from dualpipe_jax.inspect.rates import Rates

TEXT = """HloModule by_hand, is_scheduled=true

ENTRY %main (a: bf16[64,32], b: bf16[32,128]) -> bf16[64,128] {
  %a = bf16[64,32]{1,0} parameter(0)
  %b = bf16[32,128]{1,0} parameter(1)
  %n = bf16[64,32]{1,0} negate(%a), CYCLES7
  ROOT %ab = bf16[64,128]{1,0} dot(%n, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}, CYCLES50
}
"""
TEXT = re.sub(r"CYCLES(\d+)", r'backend_config={"estimated_cycles":"\1"}', TEXT)


OFTEN = '{"rates": {"all-to-all": {"bytes_per_second": 1e9, "latency": %d, "devices": %d}}}'
PRODUCT = '{"size": 8, "flops_per_second": 1}'


def cycles(rates):
    return overlap(TEXT, rates).computations["main"].cycles


def test_they_come_before_the_compilers_figures():
    """By hand: the product is 2 x 64 x 32 x 128 operations, the negation reads and writes 4096 bytes each."""
    assert cycles(Rates(memory=1024, flops=4096)) == 57, "the compiler's own"
    assert cycles(Rates(memory=1024, flops=4096, measured=True)) == 524288 / 4096 + 8192 / 1024
    assert cycles(Rates(measured=True)) == 57, "with nothing measured there is nothing better"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"^--rates \S+rates.json: cannot read it: "),
        ("[]", r"no rates in it; `dualpipe probe` on the devices writes such a file"),
        ('{"rates": {}}', "no rates in it"),
        ('{"rates": {"flops": "fast"}}', "flops is 'fast', must be a number above 0"),
        ('{"rates": {"memory": 0}}', "memory is 0, must be a number above 0"),
        ('{"rates": {"permute": {"latency": 0}}}', "permute.bytes_per_second is None, must be a number"),
        (OFTEN % (-1, 4), "all-to-all.latency is -1, must be a number from 0 on"),
        (OFTEN % (0, 1), "all-to-all.devices is 1, must be a number above 1"),
        ('{"rates": {"grouped": -2}}', "grouped is -2, must be a number above 0"),
        ('{"rates": {"flops": Infinity}}', "flops is inf, must be a number above 0"),
        ('{"rates": {"flops": 1, "guards": 2e-6}}', "guards is 2e-06, must be an object with an object"),
        (
            '{"rates": {"flops": 1, "guards": {"loop": {"taken_seconds": NaN}}}}',
            "guards.loop.taken_seconds is nan, must be a number from 0 on",
        ),
        ('{"rates": {"attention": {"forward": 1}}}', "attention.backward is None, must be a number above 0"),
        (
            '{"rates": {"products": {"8": 1}}}',
            "products is {'8': 1}, must be a list of objects with size, flops",
        ),
        ('{"rates": {"products": []}}', r"products is \[\], must be a list of objects"),
        ('{"rates": {"products": [{"size": 8}]}}', r"products\[0\].flops_per_second is None, must be"),
        (f'{{"rates": {{"products": [{PRODUCT}, {PRODUCT}]}}}}', "products has size 8 twice; leave one"),
        ('{"rates": {"all-to-all": 3}}', "all-to-all is 3, must be an object with bytes_per_second, latency"),
    ],
)
def test_files_that_hold_none(tmp_path, text, message):
    file = tmp_path / "rates.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_rates(file)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ValueError, match="cannot read it: .*No such file"):
        measured_rates(tmp_path / "rates.json", 1e9, switched=False)


def test_a_permute_alone(tmp_path):
    file = tmp_path / "rates.json"
    file.write_text(json.dumps({"rates": {"permute": {"bytes_per_second": 2e9, "latency": 1e-6}}}))
    rates = measured_rates(file, 1e9, switched=False)
    assert rates.collective("collective-permute", 4000, None) == pytest.approx(1000 + 2000)
    assert rates.collective("all-to-all", 4000, 4) is None and rates.memory is None


def test_a_permute_has_its_own_latency_beside_all_to_alls(tmp_path):
    file, exchange = tmp_path / "rates.json", {"bytes_per_second": 1e9, "latency": 9e-6, "devices": 4}
    both = {"permute": {"bytes_per_second": 2e9, "latency": 1e-6}, "all-to-all": exchange}
    file.write_text(json.dumps({"rates": both}))
    rates = measured_rates(file, 1e9, switched=False)
    assert rates.collective("collective-permute", 4000, None) == pytest.approx(1000 + 2000)
    assert rates.collective("all-to-all", 4000, 4) == pytest.approx(9000 + 4000)
    assert rates.collective("all-gather", 0, 4) == pytest.approx(9000)


def priced(tmp_path, rates, text=TEXT):
    file = tmp_path / "rates.json"
    file.write_text(json.dumps({"rates": rates}))
    report = overlap(text, measured_rates(file, 1e9, switched=True))
    return report.computations["main"].cycles


@pytest.mark.parametrize(
    ("sizes", "reached"),
    [
        ((2**17, 2**21), 2e12),  # the product is of 2**19 operations: half way, by the logarithm
        ((2**21, 2**17), 2e12),  # in any order
        ((2**20, 2**21), 1e12),  # smaller than all: as the least
        ((2**10, 2**11), 3e12),  # larger than all
    ],
)
@pytest.mark.parametrize("more", [{}, {"flops": 9e12}])
def test_products_go_by_what_was_reached_at_their_size(tmp_path, sizes, reached, more):
    """By hand, at 1 GHz: one cycle is a thousandth of 1e12 operations a second; the negation moves 8192 bytes."""
    rates = dict(zip(sorted(sizes), (1e12, 3e12), strict=True))
    products = [{"size": size, "flops_per_second": rates[size]} for size in sizes]
    found = priced(tmp_path, {"products": products, "memory": 1e15, **more})
    assert found == pytest.approx(2**19 / (reached / 1e9) + 8192 / 1e6)


KERNELS = """HloModule by_hand, is_scheduled=true

ENTRY %main (q: bf16[1,64,2,16], x: bf16[64,32], w: bf16[4,32,128]) -> bf16[64,128] {
  %q = bf16[1,64,2,16]{3,2,1,0} parameter(0)
  %x = bf16[64,32]{1,0} parameter(1)
  %w = bf16[4,32,128]{2,1,0} parameter(2)
  %f = bf16[1,64,2,16]{3,2,1,0} custom-call(%q, %q, %q), custom_call_target="__cudnn$fmhaSoftmax"
  %b = bf16[1,64,2,16]{3,2,1,0} custom-call(%q, %q, %q, %f), custom_call_target="__cudnn$fmhaSoftmaxBackward"
  ROOT %y = bf16[64,128]{1,0} custom-call(%x, %w), custom_call_target="mosaic_gpu_v2"
}
"""


def test_kernels_go_by_their_own_rates(tmp_path):
    """By hand: 2 x 2 x 64 x 64 x (16 + 16) operations forward, 5 / 2 of it backward; 2 x 64 x 32 x 128 of groups."""
    forward, grouped = 2 * 2 * 64 * 64 * 32, 2 * 64 * 32 * 128
    rates = {"memory": 1e18, "flops": 8e9}
    as_products = (forward + 2.5 * forward + grouped) / 8
    assert priced(tmp_path, rates, KERNELS) == pytest.approx(as_products, rel=1e-6)
    rates |= {"attention": {"forward": 4e9, "backward": 2e9}, "grouped": 5e9}
    own = forward / 4 + 2.5 * forward / 2 + grouped / 5
    assert priced(tmp_path, rates, KERNELS) == pytest.approx(own, rel=1e-6)
