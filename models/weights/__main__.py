"""``python -m models.weights IN OUT``: a published checkpoint to our own files, and back."""

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import tyro

from models.weights.errors import WeightsError


@dataclasses.dataclass(frozen=True)
class Options:
    """Convert a checkpoint: Hugging Face's layout (config.json, *.safetensors) to our own files, and those to it.

    Our own are a folder that Orbax writes: what this wrote, or a step of a run, runs/NAME/checkpoints/STEP. FP8 is
    multiplied out. The tokenizer and the settings that the model does not know go along.
    """

    source: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="IN")]
    """Folder to read."""
    target: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="OUT")]
    """Folder to write; must not be there."""
    to: Literal["other", "huggingface", "orbax"] = "other"
    """What to write; other is whichever IN is not."""
    dtype: Literal["as-is", "float32", "bfloat16"] = "as-is"
    """Of Hugging Face's tensors; as-is is what the model computes in. Ours are float32."""
    file_gb: float = 5.0
    """Gigabytes of a file of Hugging Face's tensors."""
    mtp: bool = True
    """Whether modules of multi-token prediction go along."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from the command line. Returns the exit code: 2 for a folder that will not do."""
    options = tyro.cli(Options, prog="scripts/convert", args=arguments)
    from models.weights.converting import convert  # only now, for JAX takes seconds to import

    try:
        print(convert(options))
    except (WeightsError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
