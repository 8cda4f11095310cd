"""The part of our parameters for each published tensor: the one place that knows both trees.

Our tree, as ``models.deepseek(config, stages).init`` makes it; P stages, whose slots have layers with experts and
the blocks of multi-token prediction::

    {"shared": {"embed_tokens", "layers": [dense block, ...], "norm", "lm_head",
                "mtp": [{"enorm", "hnorm", "eh_proj", "norm"}, ...]},
     "stages": {"layers": [block [P, ...], ...], "routing": {"bias": [P, slots, E], "row": [P, slots]}}}
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from models.config import Config
from models.plan import Layout

Path = tuple[str | int, ...]


class Rotary(NamedTuple):
    """The output rows of a matrix that are rotated: per head, the last ``rotated`` of ``width``."""

    width: int
    rotated: int


class Entry(NamedTuple):
    """One published tensor.

    For a layer's tensor, name and path are relative to the layer until ``_prefixed`` prepends it.

    Attributes:
      name: the published name.
      path: the path of our leaf, key by key.
      shape: the published shape.
      transposed: whether ours is the transpose, perhaps with its outputs in several dims.
      rotary: the rotated rows, for matrices whose outputs are rotated.
      at: the tensor's index in the leaf's leading dims.
      columns: (n, parts): the tensor is part n of this many equal parts of the leaf's last dim.
    """

    name: str
    path: Path
    shape: tuple[int, ...]
    transposed: bool = False
    rotary: Rotary | None = None
    at: tuple[int, ...] = ()
    columns: tuple[int, int] = (0, 1)


def entries(config: Config, layout: Layout) -> list[Entry]:
    """List every tensor of a model, in the order of published checkpoints."""
    table = (config.vocab, config.dim)
    found = [Entry("model.embed_tokens.weight", ("shared", "embed_tokens"), table)]
    for layer in range(config.num_layers):
        routed = layer - config.num_dense_layers
        if routed < 0:
            found += _layer(config, layer, ("shared", "layers", layer), None)
        else:
            found += _expert_layer(config, layer, layout.slot_of(routed))
    found.append(Entry("model.norm.weight", ("shared", "norm", "weight"), (config.dim,)))
    if not config.tie_embeddings:
        found.append(Entry("lm_head.weight", ("shared", "lm_head", "kernel"), table, transposed=True))
    for k in range(config.num_mtp_layers):
        layer = config.num_layers + k
        found += _prefixed(_mtp_module(config), f"model.layers.{layer}.", ("shared", "mtp", k), ())
        found += _expert_layer(config, layer, layout.slot_of(config.num_moe_layers + k))
    return found


def duplicate_names(config: Config) -> set[str]:
    """Return the names of tensors that repeat others: multi-token prediction modules share embedding and head."""
    last = range(config.num_layers, config.num_layers + config.num_mtp_layers)
    shared = {
        f"model.layers.{n}.{name}.weight" for n in last for name in ("embed_tokens", "shared_head.head")
    }
    return shared | ({"lm_head.weight"} if config.tie_embeddings else set())


def _expert_layer(config: Config, layer: int, place: tuple[int, int]) -> Iterator[Entry]:
    stage, slot = place
    yield from _layer(config, layer, ("stages", "layers", slot), stage)
    if config.score == "sigmoid":
        name = f"model.layers.{layer}.mlp.gate.e_score_correction_bias"
        yield Entry(name, ("stages", "routing", "bias"), (config.num_experts,), at=place)


def _layer(config: Config, layer: int, path: Path, stage: int | None) -> Iterator[Entry]:
    """Yield the entries of one layer: one with experts if ``stage`` is given, else a dense one."""
    norms = [_norm((name,), config.dim) for name in ("input_layernorm", "post_attention_layernorm")]
    mlp = _swiglu(("mlp",), config.dim, config.dense_hidden) if stage is None else _experts(config)
    index = () if stage is None else (stage,)
    yield from _prefixed([*norms, *_attention(config), *mlp], f"model.layers.{layer}.", path, index)


def _prefixed(parts: Iterable[Entry], name: str, path: Path, index: tuple[int, ...]) -> Iterator[Entry]:
    for part in parts:
        yield part._replace(name=name + part.name, path=path + part.path, at=index + part.at)


def _norm(path: Path, width: int) -> Entry:
    return Entry(".".join(map(str, path)) + ".weight", (*path, "weight"), (width,))


def _matrix(path: Path, outs: int, ins: int, rotary: Rotary | None = None) -> Entry:
    return Entry(".".join(map(str, path)) + ".weight", (*path, "kernel"), (outs, ins), True, rotary)


def _attention(config: Config) -> Iterator[Entry]:
    head, rot = config.qk_nope_dim + config.qk_rope_dim, config.qk_rope_dim
    heads, dim, latent = config.num_heads, config.dim, config.kv_lora_rank
    of_queries, of_key = Rotary(head, rot), Rotary(latent + rot, rot)
    if config.q_lora_rank:
        yield _matrix(("self_attn", "q_a_proj"), config.q_lora_rank, dim)
        yield _norm(("self_attn", "q_a_layernorm"), config.q_lora_rank)
        yield _matrix(("self_attn", "q_b_proj"), heads * head, config.q_lora_rank, of_queries)
    else:
        yield _matrix(("self_attn", "q_proj"), heads * head, dim, of_queries)
    yield _matrix(("self_attn", "kv_a_proj_with_mqa"), latent + rot, dim, of_key)
    yield _norm(("self_attn", "kv_a_layernorm"), latent)
    yield _matrix(("self_attn", "kv_b_proj"), heads * (config.qk_nope_dim + config.v_head_dim), latent)
    yield _matrix(("self_attn", "o_proj"), dim, heads * config.v_head_dim)
    if config.attention_bias:
        biased = {"kv_a_proj_with_mqa": latent + rot, "o_proj": dim}
        if config.q_lora_rank:
            biased = {"q_a_proj": config.q_lora_rank} | biased
        for name, width in biased.items():
            rotary = of_key if name == "kv_a_proj_with_mqa" else None
            yield Entry(f"self_attn.{name}.bias", ("self_attn", name, "bias"), (width,), rotary=rotary)


def _swiglu(path: Path, dim: int, hidden: int) -> list[Entry]:
    return [
        _matrix((*path, "gate_proj"), hidden, dim),
        _matrix((*path, "up_proj"), hidden, dim),
        _matrix((*path, "down_proj"), dim, hidden),
    ]


def _experts(config: Config) -> Iterator[Entry]:
    yield Entry("mlp.gate.weight", ("mlp", "gate"), (config.num_experts, config.dim), True)
    for expert in range(config.num_experts):
        gate, up, down = (
            part._replace(name=f"mlp.experts.{expert}.{part.name}", at=(expert,))
            for part in _swiglu((), config.dim, config.expert_hidden)
        )
        for which, part in enumerate((gate, up)):  # ours has both in one matrix
            yield part._replace(path=("mlp", "experts", "gate_up_proj"), columns=(which, 2))
        yield down._replace(path=("mlp", "experts", "down_proj"))
    if config.num_shared_experts:
        hidden = config.num_shared_experts * config.expert_hidden
        yield from _swiglu(("mlp", "shared_experts"), config.dim, hidden)


def _mtp_module(config: Config) -> list[Entry]:
    """List the entries of a multi-token prediction module except those of its block."""
    dim = config.dim
    return [
        _norm(("enorm",), dim),
        _norm(("hnorm",), dim),
        _matrix(("eh_proj",), dim, 2 * dim),
        Entry("shared_head.norm.weight", ("norm", "weight"), (dim,)),
    ]
