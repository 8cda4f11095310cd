"""Load a model to generate with: its configuration, its weights and its tokenizer."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from dualpipe_jax.functional import Tree
from models import weights
from models.config import Config
from models.decode.text import ByteTokenizer, TokenizerLike
from models.weights import WeightsError, native
from models.weights.settings import read_settings
from models.weights.tokenizer import bytes_of
from train.config import ConfigError, TrainConfig
from train.data import DataError
from train.data.manifest import TOKENIZER, is_prepared, open_prepared_vocabulary, read_manifest
from train.data.vocabulary import BYTES, Vocabulary, open_vocabulary
from train.errors import CheckpointError
from train.figures.folder import CHECKPOINTS
from train.generate.options import Source
from train.model import model_config
from train.options import apply
from train.state.fingerprint import fingerprint_on_host


@dataclasses.dataclass(frozen=True)
class LoadedModel:
    """A model to generate with.

    Attributes:
      name: where the model is from, in words for users.
      folder: the folder that the model is from.
      config: the model's configuration.
      params: ``params()`` returns the params of a one-stage pipeline, whose leaves are read when they are
        asked for; it raises WeightsError, and so does reading.
      tokenizer: the model's tokenizer.
      stop: the tokens that end a text.
      mtp_after_norm: see ``models.deepseek``.
      earlier: ``earlier()`` loads the run's checkpoint before this one, for use if this one's weights are not
        whole; it raises CheckpointError if there is none. None if the model is not from a run.
    """

    name: str
    folder: Path
    config: Config
    params: Callable[[], Tree]
    tokenizer: TokenizerLike
    stop: tuple[int, ...]
    mtp_after_norm: bool
    earlier: Callable[[], "LoadedModel"] | None = None


def load(options: Source, say: Callable[[str], None]) -> LoadedModel:
    """Find the model that ``options.source`` names, and read everything but its weights.

    Raises:
      ConfigError: there is nothing of that name, or the model's tokenizer is missing.
      CheckpointError: no checkpoint of the run can be read.
      WeightsError: the folder holds no DeepSeek model.
    """
    folder = find(options.source)
    if (folder / CHECKPOINTS).is_dir():
        return _from_run(folder, options, say)
    if options.step is not None:
        raise ConfigError(f"--step {options.step}: {folder} is no run: it has no {CHECKPOINTS}")
    return _from_weights(folder, options)


def find(source: Path | None, runs: Path = Path("runs")) -> Path:
    """The folder that ``source`` names, or of the newest run. Raises ConfigError if there is none."""
    if source is None:
        saved = [path.parent for path in runs.glob(f"*/{CHECKPOINTS}") if _checkpoints(path)]
        if not saved:
            raise ConfigError(
                f"there is no run with a checkpoint in {runs}: scripts/train makes one, or name a folder"
            )
        return max(saved, key=lambda folder: (folder / CHECKPOINTS).stat().st_mtime)
    for folder in (source, runs / source):
        if folder.is_dir():
            return folder
    raise ConfigError(f"{source}: there is no such folder, nor {runs / source}")


def _checkpoints(folder: Path) -> list[Path]:
    """A run's checkpoints, the newest first."""
    return sorted((p for p in folder.iterdir() if p.name.isdigit()), key=lambda p: -int(p.name))


def _from_run(folder: Path, options: Source, say: Callable[[str], None]) -> LoadedModel:
    steps = _checkpoints(folder / CHECKPOINTS)
    if options.step is not None:
        steps = [path for path in steps if int(path.name) == options.step]
    if not steps:
        what = "checkpoint" if options.step is None else f"step {options.step}"
        there = ", ".join(path.name for path in _checkpoints(folder / CHECKPOINTS)) or "none"
        raise CheckpointError(f"{folder}: there is no {what} in {folder / CHECKPOINTS}, only {there}")
    return _first_usable(folder, steps, options, say)


def _first_usable(
    folder: Path, steps: Sequence[Path], options: Source, say: Callable[[str], None]
) -> LoadedModel:
    """The first of ``steps`` whose checkpoint can be used."""
    if not steps:
        if options.step is not None:
            raise CheckpointError(
                f"step {options.step} in {folder / CHECKPOINTS} is not whole; without --step the newest whole one is "
                "taken"
            )
        raise CheckpointError(f"none of the checkpoints in {folder / CHECKPOINTS} is whole")
    path, *rest = steps
    earlier = functools.partial(_first_usable, folder, rest, options, say)
    try:
        config, _, facts = native.open_lazily(path)
    except WeightsError as error:
        say(unusable_warning(error, options))
        return earlier()
    vocabulary = _find_vocabulary(folder, facts, options)
    trained = model_config(apply(TrainConfig(), facts["options"], f"{path}: options"))
    config = dataclasses.replace(config, compute_dtype=trained.compute_dtype)
    return LoadedModel(
        f"{folder}, step {path.name}",
        folder,
        _with_precision(config, options),
        lambda: native.open_lazily(path, _find_damage)[1],
        VocabularyTokenizer(vocabulary),
        (vocabulary.separator,),
        mtp_after_norm=False,
        earlier=earlier,
    )


def unusable_warning(error: WeightsError, options: Source) -> str:
    """The warning about a checkpoint that cannot be used."""
    next_step = "" if options.step is not None else "; trying an earlier step"
    return f"warning: {error.where}: {error.complaints[0]}{next_step}"


def _with_precision(config: Config, options: Source) -> Config:
    if options.precision == "as-is":
        return config
    return dataclasses.replace(config, compute_dtype=jnp.dtype(options.precision))


def _find_damage(facts: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> list[str]:
    saved = facts.get("fingerprints", {})
    return [
        f"{name} is not what was saved"
        for name, array in arrays.items()
        if saved.get(name) != fingerprint_on_host(array)
    ]


def _find_vocabulary(folder: Path, facts: Mapping[str, Any], options: Source) -> Vocabulary:
    """The vocabulary that the run was trained with, found by its fingerprint in the places where it may still be."""
    data = facts["options"]["data"]
    named = (
        [options.tokenizer] if options.tokenizer else [folder, data.get("tokenizer"), *data.get("paths", ())]
    )
    for name in (None, *named):
        with contextlib.suppress(DataError, OSError):
            vocabulary = _open_vocabulary(name, facts.get("published", {}).get("eos_token_id"))
            if vocabulary.fingerprint == facts["tokenizer"]:
                return vocabulary
    looked = " or ".join(str(name) for name in named if name) or "what the run names"
    raise ConfigError(
        f"{folder}: its tokenizer is not {looked}: --tokenizer FILE says where the one is that it was trained with"
    )


def _open_vocabulary(name: str | Path | None, separator: int | None) -> Vocabulary:
    if name is None:
        return BYTES
    path = Path(name)
    if is_prepared(path):
        return open_prepared_vocabulary(path, read_manifest(path))
    # The run's own: data may have been prepared with another --separator than the usual ones.
    file = path / TOKENIZER if path.is_dir() else path
    own = "" if separator is None else Vocabulary(file=file).name_of(separator)
    return open_vocabulary(str(name), own or None)


class VocabularyTokenizer:
    """The trainer's vocabulary as a ``TokenizerLike``: without the separator that it puts after documents."""

    def __init__(self, vocabulary: Vocabulary):
        self._vocabulary = vocabulary

    def encode(self, text: str) -> np.ndarray:
        return self._vocabulary.encode([text.encode()])[0][:-1].astype(np.int32)

    def decode(self, tokens: Sequence[int]) -> str:
        return self._vocabulary.decode(tokens)

    def bytes_of(self, token: int) -> bytes:
        if self._vocabulary.file is None:
            return bytes([token])
        return bytes_of(self._vocabulary.name_of(token), self.decode([token]))


def _from_weights(folder: Path, options: Source) -> LoadedModel:
    settings: Mapping[str, Any]
    if (folder / "config.json").is_file():
        opened: Callable[[], tuple[Any, ...]] = functools.partial(
            weights.open_lazily, folder, mtp=options.drafts
        )
        settings = read_settings(folder / "config.json")
    else:
        opened = functools.partial(native.open_lazily, folder)
        settings = opened()[2].get("published", {})
    config = opened()[0]
    generation = folder / "generation_config.json"
    generation_settings = read_settings(generation) if generation.is_file() else {}
    end_tokens = {
        *_end_tokens(folder / "config.json", settings),
        *_end_tokens(generation, generation_settings),
    }
    tokenizer_folder = options.tokenizer or folder
    if tokenizer_folder.is_file():
        if tokenizer_folder.name != "tokenizer.json":
            raise ConfigError(
                f"--tokenizer {tokenizer_folder}: must be named tokenizer.json, as what belongs to it is read from the "
                "same folder by its name"
            )
        tokenizer_folder = tokenizer_folder.parent
    tokenizer: TokenizerLike = ByteTokenizer()
    if (tokenizer_folder / "tokenizer.json").is_file():
        loaded_tokenizer = weights.load_tokenizer(tokenizer_folder)
        tokenizer = loaded_tokenizer
        end_tokens |= set() if loaded_tokenizer.eos is None else {loaded_tokenizer.eos}
    elif config.vocab != 256 or options.tokenizer:
        raise ConfigError(
            f"{tokenizer_folder}: there is no tokenizer.json, and a model of {config.vocab} tokens is not one of "
            "bytes: --tokenizer FILE says where it is"
        )
    return LoadedModel(
        str(folder),
        folder,
        _with_precision(config, options),
        lambda: opened()[1],
        tokenizer,
        tuple(sorted(end_tokens)),
        mtp_after_norm=True,
    )


def _end_tokens(file: Path, settings: Mapping[str, Any]) -> set[int]:
    """The tokens that end texts, according to a file of settings."""
    found = settings.get("eos_token_id")
    tokens = [] if found is None else found if isinstance(found, list) else [found]
    if not all(isinstance(token, int) for token in tokens):
        raise WeightsError(
            file.parent, [f"{file.name}: eos_token_id is {found!r:.40}, must be a token's number"]
        )
    return set(tokens)
