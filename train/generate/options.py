"""What ``scripts/generate`` is asked for."""

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from tyro.conf import Positional, arg

from dualpipe_jax.command.line import read
from dualpipe_jax.ranges import AtLeastOne, out_of_range
from models.decode import PrefixFolder
from train.config import ConfigError

DESCRIPTION = """Let a model go on with a text. Standard output gets that text alone; all else goes to standard error.

Without --prompt or --batch the prompt is all of standard input or, on a terminal, what you type, line by line."""


@dataclasses.dataclass(frozen=True)
class Source:
    """Which model, and how it is served; ``scripts/serve`` asks for the same."""

    source: Annotated[Path | None, Positional, arg(metavar="[RUN|FOLDER]")] = None
    """A run's folder or its name in runs/, a folder of Hugging Face's (config.json, *.safetensors), or one that
    scripts/convert wrote; the newest run if left out."""
    step: int | None = None
    """Checkpoint of a run; its newest that is whole if left out."""
    tokenizer: Annotated[Path | None, arg(metavar="FILE")] = None
    """A tokenizer.json, or a folder with one, instead of what lies beside the weights."""
    precision: Literal["as-is", "float32", "bfloat16"] = "as-is"
    """What activations are computed in; as-is is what the model was made for."""
    drafts: bool = False
    """Guess a token ahead by the model's module of multi-token prediction. The text is the same."""
    context: AtLeastOne | None = None
    """Tokens that there is room for, prompt and answer; what the prompts need if left out, 1024 where they are not
    known yet."""
    prefix_cache: Annotated[Path | None, arg(metavar="DIR")] = None
    """Keep what is computed of prompts in this folder, and take what is there from it; any number of processes may."""
    prefix_bytes: int = PrefixFolder.max_bytes
    """Of that folder at most; what nobody used for longest is deleted first."""
    at_once: AtLeastOne = 8
    """Prompts that are served together."""
    devices: AtLeastOne = 1
    """Devices that prompts and experts are shared out over: accelerators, or virtual ones where JAX finds a CPU alone.
    The text is the same."""
    microbatches: Literal[1, 2] = 1
    """Parts of a device's prompts. Of two, each is computed while the other's tokens travel between devices. The text
    is the same."""


@dataclasses.dataclass(frozen=True)
class Options(Source):
    """What is asked for."""

    COMMON: ClassVar = (
        "source", "prompt", "max-tokens", "temperature", "top-p", "seed", "batch", "precision",
    )  # fmt: skip

    prompt: Annotated[str | None, arg(metavar="TEXT")] = None
    """What to go on with."""
    batch: Annotated[Path | None, arg(metavar="FILE")] = None
    """Prompts from a JSONL file, or - for standard input, each line {"prompt": TEXT}; max_tokens, temperature, top_p
    and seed there win over the options. Answers are lines of JSON too, in the same order."""
    max_tokens: int = 256
    """Tokens to be generated at most."""
    temperature: float = 0.0
    """Divides the logits; 0 takes the likeliest token."""
    top_p: float = 1.0
    """Draw only from the likeliest tokens that together have this probability."""
    seed: int = 0
    """Seed of the draw: the same again gives the same text."""


def parse(arguments: Sequence[str] | None = None) -> Options:
    """Read the command line (``sys.argv`` if None). Exits with code 2 where it cannot be read."""
    words = sys.argv[1:] if arguments is None else arguments
    return read(Options, "scripts/generate", words, description=DESCRIPTION)


def check(options: Source) -> None:
    """Raise ConfigError for the first option that is out of range."""
    for (name,), value, why in out_of_range(options):
        raise ConfigError(f"--{name.replace('_', '-')} {value}: {why}")
