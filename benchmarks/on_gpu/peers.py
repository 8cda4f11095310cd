"""PyTorch's side of the parts, on the same GPU. Left out by name where there is no PyTorch."""

import statistics
import time
from collections.abc import Callable
from typing import Any

from benchmarks.on_gpu.bench import TRIALS, Bench
from benchmarks.on_gpu.parts import DIM, EXPERTS, HIDDEN, TOKENS, UNEQUAL

Timed = Callable[[str, Callable[[], Any], float], None]


def torch_parts(bench: Bench) -> None:
    """Products, attention and grouped products."""
    if bench.compiles_only:
        bench.say("left out", reason="it runs, and compiles for nothing that is not here")
        return
    try:
        import torch
    except ModuleNotFoundError:
        bench.say("left out", reason="PyTorch is not installed")
        return
    if not torch.cuda.is_available():
        bench.say("left out", reason="this PyTorch sees no GPU")
        return

    def normal(*shape: int) -> Any:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16) / 8

    def timed(name: str, run: Callable[[], Any], flops: float) -> None:
        try:
            for _ in range(3):
                run()
            torch.cuda.synchronize()
            trials = []
            for _ in range(TRIALS):
                started = time.perf_counter()
                for _ in range(20):
                    run()
                torch.cuda.synchronize()
                trials.append((time.perf_counter() - started) / 20)
        except Exception as error:
            bench.say(name, failed=f"{type(error).__name__}: {str(error)[:200]}")
            return
        took = statistics.median(trials)
        bench.say(name, ms=took * 1e3, tflops=flops / took / 1e12)

    _products(timed, normal)
    _grouped(timed, normal)
    _attention(timed, normal)


def _products(timed: Timed, normal: Callable[..., Any]) -> None:
    a, b = normal(8192, 8192), normal(8192, 8192)
    timed("8192 x 8192 x 8192", lambda: a @ b, 2.0 * 8192**3)


def _grouped(timed: Timed, normal: Callable[..., Any]) -> None:
    import torch

    offsets = torch.cumsum(torch.tensor(UNEQUAL.tolist(), device="cuda"), 0).to(torch.int32)
    x, w, dy = normal(EXPERTS * TOKENS, DIM), normal(EXPERTS, DIM, HIDDEN), normal(EXPERTS * TOKENS, HIDDEN)
    flops = 2.0 * EXPERTS * TOKENS * DIM * HIDDEN
    timed("_grouped_mm: F", lambda: torch._grouped_mm(x, w, offsets), flops)
    timed("_grouped_mm: dx", lambda: torch._grouped_mm(dy, w.transpose(1, 2), offsets), flops)
    timed("_grouped_mm: dw", lambda: torch._grouped_mm(x.t(), dy, offsets), flops)


def _attention(timed: Timed, normal: Callable[..., Any]) -> None:
    import torch

    heads, keys, values = 128, 192, 128
    q, k, v, d = (normal(1, heads, TOKENS, width) for width in (keys, keys, values, values))
    attend = torch.nn.functional.scaled_dot_product_attention
    flops = heads * TOKENS * TOKENS * float(keys + values)
    timed("sdpa: F", lambda: attend(q, k, v, is_causal=True, scale=0.1), flops)
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]

    def both() -> None:
        torch.autograd.grad(attend(*leaves, is_causal=True, scale=0.1), leaves, d)

    timed("sdpa: F and B", both, 3.5 * flops)
