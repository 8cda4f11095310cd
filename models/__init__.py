"""Models as pure functions of (params, x); no pipeline in sight."""

from models.config import Config, small, tiny, v2, v2_lite, v3
from models.functional import Functions, from_linen, from_nnx, model_loss, num_params, pure_nnx
from models.moe import Dispatch, update_bias
from models.transformer import Model, deepseek, update_routing

__all__ = [
    "Config",
    "Dispatch",
    "Functions",
    "Model",
    "deepseek",
    "from_linen",
    "from_nnx",
    "model_loss",
    "num_params",
    "pure_nnx",
    "small",
    "tiny",
    "update_bias",
    "update_routing",
    "v2",
    "v2_lite",
    "v3",
]
