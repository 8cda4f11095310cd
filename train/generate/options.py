"""The options of ``scripts/generate``."""

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
    """The options for the model and how it is served, the same for ``scripts/serve``."""

    source: Annotated[Path | None, Positional, arg(metavar="[RUN|FOLDER]")] = None
    """A run's folder or its name in runs/, a folder of Hugging Face's (config.json, *.safetensors), or one that
    scripts/convert wrote; the newest run if left out."""
    step: int | None = None
    """The step of the run's checkpoint; the newest whole checkpoint if left out."""
    tokenizer: Annotated[Path | None, arg(metavar="FILE")] = None
    """A tokenizer.json, or a folder with one, instead of the tokenizer in the weights' folder."""
    precision: Literal["as-is", "float32", "bfloat16"] = "as-is"
    """The type in which activations are computed; as-is takes the type that the model was made for."""
    drafts: bool = False
    """Guess a token ahead by the model's module of multi-token prediction. The text is the same."""
    context: AtLeastOne | None = None
    """The most tokens of a request, prompt and answer together; as many as the prompts need if left out, or
    1024 if the prompts are not known yet."""
    prefix_cache: Annotated[Path | None, arg(metavar="DIR")] = None
    """Keep the latents of prompts in this folder, and reuse those that are there; any number of processes may
    share it."""
    prefix_bytes: int = PrefixFolder.max_bytes
    """The most bytes of that folder; the least recently used files are deleted first."""
    at_once: AtLeastOne = 8
    """The number of prompts that are served at the same time."""
    devices: AtLeastOne = 1
    """The number of devices over which prompts and experts are shared out: accelerators, or virtual devices
    where JAX finds only a CPU. The text is the same."""
    microbatches: Literal[1, 2] = 1
    """The number of parts of a device's prompts. With two, each part is computed while the other's tokens
    travel between devices. The text is the same."""


@dataclasses.dataclass(frozen=True)
class Options(Source):
    """The options of ``scripts/generate``."""

    COMMON: ClassVar = (
        "source", "prompt", "max-tokens", "temperature", "top-p", "seed", "batch", "precision",
    )  # fmt: skip

    prompt: Annotated[str | None, arg(metavar="TEXT")] = None
    """The text that the model continues."""
    batch: Annotated[Path | None, arg(metavar="FILE")] = None
    """Prompts from a JSONL file, or - for standard input, each line {"prompt": TEXT}; max_tokens, temperature, top_p
    and seed there win over the options. Answers are lines of JSON too, in the same order."""
    max_tokens: int = 256
    """The largest number of tokens to generate."""
    temperature: float = 0.0
    """Divides the logits; 0 takes the likeliest token."""
    top_p: float = 1.0
    """Draw only from the likeliest tokens that together have this probability."""
    seed: int = 0
    """The seed of the draws: the same seed gives the same text again."""


def parse(arguments: Sequence[str] | None = None) -> Options:
    """Read the command line (``sys.argv`` if None). Exits with code 2 where it cannot be read."""
    words = sys.argv[1:] if arguments is None else arguments
    return read(Options, "scripts/generate", words, description=DESCRIPTION)


def check(options: Source) -> None:
    """Raise ConfigError for the first option that is out of range."""
    for (name,), value, why in out_of_range(options):
        raise ConfigError(f"--{name.replace('_', '-')} {value}: {why}")
