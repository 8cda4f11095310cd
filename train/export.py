"""Export a run's weights in Hugging Face's layout, which transformers and model servers read."""

import os
import shutil
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from safetensors import SafetensorError

import models
from dualpipe_jax.engine.stages import to_placed
from models.weights.config_json import to_json
from train.config import ConfigError, TrainConfig
from train.errors import CheckpointError
from train.processes.group import Processes
from train.setup import Run
from train.state.layout import TrainState


def check_export(config: TrainConfig, numbers: models.Config) -> None:
    """Find out before training what would prevent the export at its end. Makes the folder.

    Raises:
      ConfigError: the folder is not empty, cannot be written or replaced, or Hugging Face's layout has no such model.
    """
    folder = config.checkpoint.export
    if folder is None:
        return
    if not folder.name or folder.is_symlink() or folder.is_mount():
        raise ConfigError(
            f"--export {folder}: a folder takes this place once it is whole, so it must be no link, mount point or "
            "folder without a name; name a folder in it"
        )
    try:
        to_json(numbers, _dtype(numbers))
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise ConfigError(f"--export {folder}: is not empty; name another folder, or empty it")
        # The same replacement as at the end of the run.
        os.rename(_make_empty(_unfinished_folder(folder)), folder)
    except OSError as error:
        raise ConfigError(f"--export {folder}: cannot write there: {error.strerror or error}") from None
    except models.weights.WeightsError as error:
        raise ConfigError(f"--export {folder}: {error}") from None


def export(this: Run, state: TrainState, processes: Processes) -> str | None:
    """Write the weights to ``--export DIR``. Returns the line to print, or None without ``--export``.

    Tensors have the dtype in which activations are computed. The folder gets its name only when it is complete. The
    tokenizer's files are written too. Each process writes the parts of which it holds the first copy.

    Raises:
      CheckpointError: the weights could not be written.
    """
    folder = this.config.checkpoint.export
    if folder is None:
        return None
    try:
        _write(folder, this, state, processes)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"--export {folder}: {error}; the run is saved: with room and rights there, --name {this.config.name} "
            f"--resume --export {folder} writes its weights"
        ) from error
    return f"weights         {folder}: Hugging Face's layout, {_dtype(this.layout.model.config)}"


def _write(folder: Path, this: Run, state: TrainState, processes: Processes) -> None:
    new, numbers = _unfinished_folder(folder), this.layout.model.config
    if processes.leads:
        this.corpus.vocabulary.write(_make_empty(new))
    processes.barrier()
    models.weights.save(
        new,
        numbers,
        this.layout.plain(state).params,
        stages=this.layout.model.layout.plan,
        arrange=lambda stages: to_placed(stages, this.schedule.placement),
        dtype=_dtype(numbers),
        extra={"eos_token_id": this.corpus.vocabulary.separator},
    )
    processes.barrier()
    if processes.leads:
        os.rename(new, folder)


def _unfinished_folder(folder: Path) -> Path:
    # What is there is removed, so it has a name that nobody gives a folder of one's own.
    return folder.with_name(f".{folder.name}.unfinished")


def _make_empty(new: Path) -> Path:
    # Left by a run that was killed while it wrote.
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir()
    return new


def _dtype(numbers: models.Config) -> Any:
    return jnp.dtype(numbers.compute_dtype).name
