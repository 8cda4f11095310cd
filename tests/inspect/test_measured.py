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
