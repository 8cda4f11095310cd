"""Models as pure functions of (params, x); no pipeline in sight."""

from dualpipe_jax.functional import num_params
from models import recipes, weights
from models.config import MODELS, Config, byte, moe_67b, small, tiny, v2, v2_lite, v3
from models.forward import logits
from models.kernels import Kernels
from models.moe import Dispatch, update_bias
from models.placement import count_once, expert_tables, place_experts, placed_specs, sum_copies
from models.plan import Costs, given_plan, layer_plan, matmul_costs
from models.transformer import (
    Model,
    deepseek,
    figures,
    recompute_keys,
    recompute_local,
    recompute_wide,
    update_routing,
)

__all__ = [
    "MODELS",
    "Config",
    "Costs",
    "Dispatch",
    "Kernels",
    "Model",
    "byte",
    "count_once",
    "deepseek",
    "expert_tables",
    "figures",
    "given_plan",
    "layer_plan",
    "logits",
    "matmul_costs",
    "moe_67b",
    "num_params",
    "place_experts",
    "placed_specs",
    "recipes",
    "recompute_keys",
    "recompute_local",
    "recompute_wide",
    "small",
    "sum_copies",
    "tiny",
    "update_bias",
    "update_routing",
    "v2",
    "v2_lite",
    "v3",
    "weights",
]
