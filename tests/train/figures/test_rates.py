"""Rates by hand; peaks from where they claim to be."""

import types

import jax
import pytest

from train.figures.rates import Peak, Rates, find_peak, measure_matmul, memory_gib, published_flops


def device(kind, platform="gpu", peak=None):
    stats = None if peak is None else {"peak_bytes_in_use": peak, "bytes_in_use": 1}
    return types.SimpleNamespace(device_kind=kind, platform=platform, memory_stats=lambda: stats)


def test_rates_of_a_step_by_hand():
    """Half a second, 1,000 tokens of 3 GFLOP each, on devices that could do 60 TFLOP/s."""
    rates = Rates(3e9, Peak(60e12, "stated"))
    assert rates.of(0.5, 1000) == pytest.approx({"tokens_per_s": 2000, "tflops_per_s": 6, "mfu": 0.1})
    assert Rates(3e9, None).of(0.5, 1000) == pytest.approx({"tokens_per_s": 2000, "tflops_per_s": 6})


def test_published_peaks():
    peaks = {
        "NVIDIA H100 80GB HBM3": 989,
        "NVIDIA H200": 989,
        "NVIDIA A100-SXM4-80GB": 312,
        "NVIDIA B200": 2250,
        "NVIDIA GB200": 2500,
    }
    peaks |= {"TPU v5 lite": 197, "TPU v5": 459, "TPU v4": 137.5}
    for kind, tera in peaks.items():
        assert published_flops(kind) == pytest.approx(tera * 1e12), kind


def test_what_is_stated_wins_and_what_nobody_knows_is_no_peak():
    two = [device("NVIDIA H100 80GB HBM3")] * 2
    assert find_peak(two, 500, True) == Peak(1e15, "stated, 500 TFLOP/s a device")
    assert find_peak(two, None, True).flops == pytest.approx(2 * 989e12)
    assert find_peak([device("cpu", "cpu")], None, False) is None
    assert find_peak([device("Some other thing")], None, True) is None


def test_a_measured_peak_says_so_and_is_of_the_whole_machine():
    peak = find_peak(jax.devices()[:4], None, True)
    assert peak.source.startswith("measured: a float32 matmul on this machine")
    assert 0.1 < peak.flops / measure_matmul() < 10, "of one matmul, not four times that"


def test_memory_is_the_fullest_devices_or_the_processes():
    assert memory_gib([device("x", peak=2**30), device("x", peak=3 * 2**30)]) == {"device_memory_gib": 3.0}
    found = memory_gib([device("x", peak=2**30), device("cpu", "cpu")])
    assert found == {"device_memory_gib": 1.0}
    held = bytearray(200 << 20)
    taken = memory_gib(jax.devices())["process_memory_gib"]
    del held
    assert 0.2 < taken < 64
