"""Access to the server: limits on connections, the hosts that requests may name, and keys."""

import asyncio
import secrets
from collections.abc import Collection
from typing import Any
from urllib.parse import urlsplit

import h11
from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from models.serve.errors import Refused
from models.serve.limits import HttpLimits


def limited_protocol(limits: HttpLimits, max_connections: int) -> type[H11Protocol]:
    """Uvicorn's connection class, with limits on the time for a request's headers, on the time for what is left of the
    body of a refused one, and on connections, in all and by address."""

    class LimitedProtocol(H11Protocol):
        _timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            num_connections = sum(
                getattr(other, "_address", None) == self._address for other in self.connections
            )
            if num_connections > limits.connections_per_address:
                self._end(
                    429,
                    f"this address holds {limits.connections_per_address} connections: close some of them",
                )
                return
            if len(self.connections) > max_connections:
                # Uvicorn's own limit refuses the requests of all connections, and the last one that it allows, too.
                refused = Refused(503, f"the server holds {max_connections} connections: ask again later")
                self.app = JSONResponse(refused.body, refused.status, {"connection": "close"})
            self._wait_for_headers()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            # Idle: the headers of a request, perhaps a later one of a kept connection, are not complete yet.
            if self.conn.their_state is h11.IDLE:
                self._wait_for_headers()
            elif self._timer is not None:
                self._timer.cancel()
                self._timer = None

        def on_response_complete(self) -> None:
            super().on_response_complete()
            if self.conn.their_state is h11.SEND_BODY:
                # Refused before its body was there. With the next byte Uvicorn's own timer is off.
                self.loop.call_later(limits.upload_seconds, self._close_unless_read, self.cycle)

        def send_400_response(self, msg: str) -> None:
            if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
                self._end(400, msg)
            else:
                # A body that goes wrong after its request was answered.
                self.transport.close()

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            if self._timer is not None:
                self._timer.cancel()

        @property
        def _address(self) -> str | None:
            return None if self.client is None else self.client[0]

        def _wait_for_headers(self) -> None:
            if self._timer is None:
                words = f"the headers did not arrive within {limits.header_seconds:g} s"
                self._timer = self.loop.call_later(limits.header_seconds, self._end, 408, words)

        def _close_unless_read(self, cycle: RequestResponseCycle | None) -> None:
            if self.cycle is cycle and self.conn.their_state is h11.SEND_BODY:
                self.transport.close()

        def _end(self, status: int, message: str) -> None:
            if not self.transport.is_closing():
                body = JSONResponse(Refused(status, message).body).body
                head = (
                    f"HTTP/1.1 {status} \r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
                )
                self.transport.write(head.encode() + b"connection: close\r\n\r\n" + bytes(body))
                self.transport.close()

    return LimitedProtocol


class Gate:
    """An application that answers only requests for its own host.

    The owner of another name may make it resolve to this machine; then a page of that site in a browser could
    send requests as if it were a page of ours (DNS rebinding).

    ``hosts`` are the names that requests may be for, without a port; None for any. If there are ``keys``,
    requests below /v1 must carry one of them.
    """

    def __init__(self, app: ASGIApp, hosts: Collection[str] | None, keys: Collection[str] = ()):
        self._app, self._hosts = app, None if hosts is None else [host.lower() for host in hosts]
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or refuse it."""
        refused = self._check(Headers(scope=scope), scope["path"]) if scope["type"] == "http" else None
        answer = self._app if refused is None else JSONResponse(refused.body, refused.status, refused.headers)
        await answer(scope, receive, send)

    def _check(self, headers: Headers, path: str) -> Refused | None:
        given, origin = headers.get("host", ""), headers.get("origin")
        host = _name(f"//{given}")
        if self._hosts is not None and host not in self._hosts:
            others = "--allow-host lets others in"
            return Refused(403, f"this server is not {given!r} but {', '.join(self._hosts)}; {others}")
        if origin is not None and _name(origin) != host and _name(origin) not in (self._hosts or ()):
            return Refused(403, f"pages of {origin!r} may not ask here; --allow-host lets them")
        if self._keys and path.startswith("/v1"):
            sent = headers.get("authorization", "").encode("latin-1")  # the bytes as they were sent
            scheme, _, key = sent.partition(b" ")
            is_known = any([secrets.compare_digest(key.strip(), one) for one in self._keys])
            if scheme.lower() != b"bearer" or not is_known:
                reason = f"the request has no key{' of this server' if sent else ''}"
                words = f"{reason}: send the header 'Authorization: Bearer KEY'"
                return Refused(401, words, code="invalid_api_key", headers={"www-authenticate": "Bearer"})
        return None


def _name(url: str) -> str | None:
    try:
        return urlsplit(url).hostname
    except ValueError:
        return None
