"""PyTorch's side of the parts, on the same GPU. Without PyTorch it is recorded as left out."""

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import models
from benchmarks.on_gpu.bench import TRIALS, Bench
from benchmarks.on_gpu.layer import forward_flops
from benchmarks.on_gpu.parts import DIM, EXPERTS, HIDDEN, TOKENS, UNEQUAL
from benchmarks.on_gpu.serving import BATCHES, NEW, PROMPT

Timed = Callable[[str, Callable[[], Any], float], None]


def torch_parts(bench: Bench) -> None:
    """Time products, grouped products, attention, a layer and generation in PyTorch."""
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
    for part in (functools.partial(_layer, timed), functools.partial(_generate, bench)):
        try:
            part()
        except Exception as error:
            bench.say(
                f"{part.func.__name__.strip('_')} failed",
                reason=f"{type(error).__name__}: {str(error)[:200]}",
            )


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
    attend = functools.partial(torch.nn.functional.scaled_dot_product_attention, is_causal=True, scale=0.1)
    flops = heads * TOKENS * TOKENS * float(keys + values)
    timed("sdpa: F", lambda: attend(q, k, v), flops)
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]

    def both() -> None:
        torch.autograd.grad(attend(*leaves), leaves, d)

    timed("sdpa: F and B", both, 3.5 * flops)


def _generate(bench: Bench) -> None:
    """Time transformers' ``generate`` of the same model, prompts and lengths as in ``serving``."""
    import torch

    try:
        import transformers
    except ModuleNotFoundError:
        bench.say("generate left out", reason="transformers is not installed")
        return
    sizes: dict[str, Any] = dict(
        vocab_size=102400, hidden_size=2048, intermediate_size=10944, moe_intermediate_size=1408, num_hidden_layers=9,
        first_k_dense_replace=1, num_attention_heads=16, num_key_value_heads=16, n_routed_experts=64,
        n_shared_experts=2, num_experts_per_tok=6, q_lora_rank=None, kv_lora_rank=512, qk_rope_head_dim=64,
        qk_nope_head_dim=128, v_head_dim=128,
    )  # fmt: skip
    with torch.device("cuda"):
        config = transformers.DeepseekV2Config(**sizes)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    for batch in BATCHES:
        prompts = torch.randint(0, sizes["vocab_size"], (batch, PROMPT), device="cuda")
        took = []
        for _ in range(2):
            torch.cuda.synchronize()
            began = time.perf_counter()
            with torch.no_grad():
                model.generate(
                    prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=NEW, min_new_tokens=NEW,
                    do_sample=False, eos_token_id=None, pad_token_id=0,
                )  # fmt: skip
            torch.cuda.synchronize()
            took.append(time.perf_counter() - began)
        bench.say(f"generate: batch {batch}", tokens_per_s=batch * NEW / took[-1], ms=took[-1] / NEW * 1e3)


LAYER = dict(
    vocab_size=1024, hidden_size=DIM, intermediate_size=18432, moe_intermediate_size=HIDDEN, num_hidden_layers=1,
    first_k_dense_replace=0, num_attention_heads=128, num_key_value_heads=128, n_routed_experts=EXPERTS,
    n_shared_experts=1, num_experts_per_tok=8, n_group=1, topk_group=1, q_lora_rank=1536, kv_lora_rank=512,
    qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128,
)  # fmt: skip


def transformers_layer(
    sizes: dict[str, Any], tokens: int, device: str
) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Forward, and forward with backward, of transformers' layer of DeepSeek-V3, with experts by ``_grouped_mm``."""
    import torch
    import transformers
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as modelling

    how: dict[str, Any] = dict(attn_implementation="sdpa", experts_implementation="grouped_mm")
    config = transformers.DeepseekV3Config(**sizes, **how)
    with torch.device(device):
        layer = modelling.DeepseekV3DecoderLayer(config, 0).to(torch.bfloat16)
        rotary = modelling.DeepseekV3RotaryEmbedding(config)
        for parameter in layer.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
        x = torch.randn(1, tokens, config.hidden_size, dtype=torch.bfloat16).requires_grad_()
        d, places = torch.randn_like(x), torch.arange(tokens)[None]
    turned = rotary(x, places)

    def forward() -> Any:
        out = layer(x, attention_mask=None, position_ids=places, position_embeddings=turned)
        return out[0] if isinstance(out, tuple) else out

    def both() -> Any:
        return torch.autograd.grad(forward(), [x, *layer.parameters()], d, allow_unused=True)

    return forward, both


def _layer(timed: Timed) -> None:
    import torch

    forward, both = transformers_layer(LAYER, TOKENS, "cuda")
    flops = forward_flops(models.v3(num_experts=EXPERTS, num_groups=1, top_groups=1), TOKENS)
    with torch.no_grad():
        timed("transformers' layer of DeepSeek-V3: F", forward, flops)
    timed("transformers' layer of DeepSeek-V3: F and B", both, 3 * flops)
