"""``scripts/serve``: serve a run's checkpoint or published weights by OpenAI's API of completions."""

import contextlib
import dataclasses
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Annotated, ClassVar
from urllib.parse import urlsplit

from tyro.conf import arg

from dualpipe_jax.command.line import read
from dualpipe_jax.ranges import NotBelowZero, NotNegative
from models.serve import Chat, HttpLimits, Runner, Served, bind, make_app, serve
from models.weights import Tokenizer, WeightsError
from train.config import ConfigError
from train.generate.devices import check_at_once, find_devices
from train.generate.exit_codes import run_command, say
from train.generate.loading import LoadedModel, load
from train.generate.modes import DEFAULT_POSITIONS, make_engine
from train.generate.options import Source, check

DESCRIPTION = """Serve a model over HTTP as OpenAI's completions: POST /v1/completions and, where the weights have a
chat template, /v1/chat/completions; GET /v1/models, /health and /live for balancers, and /metrics for Prometheus.

There is no encryption, and without --api-key whoever reaches the address may ask. At SIGTERM or Ctrl-C what runs may
end; what has not within --grace seconds is told so."""

LOOPBACK = "127.0.0.1", "localhost", "::1"
_KEY_VARIABLE = "DUALPIPE_API_KEY"


@dataclasses.dataclass(frozen=True)
class Options(Source):
    """The options of ``scripts/serve``."""

    COMMON: ClassVar = ("source", "host", "port", "name", "at-once", "context", "max-waiting", "precision")

    host: str = "127.0.0.1"
    """The address to listen at; other machines cannot reach 127.0.0.1."""
    port: int = 8000
    """The port to listen at; 0 takes a free one."""
    allow_host: tuple[str, ...] = ()
    """More host names that requests may be for, without a port: of a proxy, or of web pages that send requests. At
    127.0.0.1 only the machine's own names are accepted besides, so that no page of another site can send requests; at
    any other address all names are accepted if none is given here."""
    api_key: tuple[str, ...] = ()
    """Keys of which a request below /v1 must carry one, as Authorization: Bearer KEY. Other users of this
    machine can read them in the list of processes, but not the further key in the environment variable
    DUALPIPE_API_KEY."""
    name: Annotated[str | None, arg(metavar="NAME")] = None
    """The model's name in requests; the name of its folder if left out."""
    max_waiting: NotNegative = 256
    """The most texts that may wait while --at-once are generated; further requests are answered with status
    429."""
    max_bytes: int = HttpLimits.max_bytes
    """The most bytes of a request."""
    max_choices: int = HttpLimits.max_choices
    """The most texts of one request, prompts times n."""
    max_seconds: float = HttpLimits.answer_seconds
    """The most seconds for an answer, including the time in the queue."""
    address_connections: int = HttpLimits.connections_per_address
    """The most connections that one address may hold; behind a balancer all connections are of its
    address."""
    shutdown_delay: NotBelowZero = 0.0
    """The seconds for which a server that is stopped still accepts requests while /health answers with status
    503, so that a balancer turns to other servers before a request is refused."""
    grace: NotBelowZero = 30.0
    """The seconds that running requests have to end when the server is stopped."""
    log: bool = False
    """Log each request."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from the command line.

    Returns the exit code: 0 after SIGTERM, 130 after Ctrl-C, 1 if the engine failed or no checkpoint is whole, 2 for
    options, weights or an address that cannot be used.
    """
    words = sys.argv[1:] if arguments is None else arguments
    options = read(Options, "scripts/serve", words, description=DESCRIPTION)
    return run_command(lambda: start(options))


def start(options: Options) -> int:
    try:
        limits = HttpLimits(
            options.max_bytes,
            options.max_choices,
            connections_per_address=options.address_connections,
            answer_seconds=options.max_seconds,
        )
    except ValueError as error:
        raise ConfigError(str(error)) from None
    check(options)
    find_devices(options)
    check_at_once(options)
    keys, hosts = _keys(options), _hosts(options)
    if not 0 <= options.port < 2**16:
        raise ConfigError(f"--port {options.port}: must be 0 to 65535")
    with _address_errors(options):
        bound = bind(options.host, options.port)  # before the weights are read, because the port may be taken
    with bound:
        host, port = bound.getsockname()[:2]
        if options.host not in LOOPBACK:
            lacks = "encryption, so keys can be read on the way" if keys else "key and no encryption"
            say(f"warning: whoever reaches {host} may ask: there is no {lacks}")
        loaded = load(options, say)
        chat = _make_chat(loaded)
        engine = make_engine(loaded, options, options.at_once, DEFAULT_POSITIONS, say)
        engine.compile()
        with _address_errors(options):
            bound.listen()
        runner = Runner(engine, options.max_waiting)
        name = options.name or loaded.folder.resolve().name
        say(f"serving {name!r} at http://{f'[{host}]' if ':' in host else host}:{port}/v1")
        if options.log:
            logging.getLogger("uvicorn").addHandler(logging.StreamHandler())
            logging.getLogger("uvicorn").propagate = False
        code = serve(
            make_app(runner, Served(name, loaded.tokenizer, loaded.stop, chat), limits, hosts, keys),
            runner,
            bound,
            limits=limits,
            shutdown_delay=options.shutdown_delay,
            grace=options.grace,
            log_level="info" if options.log else "warning",
        )
    if runner.failure is not None:
        say(f"error: the engine failed: {runner.failure}")
    return code


@contextlib.contextmanager
def _address_errors(options: Options) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"cannot listen at {options.host}, port {options.port}: {error}; --host and --port name another"
        ) from None


def _keys(options: Options) -> tuple[str, ...]:
    """The keys that requests may carry. Raises ConfigError for an empty key, which may come from a missing
    secret and would let everybody in, and for one with white space at an end."""
    more = os.environ.get(_KEY_VARIABLE)
    keys = options.api_key if more is None else (*options.api_key, more)
    if not all(key.strip() for key in keys):
        raise ConfigError(
            f"a key is empty: give --api-key a text and {_KEY_VARIABLE}, too, or leave both out to let in all"
        )
    if any(key != key.strip() for key in keys):
        raise ConfigError(
            f"a key of --api-key or {_KEY_VARIABLE} has white space at an end, which HTTP takes off what is sent: "
            "leave it out"
        )
    return keys


def _hosts(options: Options) -> Sequence[str] | None:
    """The host names that requests may be for, None for any. Raises ConfigError for a name that no request can have."""
    for name in options.allow_host:
        host = None
        with contextlib.suppress(ValueError):
            host = urlsplit(f"//{f'[{name}]' if name.count(':') > 1 else name}").hostname
        if host != name.lower():
            raise ConfigError(
                f"--allow-host {name}: must be a name or an address alone, without http://, a port or brackets"
            )
    return (*LOOPBACK, *options.allow_host) if options.host in LOOPBACK else options.allow_host or None


def _make_chat(loaded: LoadedModel) -> Chat | None:
    tokenizer = loaded.tokenizer
    if not isinstance(tokenizer, Tokenizer) or tokenizer.chat_template is None:
        return None
    try:
        return Chat(tokenizer.chat_template, tokenizer.special, tokenizer.encode_as_it_is)
    except ValueError as error:
        raise WeightsError(loaded.folder, [str(error)]) from None


if __name__ == "__main__":
    sys.exit(main())
