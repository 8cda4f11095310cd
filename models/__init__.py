"""Models as pure functions of (params, x); no pipeline in sight."""

from models.config import MODELS, Config, byte, moe_67b, small, tiny, v2, v2_lite, v3
from models.functional import Functions, from_linen, from_nnx, model_loss, num_params, pure_nnx
from models.kernels import Kernels
from models.moe import Dispatch, update_bias
from models.sharing import share_layers
from models.transformer import Model, deepseek, num_padding, update_routing

__all__ = [
    "MODELS",
    "Config",
    "Dispatch",
    "Functions",
    "Kernels",
    "Model",
    "byte",
    "deepseek",
    "from_linen",
    "from_nnx",
    "model_loss",
    "moe_67b",
    "num_padding",
    "num_params",
    "pure_nnx",
    "share_layers",
    "small",
    "tiny",
    "update_bias",
    "update_routing",
    "v2",
    "v2_lite",
    "v3",
]
