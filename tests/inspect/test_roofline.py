"""Arithmetic and traffic of instructions, against numbers worked out by hand."""

import dataclasses

import pytest

from dualpipe_jax.inspect import read
from dualpipe_jax.inspect.rates import Rates
from dualpipe_jax.inspect.roofline import flops, traffic

TEXT = """HloModule by_hand, is_scheduled=true

%slot (pool: bf16[5,100,8], i: s32[]) -> f32[1,100,8] {
  %pool = bf16[5,100,8]{2,1,0} parameter(0)
  %i = s32[] parameter(1)
  %zero = s32[] constant(0)
  %s = bf16[1,100,8]{2,1,0} dynamic-slice(%pool, %i, %zero, %zero), dynamic_slice_sizes={1,100,8}
  ROOT %c = f32[1,100,8]{2,1,0} convert(%s)
}

%put (pool: bf16[5,100,8], x: f32[100,8], i: s32[]) -> bf16[5,100,8] {
  %pool.1 = bf16[5,100,8]{2,1,0} parameter(0)
  %x.1 = f32[100,8]{1,0} parameter(1)
  %i.1 = s32[] parameter(2)
  %zero.1 = s32[] constant(0)
  %h = bf16[100,8]{1,0} convert(%x.1)
  %u = bf16[1,100,8]{2,1,0} bitcast(%h)
  ROOT %d = bf16[5,100,8]{2,1,0} dynamic-update-slice(%pool.1, %u, %i.1, %zero.1, %zero.1)
}

%product (a: bf16[6,16,32], b: bf16[6,64,32]) -> (bf16[6,16,64], f32[6]) {
  %a = bf16[6,16,32]{2,1,0} parameter(0)
  %b = bf16[6,64,32]{2,1,0} parameter(1)
  %ab = bf16[6,16,64]{2,1,0} dot(%a, %b), lhs_batch_dims={0}, lhs_contracting_dims={2}, rhs_contracting_dims={2}
  %e = f32[6]{0} constant({1,2,3,4,5,6})
  ROOT %both = (bf16[6,16,64], f32[6]) tuple(%ab, %e)
}

ENTRY %main (p: bf16[5,100,8], x: f32[100,8], a: bf16[6,16,32], b: bf16[6,64,32]) -> f32[] {
  %p = bf16[5,100,8]{2,1,0} parameter(0)
  %x = f32[100,8]{1,0} parameter(1)
  %am = bf16[6,16,32]{2,1,0} parameter(2)
  %bm = bf16[6,64,32]{2,1,0} parameter(3)
  %k = s32[] constant(3)
  %got = f32[1,100,8]{2,1,0} fusion(%p, %k), kind=kLoop, calls=%slot
  %kept = bf16[5,100,8]{2,1,0} fusion(%p, %x, %k), kind=kLoop, calls=%put
  %m = (bf16[6,16,64], f32[6]) fusion(%am, %bm), kind=kCustom, calls=%product
  %sum = f32[100,8]{1,0} add(%x, %x)
  %gemm = (bf16[100,64]{1,0}, s8[4096]{0}) custom-call(%x, %bm), custom_call_target="__cublas$gemm", \
backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}}
  %flash = bf16[100,8]{1,0} custom-call(%x), custom_call_target="tpu_custom_call", \
backend_config={"custom_call_config":{"cost_estimate":{"flops":"5000","transcendentals":"7","bytes_accessed":"900"}}}
  %q = bf16[2,64,4,24]{3,2,1,0} parameter(4)
  %k.1 = bf16[2,32,4,24]{3,2,1,0} parameter(5)
  %v = bf16[2,32,4,16]{3,2,1,0} parameter(6)
  %fmha = (bf16[2,4,64,16]{3,1,2,0}, f32[2,4,64]{2,1,0}, u8[0]{0}) custom-call(%q, %k.1, %v), \
custom_call_target="__cudnn$fmhaSoftmax", backend_config={"cudnn_fmha_backend_config": {"mask_type": "NO_MASK", \
"bmm1_dot_dimension_numbers": {"lhs_contracting_dimensions": ["3"]}}}
  %back = (bf16[2,4,64,24]{3,1,2,0}, u8[0]{0}) custom-call(%q, %k.1, %v), \
custom_call_target="__cudnn$fmhaSoftmaxBackward", backend_config={"cudnn_fmha_backend_config": {"mask_type": "CAUSAL"}}
  ROOT %end = f32[] constant(0)
}
"""
MODULE = read(TEXT)
MAIN = MODULE.computations["main"]


def test_flops():
    attention = 2 * (2 * 4 * 64 * 32)
    wanted = {"m": 2 * 6 * 16 * 64 * 32, "gemm": 2 * 100 * 64 * 8, "got": 0, "sum": 0, "flash": 5000}
    wanted |= {"fmha": attention * (24 + 16), "back": attention * (3 * 24 + 2 * 16) // 2}  # the latter causal
    assert {name: flops(MODULE, MAIN, MAIN.by_name[name]) for name in wanted} == wanted


def test_traffic():
    wanted = {
        "got": 4 + 100 * 8 * 2 + 100 * 8 * 4,  # the index, one slot of five, the result
        "kept": 4 + 100 * 8 * 4 + 100 * 8 * 2,  # the index, x, one slot
        "m": 2 * (6 * 16 * 32 + 6 * 64 * 32 + 6 * 16 * 64) + 6 * 4,
        "sum": 3 * 100 * 8 * 4,
        "flash": 900,  # as it states
        "gemm": 100 * 8 * 4 + 6 * 64 * 32 * 2 + 100 * 64 * 2,  # not the room that the library works in
    }
    assert {name: traffic(MODULE, MAIN, MAIN.by_name[name]) for name in wanted} == wanted


CONVOLUTIONS = """HloModule tpu, is_scheduled=true

ENTRY %main (a: bf16[4,128,256], b: bf16[256,512], c: bf16[8,128,256], d: bf16[8,256,64], e: bf16[16,128,256], \
f: bf16[2,128,256], g: bf16[1,10,3], h: bf16[4,3,5]) -> f32[] {
  %a = bf16[4,128,256]{2,1,0} parameter(0)
  %b = bf16[256,512]{1,0} parameter(1)
  %c = bf16[8,128,256]{2,1,0} parameter(2)
  %d = bf16[8,256,64]{2,1,0} parameter(3)
  %e = bf16[16,128,256]{2,1,0} parameter(4)
  %f = bf16[2,128,256]{2,1,0} parameter(5)
  %g = bf16[1,10,3]{2,1,0} parameter(6)
  %h = bf16[4,3,5]{2,1,0} parameter(7)
  %b1 = bf16[256,512,1]{1,0,2} bitcast(%b)
  %one = bf16[4,128,512]{2,1,0} convolution(%a, %b1), window={size=1}, dim_labels=0bf_io0->0bf
  %plain = bf16[128,512]{1,0} convolution(%k, %b), dim_labels=bf_io->bf
  %k = bf16[128,256]{1,0} bitcast(%a)
  %batched = bf16[8,128,64]{2,1,0} convolution(%c, %d), window={size=8 stride=7 lhs_dilate=8}, dim_labels=0bf_0io->0bf
  %outer = bf16[2,128,16,128]{3,2,1,0} convolution(%f, %e), window={size=1x16 pad=0_0x15_15 rhs_reversal=0x1}, \
dim_labels=0bf1_1oi0->0b1f
  %true = bf16[1,10,5]{2,1,0} convolution(%g, %h), window={size=4 pad=1_2}, dim_labels=b0f_0io->b0f
  ROOT %end = f32[] constant(0)
}
"""


def test_convolutions_that_tpus_have_for_products():
    module = read(CONVOLUTIONS)
    main = module.computations["main"]
    wanted = {
        "one": 2 * 4 * 128 * 256 * 512,
        "plain": 2 * 128 * 256 * 512,
        "batched": 2 * 8 * 128 * 256 * 64,  # the window meets one element of the dilated input
        "true": 2 * 3 * 5 * (4 * 10 - 1 - 1 - 2),  # places beyond the ends are no work
    }
    assert {name: flops(module, main, main.by_name[name]) for name in wanted} == wanted


def test_kernels_that_reach_less():
    plain = Rates(memory=1e9, flops=100.0)
    slower = dataclasses.replace(plain, kernel_flops={"fmha.*Backward": 25.0, "fmha": 50.0})
    for name, times in {"fmha": 2, "back": 4, "gemm": 1}.items():
        instruction = MAIN.by_name[name]
        whole = plain.instruction(MODULE, MAIN, instruction)
        assert slower.instruction(MODULE, MAIN, instruction) == pytest.approx(times * whole)


def test_a_product_takes_its_own_bytes_beside_its_arithmetic():
    """And what is no product does not; memory may be slower than both together."""
    plain = Rates(memory=100.0, flops=100.0)
    inside = dataclasses.replace(plain, operands=50.0)
    arithmetic, moved = 2 * 6 * 16 * 64 * 32, 2 * (6 * 16 * 32 + 6 * 64 * 32 + 6 * 16 * 64) + 6 * 4
    product = MAIN.by_name["m"]
    assert plain.instruction(MODULE, MAIN, product) == pytest.approx(arithmetic / 100)
    assert inside.instruction(MODULE, MAIN, product) == pytest.approx(arithmetic / 100 + moved / 50)
    slow = dataclasses.replace(inside, memory=1.0)
    assert slow.instruction(MODULE, MAIN, product) == pytest.approx(moved)
    added = MAIN.by_name["sum"]
    assert inside.instruction(MODULE, MAIN, added) == plain.instruction(MODULE, MAIN, added) > 0
