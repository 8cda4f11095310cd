"""A layer of DeepSeek-V3 as one of 64 devices has it: 8 experts on 4,096 tokens, top 8, and no exchange.

Timed are F, B, the halves I and W of B, and F and B as one pair. As in a step, gradients of parameters are
added to float32 sums, in the same memory; for comparison also the pair whose gradients are rounded to
bfloat16 and not summed. FLOPs are the model's: two for each weight that a token meets, and the lower half of
attention's scores; I and W count as one F each, and B as two, whatever the program computes.
"""

from typing import Any, Literal

import jax
import jax.numpy as jnp

import models
from benchmarks.on_gpu.bench import Bench
from dualpipe_jax.contract import At
from dualpipe_jax.pair import side_by_side
from dualpipe_jax.parallel.wire import Payload
from dualpipe_jax.split import split_backward
from dualpipe_jax.split.run import evaluate
from models.kernels import MatmulKernel

TOKENS = 4096


def forward_flops(c: models.Config, tokens: int) -> float:
    """The FLOPs of one layer's forward."""
    keys = c.qk_nope_dim + c.qk_rope_dim
    attention = (
        c.dim * c.q_lora_rank + c.q_lora_rank * c.num_heads * keys + c.dim * (c.kv_lora_rank + c.qk_rope_dim)
    )
    attention += (
        c.kv_lora_rank * c.num_heads * (c.qk_nope_dim + c.v_head_dim) + c.num_heads * c.v_head_dim * c.dim
    )
    experts = 3 * c.dim * c.expert_hidden * (c.top_k + c.num_shared_experts) + c.dim * c.num_experts
    return tokens * (2.0 * (attention + experts) + tokens * c.num_heads * (keys + c.v_head_dim))


def layer(
    bench: Bench,
    dispatch: Literal["capacity", "dropless"],
    payload: Payload = "plain",
    matmul: MatmulKernel = "auto",
    units: str = "F B I W FB rounded",
) -> None:
    """Time F and the other ``units`` of a layer with one kind of dispatch, payload and matmul."""
    changes = dict(
        num_layers=3, num_dense_layers=0, num_mtp_layers=0, num_experts=8, num_groups=1, top_groups=1
    )
    numbers = models.v3(**changes, vocab=1024)
    factor = 1.0 if dispatch == "capacity" else None
    kernels = models.Kernels(matmul=matmul)
    model = models.deepseek(
        numbers,
        (1, 1, 1),
        dispatch=dispatch,
        capacity_factor=factor,
        payload=payload,
        kernels=kernels,
        platform="gpu",
    )
    kind = model.staged.kinds[model.layout.kinds[1]]

    def middle() -> Any:
        own = jax.tree.map(lambda leaf: leaf[1], model.init(jax.random.key(0))["stages"])
        wide = jnp.float32
        narrow = lambda a: a.astype(jnp.bfloat16) if a.ndim >= 2 and a.dtype == wide else a  # noqa: E731
        return own | {"layers": jax.tree.map(narrow, own["layers"])}

    own = bench.made(middle)
    x, dy = (
        bench.normal(2, 1, TOKENS, numbers.dim, scale=1.0),
        bench.normal(3, 1, TOKENS, numbers.dim, scale=1.0),
    )
    tokens = bench.made(lambda: jax.random.randint(jax.random.key(1), (1, TOKENS), 0, 1024, jnp.int32))

    def run(own: Any, x: Any) -> Any:
        at = At({"inputs": tokens_in, "targets": tokens_in}, jnp.int32(1), jnp.int32(0), None)
        return kind(own, {}, x, at).x

    tokens_in = jnp.zeros((1, TOKENS), jnp.int32) if bench.compiles_only else tokens
    leaves = jax.tree.leaves(own)
    floating = [jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in leaves]
    split = split_backward(run, sums=[jnp.float32 if there else None for there in floating])
    plan = split.trace(own, x)
    summed = [leaf.shape for leaf, there in zip(leaves, plan.params.has_gradient, strict=True) if there]
    sums = bench.made(lambda: [jnp.zeros(shape, jnp.float32) for shape in summed])

    def added(dparams: list[Any], sums: list[Any]) -> list[Any]:
        """Add the gradients to their sums where the plan's programs have not done so themselves."""
        pairs = enumerate(zip(sums, dparams, strict=True))
        return [made if k in plan.sums else total + made for k, (total, made) in pairs]

    def handed_in(arguments: list[Any], sums: list[Any]) -> list[Any]:
        return [*arguments[: len(arguments) - len(plan.sums)], *(sums[k] for k in plan.sums)]

    def backward(p: Any, x: Any, residuals: Any, d: Any, sums: Any) -> Any:
        arguments = handed_in(plan.backward_arguments(p, x, residuals[0], residuals[1], d), sums)
        dparams, dx = plan.backward_results(evaluate(plan.programs.backward, arguments))
        return dx, added(dparams, sums)

    def backward_weight(p: Any, x: Any, residuals: Any, stash: Any, sums: Any) -> Any:
        arguments = handed_in(plan.weight_arguments(p, x, residuals[1], stash), sums)
        return (added(evaluate(plan.programs.weight, arguments), sums),)

    def pair(p: Any, x: Any, residuals: Any, d: Any, sums: Any) -> Any:
        made, (dx, sums) = side_by_side(split.forward, (p, x), backward, (p, x, residuals, d, sums))
        return made, dx, sums

    rounding = split_backward(run)

    def rounded(p: Any, x: Any, residuals: Any, d: Any) -> Any:
        return side_by_side(rounding.forward, (p, x), rounding.backward, (p, x, residuals, d))

    forward = forward_flops(numbers, TOKENS)
    wanted, predict = units.split(), True
    name = (
        dispatch
        + ("" if payload == "plain" else f", {payload} payload")
        + ("" if matmul == "auto" else f", {matmul} products")
    )
    _, residuals = bench.time(f"{name}: F", split.forward, own, x, flops=forward, predict=predict)
    given = own, x, residuals
    if "B" in wanted:
        bench.time(f"{name}: B", backward, *given, dy, flops=2 * forward, predict=predict, sums=sums)
    if "I" in wanted:
        _, stash = bench.time(f"{name}: I", split.backward_input, *given, dy, flops=forward, predict=predict)
        bench.time(f"{name}: W", backward_weight, *given, stash, flops=forward, predict=predict, sums=sums)
    if "FB" in wanted:
        bench.time(f"{name}: FB", pair, *given, dy, flops=3 * forward, predict=predict, sums=sums)
    if "rounded" in wanted:
        name += ": FB, gradients not summed"
        bench.time(name, rounded, *given, dy, flops=3 * forward, predict=predict)
