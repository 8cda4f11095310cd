"""One good call of each public function, to be spoilt one argument at a time."""

import operator
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import jax.numpy as jnp
import numpy as np

import dualpipe_jax
import models
from dualpipe_jax import balance, pair, parallel, schedule, split
from dualpipe_jax import inspect as inspector
from models import decode

ROOMS: Mapping[str, ModuleType] = {
    "dualpipe_jax": dualpipe_jax,
    "schedule": schedule,
    "split": split,
    "parallel": parallel,
    "balance": balance,
    "inspect": inspector,
    "pair": pair,
    "models": models,
    "decode": decode,
}

SMALL = schedule.one_f_one_b(2, 4)
PLACEMENT = SMALL.placement
TOPK = jnp.asarray([[0, 1], [2, 3], [1, 2], [3, 0]], jnp.int32)
X = jnp.ones((4, 3))
WEIGHTS = jnp.full((4, 2), 0.5)
HANDLE = parallel.plan_capacity(TOPK, 4)
LOADS = np.arange(1.0, 9.0).reshape(2, 4)
LAYOUT = balance.Layout(2, 4)
TINY = models.tiny(num_layers=2)
TABLE = dict(num_ranks=2, num_microbatches=4)
KEPT = np.asarray([[0, 1], [2, 3]])


def _linear(params: Any, x: Any) -> Any:
    return jnp.sum(x * params)


def _stage(own: Any, shared: Any, x: Any, at: dualpipe_jax.At) -> dualpipe_jax.Out:
    return dualpipe_jax.Out(x)


MESH = dualpipe_jax.make_mesh(2)
STAGED = dualpipe_jax.StagedModel({"all": _stage}, ("all", "all"))
PLAIN = dualpipe_jax.PipelineModel(_linear, _linear, _linear)

GOOD: Mapping[str, Mapping[str, Any]] = {
    "dualpipe_jax.make_mesh": dict(pp=2, ep=2, devices=None, dp=1),
    "dualpipe_jax.recommended_compiler_options": dict(platform="tpu", generation="v5p", ahead_of_time=True),
    "dualpipe_jax.gpu_process_environment": dict(local=0),
    "dualpipe_jax.Pipeline": dict(model=STAGED, schedule=SMALL, mesh=MESH, input_grads=False, costs=None)
    | dict(fuse_pairs=None, idle_sends=None, wide_gradients=None, divergence="loop", check_vma=False),
    "dualpipe_jax.StagedModel": dict(kinds={"all": _stage}, kind_of=("all",), weights=None),
    "dualpipe_jax.staged": dict(model=PLAIN, num_stages=2, has_aux=False),
    "dualpipe_jax.pipeline_value_and_grad": dict(model=PLAIN, schedule=SMALL, mesh=MESH, has_aux=False)
    | dict(costs=None, fuse_pairs=None, check_vma=False, debug_nans=False),
    "dualpipe_jax.place_stages": dict(stages={"w": jnp.ones((2, 3))}, schedule=SMALL, mesh=MESH),
    "dualpipe_jax.reference_loss": dict(model=STAGED, num_parts=1),
    "dualpipe_jax.sequential_loss": dict(model=PLAIN, has_aux=False),
    "schedule.chimera": TABLE,
    "schedule.dualpipe": TABLE,
    "schedule.dualpipe_v": TABLE,
    "schedule.gpipe": TABLE,
    "schedule.one_f_one_b": TABLE,
    "schedule.v_half": TABLE,
    "schedule.v_min": TABLE,
    "schedule.zb_h1": TABLE,
    "schedule.zb_h2": TABLE,
    "schedule.zb_v": TABLE,
    "schedule.hanayo": TABLE | dict(num_waves=2),
    "schedule.interleaved_1f1b": TABLE | dict(num_stages_per_rank=2),
    "schedule.interleaved_1f1b_overlap": TABLE | dict(num_stages_per_rank=2),
    "schedule.interleaved_zero_bubble": TABLE | dict(num_stages_per_rank=2),
    "schedule.looped_bfs": TABLE | dict(num_stages_per_rank=2),
    "schedule.choose": TABLE | dict(costs=schedule.CostModel(), memory_limit=8.0, memory=None),
    "schedule.search": TABLE
    | dict(costs=schedule.CostModel(), memory_limit=8.0, memory=None, placement=None),
    "schedule.lower_bound": TABLE | dict(costs=schedule.CostModel(), memory_limit=8.0, placement=None),
    "schedule.optimum": dict(placement=PLACEMENT, num_microbatches=3, costs=None, memory_limit=8.0),
    "schedule.format_grid": dict(schedule=SMALL, costs=schedule.CostModel()),
    "schedule.parse_grid": dict(text=schedule.format_grid(SMALL), placement=None, name="x"),
    "schedule.from_json": dict(text=schedule.to_json(SMALL)),
    "schedule.to_json": dict(schedule=SMALL, more={"author": "x"}),
    "schedule.from_torch_csv": dict(text=schedule.to_torch_csv(SMALL), placement=PLACEMENT, name="x"),
    "schedule.to_torch_csv": dict(schedule=SMALL, aligned=False),
    "schedule.limit_stash": dict(schedule=schedule.zb_h1(2, 4), most=2),
    "schedule.lower": dict(schedule=SMALL, costs=schedule.CostModel()),
    "schedule.simulate": dict(schedule=SMALL, costs=schedule.CostModel()),
    "schedule.to_chrome_trace": dict(timeline=schedule.simulate(SMALL), unit_us=1000.0),
    "schedule.validate": dict(schedule=SMALL),
    "schedule.CostModel": dict(F=1.0, I=1.0, W=1.0, FB=2.0, send=0.5),
    "schedule.MemoryModel": dict(residual_i=1.0, residual_w=1.0, stash=1.0, boundary=0.1),
    "schedule.Placement": dict(pipes=((0, 1),)),
    "split.split_backward": dict(function=_linear, has_aux=False),
    "split.hoist": dict(function=_linear, params=X, x=X),
    "split.weight_part": dict(function=_linear),
    "parallel.capacity_for": dict(num_tokens=8, top_k=2, num_experts=4, factor=1.25),
    "parallel.mesh.expert_axes": dict(nodes=2),
    "parallel.mesh.over_nodes": dict(ep=4, nodes=2),
    "parallel.count": dict(topk_TK=TOPK, num_experts=4),
    "parallel.plan_capacity": dict(topk_TK=TOPK, num_experts=4, capacity=2, axis_name=None, payload="plain"),
    "parallel.plan_dropless": dict(
        topk_TK=TOPK, num_experts=4, axis_name=None, buffer_factor=1.0, payload="plain"
    ),
    "parallel.dispatch": dict(x_TD=X, handle=HANDLE),
    "parallel.combine": dict(y=parallel.dispatch(X, HANDLE), weights_TK=WEIGHTS, handle=HANDLE),
    "parallel.expert_matmul": dict(
        rows=parallel.dispatch(X, HANDLE), w_LDF=jnp.ones((4, 3, 2)), handle=HANDLE, kernel="plain"
    ),
    "parallel.expert_groups.grouped_matmul": dict(
        x_RD=X,
        w_GDF=jnp.ones((2, 3, 2)),
        group_sizes_G=jnp.asarray([1, 2], jnp.int32),
        block=None,
        kernel="plain",
    ),
    "balance.Layout": dict(num_devices=2, num_slots=4, num_nodes=1, num_groups=1),
    "balance.balance": dict(loads=LOADS, layout=LAYOUT),
    "balance.bound_of": dict(loads=LOADS, layout=LAYOUT),
    "balance.rebalance_experts": dict(weight=LOADS, num_replicas=4, num_groups=1, num_nodes=1, num_gpus=2),
    "balance.random_traffic": dict(
        layout=LAYOUT, num_experts=4, num_chosen=2, num_limited=None, num_tokens=50, seed=0
    ),
    "inspect.rates.tpu_rates": dict(generation="v5p"),
    "inspect.gpu_rates": dict(generation="h100", network=5e10, node=8, published=True),
    "inspect.compiler.tpu_generation": dict(device_kind="TPU v5"),
    "inspect.read": dict(program="HloModule m\n\nENTRY e {\n  ROOT p = f32[2]{0} parameter(0)\n}\n"),
    "inspect.copies": dict(
        program="HloModule m\n\nENTRY e {\n  ROOT p = f32[2]{0} parameter(0)\n}\n", min_bytes=1, in_loops=True
    ),
    "models.tiny": dict(dim=64, num_layers=2, num_experts=16, top_k=4, score="sigmoid", norm_eps=1e-6),
    "models.deepseek": dict(config=TINY, stages=1, dispatch="dropless", capacity_factor=None, mtp_weight=0.3),
    "models.num_params": dict(params={"w": X}),
    "models.matmul_costs": dict(config=TINY, sequence=64),
    "models.layer_plan": dict(config=TINY, schedule=schedule.one_f_one_b(1, 2)),
    "models.update_bias": dict(
        bias=jnp.zeros(4), counts=jnp.arange(4, dtype=jnp.int32), rate=0.1, center=False
    ),
    "decode.Limits": dict(max_requests=2, max_positions=16, block_size=4),
    "decode.SamplingParams": dict(max_tokens=4, temperature=0.5, top_p=0.9, seed=0),
}
"""Room.name -> arguments that the function takes."""


def function_of(name: str) -> Callable[..., Any]:
    room, _, attribute = name.partition(".")
    return operator.attrgetter(attribute)(ROOMS[room])
