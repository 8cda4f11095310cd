"""Conversion of a checkpoint from one format to the other, with a progress bar."""

import dataclasses
import math
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import tyro
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from dualpipe_jax.functional import Tree, num_params
from models.config import Config
from models.weights import native, tokenizer
from models.weights.config_json import to_json
from models.weights.errors import WeightsError
from models.weights.reading import Progress as Report
from models.weights.reading import load
from models.weights.settings import read_settings
from models.weights.writing import save

COPIED_FILES = (*tokenizer.FILES, "generation_config.json")
"""Files that are copied unchanged. None of them is code."""

UNCOPIED_SETTINGS = (
    "quantization_config",
    "rope_parameters",
    "torch_dtype",
    "dtype",
    "transformers_version",
    "auto_map",
)
"""Settings in ``config.json`` that describe the folder that was read, not the model, and so are not copied."""


@dataclasses.dataclass(frozen=True)
class Options:
    """Convert a checkpoint from Hugging Face's layout (config.json, *.safetensors) to our own files, or back.

    Our own files are a folder that Orbax writes: one that this command wrote, or a step of a run,
    runs/NAME/checkpoints/STEP. FP8 numbers are multiplied by their scales. The tokenizer and settings that the model
    does not know are copied.
    """

    source: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="IN")]
    """Folder to read."""
    target: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="OUT")]
    """Folder to write; it must not exist yet."""
    to: Literal["other", "huggingface", "orbax"] = "other"
    """Format to write; other is the format that IN does not have."""
    dtype: Literal["as-is", "float32", "bfloat16"] = "as-is"
    """Dtype of Hugging Face's tensors; as-is is the dtype that the model computes in. Our own are float32."""
    file_gb: float = 5.0
    """Largest size in gigabytes of a file of Hugging Face's tensors; a single tensor may be larger."""
    mtp: bool = True
    """Whether to copy modules of multi-token prediction, too."""


def convert(options: Options) -> str:
    """Convert a checkpoint as the options say; return a line that says what was done.

    Raises:
      WeightsError: IN is not a checkpoint, OUT exists already, or files can have no such size.
    """
    source, target = options.source, options.target
    if not 0 < options.file_gb < math.inf:  # NaN is not, either
        raise WeightsError("--file-gb", [f"is {options.file_gb}, must be above 0 and finite"])
    if target.exists():
        raise WeightsError(target, ["is there already"])
    published = (source / "config.json").exists()
    if published:
        with _progress_bar("reading") as report:
            config, params = load(source, mtp=options.mtp, progress=report)
        settings: Mapping[str, Any] = read_settings(source / "config.json")
    else:
        config, params, settings = native.read(source)
    if not options.mtp:
        config, params = _without_mtp(config, params)
    size = num_params(params)
    to = options.to if options.to != "other" else "orbax" if published else "huggingface"
    if to == "orbax":
        native.write(target, config, params, settings)
    else:
        _publish(options, config, params, settings)
    run = source.parent.parent  # the run's folder, if IN is a step of the trainer: the tokenizer lies there
    for name in COPIED_FILES:
        there = [
            folder / name
            for folder in ((source,) if published else (source, run))
            if (folder / name).is_file()
        ]
        if there:
            shutil.copyfile(there[0], target / name)
    return f"{size / 1e6:,.1f} million parameters from {source} to {target} ({to})"


def _without_mtp(config: Config, params: Tree) -> tuple[Config, Tree]:
    """Return params of one stage without modules of multi-token prediction, whose blocks are its last layers."""
    kept, stages = config.num_moe_layers, params["stages"]
    routing = jax.tree.map(lambda leaf: leaf[:, :kept], stages["routing"])
    return dataclasses.replace(config, num_mtp_layers=0), {
        "stages": {"layers": stages["layers"][:kept], "routing": routing},
        "shared": params["shared"] | {"mtp": []},
    }


def _publish(options: Options, config: Config, params: Tree, settings: Mapping[str, Any]) -> None:
    compute: Literal["float32", "bfloat16"] = (
        "bfloat16" if config.compute_dtype == jnp.bfloat16 else "float32"
    )
    dtype = compute if options.dtype == "as-is" else options.dtype
    known = to_json(config, dtype)
    extra = {key: value for key, value in settings.items() if key not in (*known, *UNCOPIED_SETTINGS)}
    most = round(options.file_gb * 1e9)
    with _progress_bar("writing") as report:
        save(options.target, config, params, dtype=dtype, max_file_bytes=most, extra=extra, progress=report)


@contextmanager
def _progress_bar(what: str) -> Iterator[Report]:
    columns = TextColumn(what), BarColumn(), DownloadColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(what, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)
