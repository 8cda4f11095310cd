"""Hugging Face transformers as the oracle: small random models, saved as it saves them."""

import functools
import logging

import numpy as np
import pytest


@functools.cache
def libraries():
    """Torch and transformers, which take seconds to import: only the tests that call this wait for them."""
    torch = pytest.importorskip("torch", reason="the oracle runs on torch, which is not installed")
    transformers = pytest.importorskip(
        "transformers", minversion="5.15.1", reason="the oracle is transformers, which is not installed"
    )
    transformers.utils.logging.disable_progress_bar()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    return torch, transformers


SIZES = dict(
    vocab_size=96, hidden_size=48, intermediate_size=64, moe_intermediate_size=24, num_hidden_layers=3,
    first_k_dense_replace=1, num_attention_heads=4, num_key_value_heads=4, n_routed_experts=16, n_shared_experts=1,
    num_experts_per_tok=4, q_lora_rank=24, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=12,
    initializer_range=0.2,
)  # fmt: skip
GROUPS = dict(n_group=4, topk_group=2)


def yarn(factor, original, **more):
    found = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": factor, "beta_fast": 32, "beta_slow": 1}
    return found | {"original_max_position_embeddings": original} | more


def make(version=3, seed=0, **changes):
    """A model with nothing left at its initial one or zero: norms, biases, selection biases about -0.9."""
    torch, transformers = libraries()
    kind = f"DeepseekV{version}"
    own = GROUPS | {"num_mtp_layers": 0} if version == 3 else {"num_experts_per_tok": 4}
    config = getattr(transformers, f"{kind}Config")(**(SIZES | own | changes))
    config._attn_implementation = "eager"
    torch.manual_seed(seed)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, value in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith("norm.weight"):
                value.add_(0.2 * torch.randn_like(value))
            elif name.endswith(".bias"):
                value.copy_(0.3 * torch.randn_like(value))
            elif name.endswith("e_score_correction_bias"):
                value.copy_(-0.9 + 0.4 * torch.randn_like(value))
    return model


def saved(model, folder, **how):
    model.save_pretrained(folder, **how)
    return folder


def tensors(named):
    """Their tensors by published name, as float32 arrays: experts, fused in memory, taken apart."""
    found = {}
    for name, value in named:
        array = value.detach().float().numpy()
        if name.endswith("experts.gate_up_proj"):
            for expert, both in enumerate(array):
                for part, half in zip(("gate", "up"), np.split(both, 2), strict=True):
                    found[name.replace("gate_up_proj", f"{expert}.{part}_proj.weight")] = half
        elif name.endswith("experts.down_proj"):
            found |= {
                name.replace("down_proj", f"{expert}.down_proj.weight"): one
                for expert, one in enumerate(array)
            }
        else:
            found[name] = array
    return found


def run(model, tokens, **how):
    """Logits, the state behind every layer (the last one normalised), each router's choice, and the loss."""
    chosen = []
    hooks = [
        layer.mlp.gate.register_forward_hook(
            lambda _, __, out: chosen.append(np.sort(out[2].numpy(), axis=-1))
        )
        for layer in model.model.layers
        if hasattr(layer.mlp, "gate")
    ]
    tokens = libraries()[0].tensor(tokens)
    out = model(tokens, labels=tokens, output_hidden_states=True, **how)
    for hook in hooks:
        hook.remove()
    return out.logits.detach().numpy(), [h.detach().numpy() for h in out.hidden_states], chosen, out.loss
