"""A model to generate with: its numbers, its weights, and how its tokens are written."""

import contextlib
import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint.experimental.v1 as ocp

from dualpipe_jax.functional import Tree
from models import weights
from models.config import Config
from models.decode.text import Bytes, Text
from models.weights import WeightsError, native
from train.config import ConfigError, TrainConfig
from train.data import DataError
from train.data.manifest import is_prepared, open_prepared
from train.data.vocabulary import BYTES, Vocabulary, open_vocabulary
from train.errors import CheckpointError
from train.generate.options import Source
from train.model import model_config
from train.options import apply
from train.state.checkpoint import FOLDER
from train.state.fingerprint import fingerprints


@dataclasses.dataclass(frozen=True)
class Loaded:
    """What there is to generate with.

    Attributes:
      name: where it is from, for people.
      folder: where it is from.
      config: the model's numbers.
      params: of one stage.
      text: its tokens' writing.
      stop: tokens that end a text.
      mtp_after_norm: see ``models.deepseek``.
    """

    name: str
    folder: Path
    config: Config
    params: Tree
    text: Text
    stop: tuple[int, ...]
    mtp_after_norm: bool


def load(options: Source, say: Callable[[str], None]) -> Loaded:
    """Find and read what ``options.source`` names.

    Raises:
      ConfigError: there is nothing of that name, or no tokenizer that is the model's.
      CheckpointError: no checkpoint of the run is whole.
      WeightsError: the folder holds no DeepSeek model.
    """
    folder = find(options.source)
    if (folder / FOLDER).is_dir():
        found = _from_run(folder, options, say)
    elif options.step is not None:
        raise ConfigError(f"--step {options.step}: {folder} is no run: it has no {FOLDER}")
    else:
        found = _from_folder(folder, options)
    if options.precision == "as-is":
        return found
    dtype = jnp.dtype(options.precision)
    return dataclasses.replace(found, config=dataclasses.replace(found.config, compute_dtype=dtype))


def find(source: Path | None, runs: Path = Path("runs")) -> Path:
    """The folder that is meant. Raises ConfigError if there is none."""
    if source is None:
        saved = [path.parent for path in runs.glob(f"*/{FOLDER}") if _steps(path)]
        if not saved:
            raise ConfigError(
                f"there is no run with a checkpoint in {runs}: scripts/train makes one, or name a folder"
            )
        return max(saved, key=lambda folder: (folder / FOLDER).stat().st_mtime)
    for folder in (source, runs / source):
        if folder.is_dir():
            return folder
    raise ConfigError(f"{source}: there is no such folder, nor {runs / source}")


def _steps(folder: Path) -> list[Path]:
    """A run's checkpoints, the newest first."""
    return sorted((p for p in folder.iterdir() if p.name.isdigit()), key=lambda p: -int(p.name))


def _from_run(folder: Path, options: Source, say: Callable[[str], None]) -> Loaded:
    steps = _steps(folder / FOLDER)
    if options.step is not None:
        steps = [path for path in steps if int(path.name) == options.step]
    if not steps:
        what = "checkpoint" if options.step is None else f"step {options.step}"
        there = ", ".join(path.name for path in _steps(folder / FOLDER)) or "none"
        raise CheckpointError(f"{folder}: there is no {what} in {folder / FOLDER}, only {there}")
    for path in steps:
        try:
            config, params, _ = native.read(path, check=_damage)
            facts = ocp.metadata(path.absolute()).custom_metadata
        except WeightsError as error:
            say(f"warning: {path}: {error.complaints[0]}; trying an earlier step")
            continue
        vocabulary = _vocabulary(folder, facts, options)
        trained = apply(TrainConfig(), facts["options"], f"{path}: options")
        return Loaded(
            f"{folder}, step {path.name}",
            folder,
            dataclasses.replace(config, compute_dtype=model_config(trained).compute_dtype),
            params,
            _OfVocabulary(vocabulary),
            (vocabulary.separator,),
            mtp_after_norm=False,
        )
    raise CheckpointError(f"none of the checkpoints in {folder / FOLDER} is whole")


def _damage(facts: Mapping[str, Any], flat: Mapping[str, Any]) -> list[str]:
    found = fingerprints(dict(flat))
    saved = facts.get("fingerprints", {})
    return [f"{name} is not what was saved" for name, value in found.items() if saved.get(name) != value]


def _vocabulary(folder: Path, facts: Mapping[str, Any], options: Source) -> Vocabulary:
    """The run's own, by its fingerprint, from wherever it may still be."""
    data = facts["options"]["data"]
    named = [options.tokenizer] if options.tokenizer else [data.get("tokenizer"), *data.get("paths", ())]
    for name in (None, *named):
        with contextlib.suppress(DataError, OSError):
            vocabulary = _vocabulary_of(name)
            if vocabulary.fingerprint == facts["tokenizer"]:
                return vocabulary
    looked = " or ".join(str(name) for name in named if name) or "what the run names"
    raise ConfigError(
        f"{folder}: its tokenizer is not {looked}: --tokenizer FILE says where the one is that it was trained with"
    )


def _vocabulary_of(name: str | Path | None) -> Vocabulary:
    if name is None:
        return BYTES
    if is_prepared(Path(name)):
        return open_prepared(Path(name))[1]
    return open_vocabulary(str(name))


class _OfVocabulary:
    """The trainer's vocabulary as text: without the separator that it puts behind documents."""

    def __init__(self, vocabulary: Vocabulary):
        self._vocabulary = vocabulary

    def encode(self, text: str) -> np.ndarray:
        return self._vocabulary.encode([text.encode()])[0][:-1].astype(np.int32)

    def decode(self, tokens: Sequence[int]) -> str:
        return self._vocabulary.decode(tokens)


def _from_folder(folder: Path, options: Source) -> Loaded:
    settings: Mapping[str, Any]
    if (folder / "config.json").is_file():
        config, params = weights.load(folder, mtp=options.drafts)
        settings = json.loads((folder / "config.json").read_text())
    else:
        config, params, settings = native.read(folder)
    own = _settings(folder / "generation_config.json")
    ends = {*_tokens(settings.get("eos_token_id")), *_tokens(own.get("eos_token_id"))}
    where = options.tokenizer or folder
    where = where.parent if where.is_file() else where
    text: Text = Bytes()
    if (where / "tokenizer.json").is_file():
        tokenizer = weights.load_tokenizer(where)
        text = tokenizer
        ends |= _tokens(tokenizer.eos)
    elif config.vocab != 256 or options.tokenizer:
        raise ConfigError(
            f"{where}: there is no tokenizer.json, and a model of {config.vocab} tokens is not one of bytes: "
            "--tokenizer FILE says where it is"
        )
    return Loaded(str(folder), folder, config, params, text, tuple(sorted(ends)), mtp_after_norm=True)


def _settings(file: Path) -> Mapping[str, Any]:
    try:
        return json.loads(file.read_text()) if file.is_file() else {}
    except ValueError as error:
        raise WeightsError(file.parent, [f"{file.name}: {error}"]) from None


def _tokens(found: Any) -> set[int]:
    return set() if found is None else set(found) if isinstance(found, list) else {int(found)}
