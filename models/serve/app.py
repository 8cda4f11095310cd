"""The HTTP side: routes, refused requests, streams, and clients that disconnect."""

import asyncio
import contextlib
import dataclasses
import json
import secrets
import time
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Mapping, Sequence
from typing import Any

import numpy as np
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from models.decode import RequestError, SamplingParams
from models.decode.text import TokenizerLike
from models.serve.errors import Refused
from models.serve.formats import ChatFormat, CompletionFormat
from models.serve.gate import Gate
from models.serve.job import ChoiceRequest, Job, timeout_error
from models.serve.limits import HttpLimits
from models.serve.metrics import CountingMiddleware, Metrics
from models.serve.protocol import ChatRequest, CompletionRequest, Prompt, parse
from models.serve.runner import Runner

SLOW_READER_SECONDS = 5.0
"""The seconds beyond the limit for the answer itself after which a stream that its client does not read is
given up."""


@dataclasses.dataclass(frozen=True)
class Served:
    """The model as clients see it.

    Attributes:
      name: the name by which clients ask for it.
      text: its tokenizer, which several threads use.
      stop: the tokens that end a text.
      chat: a function from messages to tokens; None for a model that was not trained for chats.
    """

    name: str
    text: TokenizerLike
    stop: tuple[int, ...] = ()
    chat: Callable[[Sequence[Mapping[str, Any]]], np.ndarray] | None = None


def make_app(
    runner: Runner,
    served: Served,
    limits: HttpLimits = HttpLimits(),  # noqa: B008
    hosts: Collection[str] | None = None,
    keys: Collection[str] = (),
) -> Starlette:
    """Return the ASGI application; it starts the runner when it starts, and closes it when it ends.

    ``hosts`` are the names that requests may be for, None for any. ``keys`` are the keys of which a request
    must carry one; without any, requests need no key. See ``Gate``.
    """
    metrics = Metrics(runner)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        runner.start()
        yield
        await runner.close()

    model_card = {"id": served.name, "object": "model", "created": int(time.time()), "owned_by": "you"}

    async def health(request: Request) -> Response:
        runner.check_ready()
        return JSONResponse({"status": "ok", "open": runner.num_open})

    async def live(request: Request) -> Response:
        runner.check_alive(limits.answer_seconds)
        return JSONResponse({"status": "ok"})

    async def models(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [model_card]})

    async def model(request: Request) -> Response:
        _check_name(request.path_params["name"], served)
        return JSONResponse(model_card)

    async def completions(request: Request) -> "_Answer":
        return await answer(request, _completions)

    async def chat(request: Request) -> "_Answer":
        return await answer(request, _chat)

    async def answer(request: Request, prepare: Prepare) -> "_Answer":
        runner.check_open()
        body = await _body(request, limits)
        seconds = limits.answer_seconds
        # Another thread makes the tokens, because a long text or a chat template may take long.
        try:
            async with asyncio.timeout(seconds):
                parsed, choices, answer_format = await asyncio.to_thread(
                    prepare, body, runner, served, limits
                )
        except TimeoutError:
            raise timeout_error(seconds) from None
        return _Answer(
            Job(runner, choices, served.text.decode, parsed.stop, seconds, metrics),
            parsed,
            answer_format,
            limits,
        )

    routes = [
        Route("/health", health),
        Route("/live", live),
        Route("/metrics", metrics.answer),
        Route("/v1/models", models),
        Route("/v1/models/{name:path}", model),
        Route("/v1/completions", completions, methods=["POST"]),
        Route("/v1/chat/completions", chat, methods=["POST"]),
    ]
    handlers: dict[Any, Callable[..., Any]] = {
        Refused: _error_response,
        HTTPException: _http_error,
        ClientDisconnect: lambda request, error: Response(
            status_code=499
        ),  # the client does not read it any more
        Exception: _internal_error,
    }
    gates = [
        Middleware(CountingMiddleware, metrics=metrics, routes=[route.path for route in routes]),
        Middleware(Gate, hosts=hosts, keys=keys),
    ]
    return Starlette(routes=routes, middleware=gates, lifespan=lifespan, exception_handlers=handlers)


Prepared = tuple[CompletionRequest | ChatRequest, list[ChoiceRequest], CompletionFormat | ChatFormat]
Prepare = Callable[[bytes, Runner, Served, HttpLimits], Prepared]


def _completions(body: bytes, runner: Runner, served: Served, limits: HttpLimits) -> Prepared:
    parsed = parse(body, CompletionRequest)
    _check_name(parsed.model, served)
    prompts = [_tokens(prompt, served.text) for prompt in parsed.prompt]
    scored = parsed.echo and parsed.logprobs is not None
    choices = _choice_requests(
        parsed, prompts, parsed.max_tokens, runner, served, limits, score_prompt=scored
    )
    if parsed.echo:
        echoes = [
            prompt if isinstance(prompt, str) else served.text.decode(prompt) for prompt in parsed.prompt
        ]
        choices = [one._replace(echo=echoes[number // parsed.n]) for number, one in enumerate(choices)]
    first = [int(one.prompt[0]) if scored else None for one in choices]
    return parsed, choices, CompletionFormat(served.name, served.text, parsed.likeliest, first)


def _chat(body: bytes, runner: Runner, served: Served, limits: HttpLimits) -> Prepared:
    parsed = parse(body, ChatRequest)
    _check_name(parsed.model, served)
    if served.chat is None:
        raise Refused(
            400,
            f"the model {served.name!r} has no chat template, so nobody knows how it was taught to read messages: ask "
            "/v1/completions, or serve a model that was trained for chats",
            param="messages",
        )
    messages = [
        {"role": one.role, "content": one.text} | ({"name": one.name} if one.name else {})
        for one in parsed.messages
    ]
    prompt = served.chat(messages)
    token_limit = parsed.token_limit or max(1, runner.max_positions - len(prompt))
    choices = _choice_requests(parsed, [prompt], token_limit, runner, served, limits)
    return parsed, choices, ChatFormat(served.name, served.text, parsed.likeliest)


def _choice_requests(
    parsed: CompletionRequest | ChatRequest,
    prompts: Sequence[np.ndarray],
    token_limit: int,
    runner: Runner,
    served: Served,
    limits: HttpLimits,
    *,
    score_prompt: bool = False,
) -> list[ChoiceRequest]:
    """Each prompt ``n`` times, with consecutive seeds. Raises Refused for a text that can never be generated."""
    num = len(prompts) * parsed.n
    if num > limits.max_choices:
        raise Refused(
            400,
            f"{len(prompts)} prompts with n {parsed.n} are {num} texts, the limit is {limits.max_choices} in one "
            "request: ask in several",
            param="n",
        )
    seed = secrets.randbits(32) if parsed.seed is None else parsed.seed
    choices = []
    for prompt in prompts:
        for choice in range(parsed.n):
            params = SamplingParams(
                token_limit,
                parsed.temperature,
                parsed.top_p,
                (seed + choice) % 2**32,
                served.stop,
                parsed.likeliest,
                score_prompt=score_prompt,
            )
            try:
                runner.check(prompt, params)
            except RequestError as error:
                raise Refused(400, str(error)) from None
            choices.append(ChoiceRequest(prompt, params))
    return choices


def _tokens(prompt: Prompt, text: TokenizerLike) -> np.ndarray:
    if not isinstance(prompt, str):
        return np.asarray(prompt, np.int32)
    try:
        return np.asarray(text.encode(prompt))
    except UnicodeEncodeError as error:
        raise Refused(400, f"prompt: is not a text of Unicode: {error}", param="prompt") from None


def _check_name(name: str, served: Served) -> None:
    if name != served.name:
        raise Refused(
            404,
            f"there is no model {name!r} here, only {served.name!r}",
            param="model",
            code="model_not_found",
        )


async def _body(request: Request, limits: HttpLimits) -> bytes:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    # Browsers let pages of other sites send other types without asking the server.
    if kind != "application/json":
        raise Refused(415, f"content-type is {kind or 'missing'}, must be application/json")
    too_much = Refused(
        413, f"the body is larger than the server's limit of {limits.max_bytes} bytes: ask for less at once"
    )
    # The header holds digits: uvicorn refuses a request if it does not.
    if int(request.headers.get("content-length", 0)) > limits.max_bytes:
        raise too_much
    parts, size = [], 0
    try:
        async with asyncio.timeout(limits.upload_seconds):
            async for part in request.stream():
                size += len(part)
                if size > limits.max_bytes:
                    raise too_much
                parts.append(part)
    except TimeoutError:
        # Do not wait for the rest: a client that sends a byte now and then would keep the connection.
        raise Refused(
            408,
            f"the body did not arrive within {limits.upload_seconds:g} s",
            headers={"connection": "close"},
        ) from None
    return b"".join(parts)


class _Answer:
    """An ASGI response for an answer that is still being generated; it ends its job in any case."""

    def __init__(
        self,
        job: Job,
        parsed: CompletionRequest | ChatRequest,
        answer_format: CompletionFormat | ChatFormat,
        limits: HttpLimits,
    ):
        self._job, self._parsed, self._format = job, parsed, answer_format
        self._seconds = limits.answer_seconds + SLOW_READER_SECONDS

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        make = self._stream(send) if self._parsed.stream else self._whole(scope, receive, send)
        try:
            async with asyncio.timeout(self._seconds):
                await _until_disconnect(receive, make)
        except (ClientDisconnect, TimeoutError):
            pass  # the client does not read any more
        finally:
            self._job.cancel()

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        pieces = await self._job.whole()
        await JSONResponse(self._format.whole(pieces, self._job.usage))(scope, receive, send)

    async def _stream(self, send: Send) -> None:
        events = self._events()
        # An error before the first event gets an HTTP status of its own, and a balancer may ask another
        # server.
        first = await anext(events)
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        try:
            await send({"type": "http.response.body", "body": _event(first), "more_body": True})
            async for event in events:
                await send({"type": "http.response.body", "body": _event(event), "more_body": True})
            last = b"data: [DONE]\n\n"
        except Refused as error:
            last = _event(error.body)
        await send({"type": "http.response.body", "body": last})

    async def _events(self) -> AsyncIterator[dict[str, Any]]:
        with_usage = self._parsed.stream_options.include_usage
        none: dict[str, Any] = {"usage": None} if with_usage else {}  # of all events but the last
        async for piece in self._job.pieces():
            for event in self._format.events(piece):
                yield event | none
        if with_usage:
            yield self._format.usage(self._job.usage)


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


async def _until_disconnect(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Run the work; once the client has disconnected, cancel it and raise ClientDisconnect."""

    async def disconnected() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    tasks = asyncio.create_task(work), asyncio.create_task(disconnected())
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not tasks[0].done():
            raise ClientDisconnect
        await tasks[0]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _error_response(request: Request, error: Refused) -> Response:
    return JSONResponse(error.body, error.status, error.headers)


async def _http_error(request: Request, error: HTTPException) -> Response:
    what = f"{request.method} {request.url.path}: {error.detail}"
    refused = Refused(error.status_code, what, headers=error.headers)
    return await _error_response(request, refused)


async def _internal_error(request: Request, error: Exception) -> Response:
    return await _error_response(request, Refused(500, "the server failed at this request"))
