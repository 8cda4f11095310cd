"""``python -m train.generate``: prompts in, text out."""

import sys
from collections.abc import Sequence

from dualpipe_jax.command.output import discard_output
from train.config import ConfigError
from train.generate.devices import check_at_once, find_devices
from train.generate.exit_codes import run_command, say
from train.generate.loading import load
from train.generate.modes import answer_batch, complete, converse
from train.generate.options import Options, check, parse


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from the command line.

    Returns the exit code: 2 for options, weights or a prompt that cannot be used, 1 if prompts of a batch
    failed or no checkpoint is whole, 130 for Ctrl-C.
    """
    options = parse(arguments)
    try:
        return run_command(lambda: start(options))
    except BrokenPipeError:  # the reader of the output has closed it
        discard_output()
        return 0


def start(options: Options) -> int:
    if options.prompt is not None and options.batch is not None:
        raise ConfigError("--prompt and --batch: give one of them")
    check(options)
    find_devices(options)
    if options.batch is not None:
        check_at_once(options)
    loaded = load(options, say)
    if options.batch is not None:
        return 1 if answer_batch(loaded, options, sys.stdout, say) else 0
    if options.prompt is None and sys.stdin.isatty():
        converse(loaded, options, sys.stdout, say)
        return 0
    prompt = options.prompt
    if prompt is None:
        try:
            prompt = sys.stdin.read().removesuffix("\n")
        except UnicodeDecodeError as error:
            raise ConfigError(f"standard input: is not a text of Unicode: {error}") from None
    complete(loaded, options, prompt, sys.stdout, say)
    return 0


if __name__ == "__main__":
    sys.exit(main())
