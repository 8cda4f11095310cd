"""Run the application in Uvicorn, and shut it down in order."""

import asyncio
import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import uvicorn
from starlette.applications import Starlette

from models.serve.app import SLOW_READER_SECONDS
from models.serve.gate import limited_protocol
from models.serve.limits import HttpLimits
from models.serve.runner import Runner


def bind(host: str, port: int) -> socket.socket:
    """Return a socket that is bound to an address; port 0 takes a free port. Raises OSError.

    Connections are refused until the socket listens, which ``serve`` starts, so that a balancer asks another
    server at once.
    """
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        if os.name == "posix":  # on Windows the option would let two servers bind the same address
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
    except OSError:
        bound.close()
        raise
    return bound


class _Server(uvicorn.Server):
    """A Uvicorn server that lets the runner end its texts when it is asked to stop."""

    def __init__(self, config: uvicorn.Config, runner: Runner, shutdown_delay: float, grace: float):
        super().__init__(config)
        self._runner, self._delay, self._grace = runner, shutdown_delay, grace
        runner.on_failure = self.stop

    def stop(self) -> None:
        self.should_exit = True

    async def main_loop(self) -> None:
        await super().main_loop()
        self._runner.leaving = True
        # The client's next request then opens a new connection, which a balancer sends to another server.
        self.server_state.default_headers.append((b"connection", b"close"))
        if self._runner.failure is None:
            await self._unless_forced(asyncio.sleep(self._delay))
        for server in self.servers:  # no new connections; the open ones may wait for their answers
            server.close()
        await self._unless_forced(self._runner.drain(self._grace))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await self._unless_forced(super().shutdown(sockets))

    async def _unless_forced(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        while not task.done() and not self.force_exit:
            await asyncio.sleep(0.05)
        if task.done():
            await task


def serve(
    app: Starlette,
    runner: Runner,
    bound: socket.socket,
    *,
    limits: HttpLimits = HttpLimits(),  # noqa: B008
    shutdown_delay: float = 0.0,
    grace: float = 30.0,
    max_connections: int = 256,
    log_level: str = "warning",
    started: Callable[[Callable[[], None]], None] = lambda stop: None,
) -> int:
    """Serve until SIGTERM or Ctrl-C; the signal is not passed on to other handlers.

    Then ``/health`` says that the server stops, and after ``shutdown_delay`` seconds no more requests are
    accepted. Those that are running may end within ``grace`` seconds; after that they end with an error that
    says so, and the thread and all sockets are closed. A second Ctrl-C does not wait.

    Args:
      app: the application, see ``make_app``.
      runner: the application's runner.
      bound: the socket, see ``bind``.
      limits: the limits of connections.
      shutdown_delay: the seconds that a balancer, which asks for ``/health``, has to turn to other servers.
      grace: the seconds that running requests have to end.
      max_connections: the most connections at the same time; a request on a further one is answered with status 503.
      log_level: the level of the loggers "uvicorn.error" and "uvicorn.access"; "info" logs each request.
      started: a function that is called before the first request with a function that stops the server, which
        any thread may call.

    Returns:
      An exit code: 0 after SIGTERM or ``stop``, 130 after Ctrl-C, 1 if the engine failed.
    """
    config = uvicorn.Config(
        app,
        http=limited_protocol(limits, max_connections),
        ws="none",
        loop="asyncio",
        lifespan="on",
        log_config=None,  # Uvicorn's own configuration closes the handlers of other libraries
        log_level=log_level,
        server_header=False,
        timeout_graceful_shutdown=int(SLOW_READER_SECONDS) + 1,
    )
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # on Linux
        # Closing waits until what was sent is read; connections have the option of the socket that accepts them.
        milliseconds = int(1000 * min(limits.answer_seconds + SLOW_READER_SECONDS, 10**6))
        bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
    server = _Server(config, runner, shutdown_delay, grace)
    started(server.stop)
    with _caught_signals() as signals:
        server.run(sockets=[bound])
    if runner.failure is not None:
        return 1
    return 130 if signal.SIGINT in signals else 0


@contextlib.contextmanager
def _caught_signals() -> Iterator[list[int]]:
    """Yield a list of the signals that come, instead of ending the process.

    Uvicorn has its own handlers, and when it has ended it raises again the signals that they caught.
    """
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    caught = signal.SIGTERM, signal.SIGINT
    before = [signal.signal(number, lambda number, frame: received.append(number)) for number in caught]
    try:
        yield received
    finally:
        for number, handler in zip(caught, before, strict=True):
            signal.signal(number, handler)
