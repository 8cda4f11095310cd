"""The facts that are stored with a checkpoint's arrays, and whether a run may go on from them."""

import dataclasses
import datetime
import importlib.metadata
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

import models
from models.weights.native import DIGEST_KEY, digest
from train.config import TrainConfig
from train.errors import CheckpointError
from train.options import options_as_dict

FORMAT = 1
"""The number of the format of checkpoints; raised when an older reader would misread them."""

ANY_ORDER = "in any order"

LAYOUT = ("schedule", "pp", "ep", "dp", "shard")
"""Options of a step that determine where its state is placed."""

Facts = dict[str, Any]


def describe(
    config: TrainConfig,
    numbers: models.Config,
    corpus: str,
    arrays: Mapping[str, Any],
    tokenizer: str = "bytes",
    separator: int = 0,
) -> Facts:
    """The facts that are the same for every step of a run, as JSON values.

    Args:
      config: the options.
      numbers: the configuration of the model.
      corpus: the fingerprint of the corpus.
      arrays: name -> an array, or anything else with its shape and dtype.
      tokenizer: the fingerprint of the vocabulary.
      separator: the token that ends a text.
    """
    return {
        "format": FORMAT,
        "model": {
            field.name: getattr(numbers, field.name)
            for field in dataclasses.fields(numbers)
            # It may change when a run is resumed.
            if field.name != "compute_dtype"
        },
        "arrays": {name: [list(leaf.shape), str(leaf.dtype)] for name, leaf in arrays.items()},
        "corpus": corpus,
        "tokenizer": tokenizer,
        "published": {"eos_token_id": separator},  # for config.json
        "seed": config.seed,
        "options": options_as_dict(config),
        "layout": {name: getattr(config.step, name) for name in LAYOUT} | {"processes": jax.process_count()},
        "platform": {"devices": jax.devices()[0].device_kind, "machine": platform.machine()}
        | _sum_order(config)
        | _cpu(),
        "versions": {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "optax", "numpy")},
    }


def _sum_order(config: TrainConfig) -> dict[str, str]:
    """The order in which a GPU adds; {} for other devices, which always add in one order."""
    if jax.devices()[0].platform != "gpu":
        return {}
    return {"sums": "in one order" if config.launch.deterministic else ANY_ORDER}


_VECTORS = ("fma", "avx2", "avx512f", "avx512_bf16", "amx_bf16", "sve", "sve2")
"""Instructions of CPUs, as Linux names them, with which XLA computes in another order or rounds elsewhere."""


def _cpu() -> dict[str, str]:
    """The CPU, for JAX calls each of them "cpu"; {} if other devices compute, or the system does not tell."""
    if jax.devices()[0].platform != "cpu":
        return {}
    try:
        lines = Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()
    except OSError:
        return {}
    told = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    there = told.get("flags", told.get("Features", "")).split()
    vectors = " ".join(name for name in _VECTORS if name in there)
    return {"cpu": told.get("model name", ""), "vectors": vectors}


def step_facts(
    facts: Facts,
    step: int,
    prints: Mapping[str, int],
    record: Mapping[str, Any],
    load: Any,
    balance: Any = None,
    carried: Mapping[str, Any] | None = None,
) -> Facts:
    """The facts of one step.

    Args:
      facts: the facts of the run.
      step: the number of steps done.
      prints: the fingerprint of each array.
      record: the step's line in the metrics.
      load: int [layers, experts], how often the step chose each expert.
      balance: the values with which --rebalance-every is resumed.
      carried: all other values with which the run is resumed, even if its other files are lost.
    """
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    found = facts | {
        "step": step,
        "time": now,
        "fingerprints": dict(prints),
        "metrics": dict(record),
        "load": load,
        **({} if balance is None else {"balance": balance}),
        **({} if carried is None else {"carried": dict(carried)}),
    }
    return found | {DIGEST_KEY: digest(found)}


MUST_AGREE = {
    "format": "the format of checkpoints",
    "model": "the model",
    "arrays": "the arrays",
    "corpus": "the text (with no --data it is that of the running Python's library)",
    "tokenizer": "the tokenizer",
    "seed": "the seed",
}
"""Facts that must not change when a run is resumed -> their names in messages."""

NOT_BITWISE = {"layout": "layout", "platform": "hardware", "versions": "versions"}
"""Facts that may change, and with them the last bits of every number -> their names in messages."""


def refuse_foreign(saved: Facts, ours: Facts, where: str) -> None:
    """Raise CheckpointError, which names all that differs, if a run may not go on from the saved checkpoint."""
    wrong = [
        f"{what} differs: {describe_difference(saved.get(key), ours[key])}"
        for key, what in MUST_AGREE.items()
        if saved.get(key) != ours[key]
    ]
    if wrong:
        raise CheckpointError(
            f"{where} is of another run: {'; '.join(wrong)}. Resume with the options it was made with, or begin "
            "anew under another --name"
        )


def describe_changes(saved: Facts, ours: Facts) -> list[str]:
    """All other differences, in words: first those that prevent equal bits from here on, then changed options."""
    found = [
        f"not bit for bit: {what} changed, {describe_difference(saved.get(key), ours[key])}"
        for key, what in NOT_BITWISE.items()
        if saved.get(key) != ours[key]
    ]
    if saved.get("platform") == ours["platform"] and ours["platform"].get("sums") == ANY_ORDER:
        found.insert(0, "not bit for bit: this GPU adds in any order; a run with --deterministic adds in one")
    # An option that did not exist yet had today's default.
    before = _leaves(options_as_dict(TrainConfig())) | _leaves(saved.get("options", {}))
    now = _leaves(ours["options"])
    options = [name for name in now if before[name] != now[name] and not _is_unreported(name)]
    if options:
        found.append("options changed: " + ", ".join(f"{n} {before[n]} -> {now[n]}" for n in options))
    return found


def _is_unreported(name: str) -> bool:
    """Whether an option's change is not listed: it does not change results, or is reported as the layout."""
    section, _, option = name.rpartition(".")
    if section == "step":
        return option in LAYOUT
    return section in ("checkpoint", "log", "launch") or name in ("name", "runs")


def describe_difference(before: Any, now: Any) -> str:
    if not (isinstance(before, Mapping) and isinstance(now, Mapping)):
        return f"{_shorten(before)} saved, {_shorten(now)} now"
    keys = [key for key in {**before, **now} if before.get(key) != now.get(key)]
    shown = ", ".join(f"{key} {_shorten(before.get(key))} -> {_shorten(now.get(key))}" for key in keys[:4])
    return shown + (f" and {len(keys) - 4} more" if len(keys) > 4 else "")


def _shorten(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 40 else text[:12] + "..."


def _leaves(options: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in options.items():
        if isinstance(value, Mapping):
            found |= _leaves(value, f"{path}{name}.")
        else:
            found[path + name] = value
    return found
