"""Conversion of a published ``config.json`` to a ``Config`` and back.

``model_type`` "deepseek_v3" has sigmoid scores and a selection bias, "deepseek_v2" softmax scores and no bias.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from models.attention import rope_factor
from models.config import Config
from models.weights.errors import WeightsError

SIZES = {
    "vocab_size": "vocab",
    "hidden_size": "dim",
    "num_hidden_layers": "num_layers",
    "first_k_dense_replace": "num_dense_layers",
    "num_attention_heads": "num_heads",
    "kv_lora_rank": "kv_lora_rank",
    "qk_nope_head_dim": "qk_nope_dim",
    "qk_rope_head_dim": "qk_rope_dim",
    "v_head_dim": "v_head_dim",
    "intermediate_size": "dense_hidden",
    "moe_intermediate_size": "expert_hidden",
    "n_routed_experts": "num_experts",
    "num_experts_per_tok": "top_k",
}
"""The published name of each required whole number -> ours."""

MAY_BE_ZERO = ("first_k_dense_replace", "qk_nope_head_dim", "qk_rope_head_dim", "intermediate_size")
"""The numbers among them that a model may have none of, as in ``Config``."""

REQUIRED_KEYS = {
    "deepseek_v3": ("routed_scaling_factor", "n_group", "topk_group", "n_shared_experts"),
    "deepseek_v2": ("routed_scaling_factor", "n_shared_experts"),
}
"""The keys that each format requires: its implementation has defaults of its own for them, which are not "none"."""

NUMBERS = {
    "routed_scaling_factor": "routed_scale",
    "rms_norm_eps": "norm_eps",
    "initializer_range": "init_std",
}
"""The published name of each number that may be missing -> ours."""

SUPPORTED_VALUES = {
    "hidden_act": ("silu",),
    "moe_layer_freq": (1,),
    "attention_dropout": (0, None),
    "mlp_bias": (False, None),
    "pretraining_tp": (1, None),
}
"""The values that our model supports, by key; any other value would be another model."""

YARN = {
    "factor": "yarn_factor",
    "beta_fast": "yarn_beta_fast",
    "beta_slow": "yarn_beta_slow",
    "mscale": "yarn_mscale",
    "mscale_all_dim": "yarn_mscale_all_dim",
}
"""The published name of each parameter of YaRN -> ours."""


@dataclasses.dataclass(frozen=True)
class Published:
    """The contents of a ``config.json``.

    Attributes:
      config: the model, with ``num_mtp_layers`` as announced; checkpoints may announce layers that they do not have.
      rope_interleave: whether the two numbers of a rotated pair are neighbours; if not, they are half the rotated part
        apart.
      fp8_block: the numbers of rows and columns that share a scale, in a checkpoint quantised to FP8; None in others.
    """

    config: Config
    rope_interleave: bool
    fp8_block: tuple[int, int] | None


def from_json(data: Mapping[str, Any]) -> Published:
    """Read a published configuration.

    Raises:
      WeightsError: keys are missing, or have values that the model does not support; all of them are listed.
    """
    wrong: list[str] = []
    values = _sizes(data, wrong) | _routing(data, wrong) | _rope(data, wrong)
    needed = REQUIRED_KEYS.get(str(data.get("model_type")), ())
    wrong += [f"{key} is missing" for key in needed if data.get(key) is None]
    for key, allowed in SUPPORTED_VALUES.items():
        if key in data and data[key] not in allowed:
            wrong.append(f"{key} is {data[key]!r}, must be {allowed[0]!r}")
    heads = data.get("num_key_value_heads")
    if heads is not None and heads != data.get("num_attention_heads"):
        wrong.append(
            f"num_key_value_heads is {heads}, must be num_attention_heads, as latent attention has it"
        )
    if data.get("head_dim") not in (None, data.get("qk_rope_head_dim")):
        wrong.append(f"head_dim is {data['head_dim']}, must be qk_rope_head_dim, the part that is rotated")
    dtype = data.get("dtype") or data.get("torch_dtype")
    values |= {
        "attention_bias": bool(data.get("attention_bias")),
        "tie_embeddings": bool(data.get("tie_word_embeddings")),
        "num_mtp_layers": data.get("num_nextn_predict_layers") or 0,
        "compute_dtype": jnp.bfloat16 if dtype == "bfloat16" else jnp.float32,
    }
    fp8_block = _fp8_block(data, wrong)
    if wrong:
        raise WeightsError("config.json", wrong)
    try:
        config = Config(**values)
    except ValueError as error:
        raise WeightsError("config.json", [str(error)]) from None
    if not config.num_moe_layers:
        wrong = [f"first_k_dense_replace is {config.num_dense_layers}, must be below num_hidden_layers"]
        raise WeightsError("config.json", wrong)
    scaling = _scaling(data)
    given = scaling.get("attention_factor")
    if given is not None and not math.isclose(given, rope_factor(config), rel_tol=1e-6):
        raise WeightsError("config.json", [f"attention_factor is {given}, must be {rope_factor(config)}"])
    return Published(config, data.get("rope_interleave") is not False, fp8_block)


def to_json(config: Config, dtype: str) -> dict[str, Any]:
    """Return a configuration in the published format, for tensors of ``dtype``.

    Raises:
      WeightsError: the published formats have no such model: softmax scores divided by their sum.
    """
    v3 = config.score == "sigmoid"
    if not v3 and config.normalize_top_k:
        wrong = "deepseek_v2 does not divide softmax scores by their sum: normalize_top_k must be False"
        raise WeightsError("Config as config.json", [wrong])
    name = "DeepseekV3" if v3 else "DeepseekV2"
    grouped = "group_limited_greedy" if config.num_groups > 1 else "greedy"
    numbers = {key: getattr(config, ours) for key, ours in (SIZES | NUMBERS).items()}
    numbers |= {key: float(numbers[key]) for key in NUMBERS}
    return {
        "architectures": [f"{name}ForCausalLM"],
        "model_type": name.lower().replace("seek", "seek_"),
        **numbers,
        "num_key_value_heads": config.num_heads,
        "q_lora_rank": config.q_lora_rank or None,
        "n_shared_experts": config.num_shared_experts,
        "n_group": config.num_groups,
        "topk_group": config.top_groups,
        "topk_method": "noaux_tc" if v3 else grouped,
        "scoring_func": config.score,
        "norm_topk_prob": config.normalize_top_k,
        "moe_layer_freq": 1,
        "num_nextn_predict_layers": config.num_mtp_layers,
        "hidden_act": "silu",
        "attention_bias": config.attention_bias,
        "attention_dropout": 0.0,
        "tie_word_embeddings": config.tie_embeddings,
        "max_position_embeddings": round(config.yarn_original_seq * config.yarn_factor),
        "rope_theta": float(config.rope_theta),
        "rope_interleave": True,
        "rope_scaling": _yarn(config),
        "torch_dtype": dtype,
    }


def _sizes(data: Mapping[str, Any], wrong: list[str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, ours in SIZES.items():
        value = data.get(key)
        least = 0 if key in MAY_BE_ZERO else 1
        if key not in data:
            wrong.append(f"{key} is missing")
        elif not isinstance(value, int) or isinstance(value, bool) or value < least:
            wrong.append(f"{key} is {value!r}, must be a whole number of at least {least}")
        values[ours] = value
    for key, ours in NUMBERS.items():
        value = data.get(key)
        if value is not None and not isinstance(value, int | float):
            wrong.append(f"{key} is {value!r}, must be a number")
        elif value is not None:
            values[ours] = float(value)
    for key, ours in {"q_lora_rank": "q_lora_rank", "n_shared_experts": "num_shared_experts"}.items():
        value = data.get(key) or 0
        if not isinstance(value, int) or value < 0:
            wrong.append(f"{key} is {value!r}, must be a whole number or null")
        values[ours] = value
    return values


def _routing(data: Mapping[str, Any], wrong: list[str]) -> dict[str, Any]:
    kind = data.get("model_type")
    if kind not in ("deepseek_v3", "deepseek_v2"):
        wrong.append(f"model_type is {kind!r}, must be 'deepseek_v3' or 'deepseek_v2'")
    v3 = kind != "deepseek_v2"
    methods = ("noaux_tc",) if v3 else ("greedy", "group_limited_greedy")
    method = data.get("topk_method", methods[0]) or methods[0]
    if method not in methods:
        wrong.append(f"topk_method is {method!r}, must be {' or '.join(map(repr, methods))} for {kind}")
    score = "sigmoid" if v3 else "softmax"
    if data.get("scoring_func", score) != score:
        wrong.append(f"scoring_func is {data['scoring_func']!r}, must be {score!r} for {kind}")
    normalize = bool(data.get("norm_topk_prob", v3))
    if normalize and not v3:
        wrong.append(
            "norm_topk_prob is true, must be false for deepseek_v2: its implementations disagree on it"
        )
    groups = method != "greedy"
    return {
        "score": score,
        "normalize_top_k": normalize,
        "num_groups": (data.get("n_group") or 1) if groups else 1,
        "top_groups": (data.get("topk_group") or 1) if groups else 1,
    }


_ROPE_NUMBERS = (*YARN, "rope_theta", "original_max_position_embeddings", "attention_factor")


def _scaling(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the parameters of the rotary embedding, from the key where this version of the format has them."""
    found = data.get("rope_parameters") or data.get("rope_scaling") or {}
    return found if isinstance(found, Mapping) else {}


def _damaged_rope(data: Mapping[str, Any]) -> list[str]:
    wrong = []
    places = {key: data.get(key) for key in ("rope_parameters", "rope_scaling")}
    for key, found in places.items():
        if not isinstance(found, Mapping | None):
            wrong.append(f"{key} is {found!r}, must be an object or null")
            continue
        numbers = {name: value for name, value in (found or {}).items() if name in _ROPE_NUMBERS}
        wrong += [
            f"{key}: {name} is {value!r}, must be a number"
            for name, value in numbers.items()
            if not isinstance(value, int | float | None)
        ]
    wrong += [
        f"{key} is {data[key]!r}, must be a number"
        for key in ("rope_theta", "max_position_embeddings")
        if not isinstance(data.get(key), int | float | None)
    ]
    one, other = places.values()
    if one and other and one != other:
        wrong.append("rope_parameters and rope_scaling are both there and differ: leave one of them out")
    return wrong


def _rope(data: Mapping[str, Any], wrong: list[str]) -> dict[str, Any]:
    scaling = _scaling(data)
    damaged = _damaged_rope(data)
    wrong += damaged
    if damaged:
        return {}
    longest = data.get("max_position_embeddings") or 4096
    values = {
        "rope_theta": float(scaling.get("rope_theta") or data.get("rope_theta") or 10000.0),
        "yarn_original_seq": longest,
    }
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind == "default":
        return values
    if kind != "yarn":
        wrong.append(f"rope type is {kind!r}, must be 'yarn' or 'default'")
        return values
    if scaling.get("truncate") is False:
        wrong.append("rope's truncate is false, must be true")
    original = scaling.get("original_max_position_embeddings") or longest
    defaults = {"factor": longest / original, "beta_fast": 32.0, "beta_slow": 1.0}
    for key, ours in YARN.items():
        values[ours] = float(scaling.get(key) or defaults.get(key, 0.0))
    return values | {"yarn_original_seq": original}


def _yarn(config: Config) -> dict[str, Any] | None:
    if config.yarn_factor <= 1:
        return None
    numbers = {key: float(getattr(config, ours)) for key, ours in YARN.items()}
    given = {key: value for key, value in numbers.items() if value}  # an mscale of 0 means that none is given
    return {"type": "yarn", **given, "original_max_position_embeddings": config.yarn_original_seq}


def _fp8_block(data: Mapping[str, Any], wrong: list[str]) -> tuple[int, int] | None:
    quantization = data.get("quantization_config")
    if quantization is None:
        return None
    if not isinstance(quantization, Mapping):
        quantization = {"quant_method": quantization}
    block: Any = quantization.get("weight_block_size")
    known = quantization.get("quant_method") == "fp8" and quantization.get("fmt", "e4m3") == "e4m3"
    whole = isinstance(block, list) and len(block) == 2 and all(isinstance(n, int) and n > 0 for n in block)
    if not (known and whole):
        wrong.append(
            f"quantization_config is {quantization!r}, must be fp8 of e4m3 with a weight_block_size of two numbers"
        )
        return None
    return block[0], block[1]
