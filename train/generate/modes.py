"""The ways to generate: from one prompt, from prompts that are typed, and from prompts of a file."""

import dataclasses
import json
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import jax
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from dualpipe_jax.parallel import EP, make_mesh
from dualpipe_jax.present.numbers import how_many
from models import Dispatch
from models.decode import Completion, Engine, Limits, PrefixFolder, RequestError, SamplingParams, decoder
from models.decode.requests import check_request
from models.decode.text import Detokenizer
from models.weights import WeightsError
from train.config import ConfigError
from train.generate.devices import num_parts
from train.generate.loading import LoadedModel, unusable_warning
from train.generate.options import Options, Source

DEFAULT_POSITIONS = 1024
"""The number of positions of a request for prompts that are not known yet."""

Say = Callable[[str], None]

_PARAM_TYPES: Mapping[str, type] = {"max_tokens": int, "temperature": float, "top_p": float, "seed": int}


def params_of(
    options: Options, loaded: LoadedModel, given: Mapping[str, Any] | None = None
) -> SamplingParams:
    """The sampling parameters of a prompt; those in ``given`` replace the options'."""
    values = {name: getattr(options, name) for name in _PARAM_TYPES} | dict(given or {})
    return SamplingParams(stop=loaded.stop, **values)


def make_engine(loaded: LoadedModel, options: Source, max_requests: int, positions: int, say: Say) -> Engine:
    """Read the weights and make the engine that serves them.

    Args:
      loaded: the model; if its weights prove damaged, an earlier step of its run is taken.
      options: the options for serving.
      max_requests: the number of requests at the same time; it is rounded up so that devices and microbatches
        share them equally.
      positions: the positions of a request, rounded up so that similar lengths use the same program.
      say: a function that is called with messages: what is served, and what is damaged.

    Raises:
      ConfigError: options do not fit the model, which is then not read, or there is not enough memory.
      WeightsError, CheckpointError: no weights are whole.
    """
    experts = loaded.config.num_experts
    if options.drafts and not loaded.config.num_mtp_layers:
        raise ConfigError(f"--drafts: {loaded.name} has no module of multi-token prediction")
    if experts % options.devices:
        shared = ", ".join(str(n) for n in range(1, experts + 1) if experts % n == 0)
        raise ConfigError(
            f"--devices {options.devices}: {loaded.name} has {experts} experts, which so many cannot share equally; "
            f"give one of {shared}"
        )
    room = _room(options, positions)
    limits = Limits(-(-max_requests // num_parts(options)) * num_parts(options), room)
    mesh = None if options.devices == 1 else make_mesh(1, options.devices)
    dispatch = Dispatch() if mesh is None else Dispatch(axis_name=EP)
    model = decoder(loaded.config, dispatch=dispatch, mtp_after_norm=loaded.mtp_after_norm)
    prefixes, warn = None, lambda text: say(f"warning: {text}")
    try:
        if options.prefix_cache is not None:
            prefixes = PrefixFolder(options.prefix_cache, options.prefix_bytes, warn)
        engine = Engine(
            model,
            loaded.params(),
            limits,
            drafts=options.drafts,
            prefixes=prefixes,
            mesh=mesh,
            microbatches=options.microbatches,
        )
    except WeightsError as error:
        if loaded.earlier is None:
            raise
        say(unusable_warning(error, options))
    except ValueError as error:
        raise ConfigError(str(error)) from None
    except (jax.errors.JaxRuntimeError, MemoryError) as error:
        if not isinstance(error, MemoryError) and "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise ConfigError(
            f"there is no memory for {loaded.name} and {room} positions of {limits.max_requests} prompts: give a "
            "smaller --context, beyond which prompts are refused, or a smaller --at-once or --max-tokens"
        ) from None
    else:
        description = (
            f"{loaded.config.num_layers} layers, {loaded.config.vocab} tokens, {room} positions a request"
        )
        say(f"{loaded.name}: {description}" + (f", {options.devices} devices" if mesh is not None else ""))
        return engine
    return make_engine(loaded.earlier(), options, max_requests, positions, say)


def _room(options: Source, positions: int) -> int:
    return options.context or -(-positions // 64) * 64


def complete(loaded: LoadedModel, options: Options, prompt: str, out: TextIO, say: Say) -> None:
    """Write the text that follows a prompt while it is generated.

    Raises:
      RequestError: the prompt cannot be served.
    """
    tokens = _encode(loaded, prompt)
    positions = len(tokens) + max(1, options.max_tokens)
    # Before the weights are read, which may take minutes.
    limits = Limits(max_positions=_room(options, positions))
    check_request(tokens, params_of(options, loaded), limits, loaded.config.vocab)
    engine = make_engine(loaded, options, 1, positions, say)
    _stream(engine, loaded, options, tokens, out, say)


def _encode(loaded: LoadedModel, prompt: str) -> np.ndarray:
    try:
        return loaded.tokenizer.encode(prompt)
    except UnicodeEncodeError as error:
        raise RequestError(f"the prompt is not a text of Unicode: {error}") from None


def converse(loaded: LoadedModel, options: Options, out: TextIO, say: Say) -> None:
    """Continue each line that is typed, until the input ends; Ctrl-C ends an answer."""
    engine = make_engine(loaded, options, 1, DEFAULT_POSITIONS, say)
    say("a line is a prompt; Ctrl-C ends an answer, Ctrl-D this")
    while True:
        sys.stderr.write("> ")
        sys.stderr.flush()
        try:
            line = sys.stdin.readline()
        except UnicodeDecodeError as error:
            say(f"error: the line is not a text of Unicode: {error}")
            continue
        if not line:
            return
        try:
            with _caught_interrupts() as interrupts:
                tokens = _encode(loaded, line.rstrip("\n"))
                _stream(engine, loaded, options, tokens, out, say, interrupts)
        except RequestError as error:
            say(f"error: {error}")


@contextmanager
def _caught_interrupts() -> Iterator[list[int]]:
    """Collect Ctrl-C in a list, because an exception in the middle of a step would lose the cache."""
    interrupts: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: interrupts.append(number))
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, before)


def _stream(
    engine: Engine,
    loaded: LoadedModel,
    options: Options,
    tokens: np.ndarray,
    out: TextIO,
    say: Say,
    interrupts: Sequence[int] = (),
) -> None:
    stream, began = Detokenizer(loaded.tokenizer.decode), time.monotonic()
    new_tokens: list[int] = []
    first: float | None = None
    number = engine.add(tokens, params_of(options, loaded), new_tokens.append)
    ended: list[Completion] = []
    while engine.busy:
        ended += engine.step()
        if new_tokens and first is None:
            first = time.monotonic()
        out.write("".join(map(stream.push, new_tokens)))
        out.flush()
        new_tokens.clear()
        if interrupts:
            engine.cancel(number)
    out.write(stream.finish() + "\n")
    out.flush()
    (one,) = ended
    if one.error:
        raise RequestError(one.error)
    now = time.monotonic()
    say(_summary(one, (first or now) - began, now - (first or now)))


def _summary(one: Completion, waited: float, took: float) -> str:
    rate = f", then {(len(one.tokens) - 1) / took:,.1f} tokens/s" if len(one.tokens) > 1 and took > 0 else ""
    drafts = f"; {one.num_accepted} of {one.num_drafted} drafts right" if one.num_drafted else ""
    known = f"; {one.num_reused} of the prompt's were known" if one.num_reused else ""
    tokens = how_many(len(one.tokens), "token")
    return f"{tokens} ({one.finish_reason}), the first after {waited:.1f} s{rate}{drafts}{known}"


@dataclasses.dataclass
class _BatchLine:
    """A line of the file, its tokens and sampling parameters if it can be served, and its answer once it is known."""

    given: dict[str, Any]
    request: tuple[Any, SamplingParams] | None = None
    answer: dict[str, Any] = dataclasses.field(default_factory=dict)


def answer_batch(loaded: LoadedModel, options: Options, out: TextIO, say: Say) -> int:
    """Answer each line of a file; a line that cannot be served gets an error as its answer and harms no other.

    Returns:
      The number of lines that failed.

    Raises:
      ConfigError: the file cannot be read.
    """
    assert options.batch is not None
    lines = [_parse_line(line, loaded, options) for line in _read_lines(options.batch)]
    good = [(one, *one.request) for one in lines if one.request is not None]
    needs = [len(tokens) + max(1, params.max_tokens) for _, tokens, params in good]
    engine = make_engine(loaded, options, max(1, min(options.at_once, len(good))), max(needs, default=1), say)
    by_number: dict[int, _BatchLine] = {}
    began, num_tokens, written, num_known = time.monotonic(), 0, 0, 0
    with _progress_bar(len(lines)) as show:

        def count_token(token: int) -> None:
            nonlocal num_tokens
            num_tokens += 1

        for one, tokens, params in good:
            try:
                by_number[engine.add(tokens, params, count_token)] = one
            except RequestError as error:
                one.answer = {"error": str(error)}
        while written < len(lines):
            for ended in engine.step():
                by_number[ended.id].answer = _answer_of(ended, loaded)
                num_known += ended.num_reused
            while written < len(lines) and (answer := lines[written].answer):
                text = json.dumps(lines[written].given | answer, ensure_ascii=False)
                # A line may hold half a surrogate pair: it is written as JSON's escape.
                out.write(text.encode(errors="backslashreplace").decode() + "\n")
                out.flush()
                written += 1
            show(sum(bool(one.answer) for one in lines), num_tokens / (time.monotonic() - began))
    took = time.monotonic() - began
    failed = sum("error" in one.answer for one in lines)
    drafts = sum(one.answer.get("num_accepted", 0) for one in lines)
    say(
        f"{how_many(len(lines), 'prompt')}, {failed} failed; {how_many(num_tokens, 'token')} in {took:.1f} s, "
        f"{num_tokens / took:,.1f} tokens/s"
        + (f"; {drafts} drafts right" if options.drafts else "")
        + (f"; {num_known} of the prompts' tokens were known" if num_known else "")
    )
    return failed


_ANSWER_NAMES = {"text", "finish_reason", "num_tokens", "num_drafted", "num_accepted", "error"}


def _parse_line(line: str, loaded: LoadedModel, options: Options) -> _BatchLine:
    try:
        given = json.loads(line)
    except (ValueError, RecursionError) as error:
        return _BatchLine({}, answer={"error": f"not JSON: {error}"})
    if not isinstance(given, dict) or not isinstance(given.get("prompt"), str):
        return _BatchLine({}, answer={"error": 'must be an object with a text, {"prompt": TEXT}'})
    # Of an answer that is asked again nothing of the first one stays.
    given = {name: value for name, value in given.items() if name not in _ANSWER_NAMES}
    try:
        own = {
            name: _parse_number(name, given[name], kind)
            for name, kind in _PARAM_TYPES.items()
            if name in given
        }
        return _BatchLine(given, (loaded.tokenizer.encode(given["prompt"]), params_of(options, loaded, own)))
    except (TypeError, ValueError, OverflowError) as error:
        return _BatchLine(given, answer={"error": str(error)})


def _parse_number(name: str, value: Any, kind: type) -> Any:
    """The number in JSON; a TypeError if it would have to be rounded or is a text."""
    if type(value) not in (int, kind):
        raise TypeError(f"{name} is {value!r}, must be {'a whole' if kind is int else 'a'} number")
    return kind(value)


def _answer_of(one: Completion, loaded: LoadedModel) -> dict[str, Any]:
    found: dict[str, Any] = {"text": loaded.tokenizer.decode(one.tokens), "finish_reason": one.finish_reason}
    found["num_tokens"] = len(one.tokens)
    if one.num_drafted:
        found |= {"num_drafted": one.num_drafted, "num_accepted": one.num_accepted}
    return found | ({"error": one.error} if one.error else {})


def _read_lines(file: Path) -> list[str]:
    try:
        text = sys.stdin.read() if str(file) == "-" else file.read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--batch {file}: cannot read it: {error}") from None
    return [line for line in text.split("\n") if line.strip()]  # other line ends may be part of a JSON text


@contextmanager
def _progress_bar(total: int) -> Iterator[Callable[[int, float], None]]:
    """A progress bar on standard error, shown only if that is a terminal and standard output is not one."""
    columns = TextColumn("prompts"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}")
    hidden = sys.stdout.isatty() or not sys.stderr.isatty()
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True), disable=hidden) as progress:
        task = progress.add_task("", total=total, rate="")
        yield lambda done, rate: progress.update(task, completed=done, rate=f"{rate:,.1f} tokens/s")
