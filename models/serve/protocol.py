"""OpenAI's completions: what may be asked for, and what answers look like.

https://platform.openai.com/docs/api-reference/completions
"""

import json
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import pydantic
from pydantic import AfterValidator, BeforeValidator, Field

from models.serve.errors import Refused
from models.serve.job import Piece, Usage

Prompt = str | list[int]


def _prompts(given: Any) -> list[Prompt]:
    """One text, one list of tokens, or a list of either."""
    if isinstance(given, str) or _is_tokens(given):
        return [given]
    if isinstance(given, list) and (
        all(isinstance(one, str) for one in given) or all(map(_is_tokens, given))
    ):
        return given
    raise ValueError("must be a text, a list of texts, a list of tokens, or a list of such lists")


def _is_tokens(given: Any) -> bool:
    """Empty lists too: the engine says what is wrong with them."""
    return isinstance(given, list) and all(type(token) is int and abs(token) < 2**31 for token in given)


def _stops(given: Any) -> list[str]:
    return [given] if isinstance(given, str) else given


def _few_words(given: list[str]) -> list[str]:
    if len(given) > 4 or not all(given):
        raise ValueError("must be at most 4 texts, none of them empty")
    return given


class _Strict(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", strict=True)

    @pydantic.model_validator(mode="before")
    @classmethod
    def _null_is_left_out(cls, given: Any) -> Any:
        return {k: v for k, v in given.items() if v is not None} if isinstance(given, dict) else given


class StreamOptions(_Strict):
    """Options of a stream: whether it ends with the usage."""

    include_usage: bool = False


class CompletionAsked(_Strict):
    """What a request may say; what is not there is refused by name."""

    model: str
    max_tokens: int = Field(16, ge=1)
    temperature: float = Field(1.0, ge=0, allow_inf_nan=False)
    top_p: float = Field(1.0, gt=0, le=1)
    n: int = Field(1, ge=1)
    seed: int | None = None
    stop: Annotated[list[str], BeforeValidator(_stops), AfterValidator(_few_words)] = []
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    user: str = ""
    # OpenAI's, of which only what changes nothing can be had:
    frequency_penalty: Annotated[float, Field(ge=0, le=0)] = 0
    presence_penalty: Annotated[float, Field(ge=0, le=0)] = 0
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] = {}
    prompt: Annotated[list[Prompt], BeforeValidator(_prompts), Field(min_length=1)]
    echo: bool = False
    best_of: Literal[1] = 1


def parse(body: bytes) -> CompletionAsked:
    """Read a request. Raises Refused, 400, that says what is wrong with it."""
    try:
        given = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Refused(400, f"the body is not JSON: {error}") from None
    if not isinstance(given, dict):
        raise Refused(400, "the body must be a JSON object")
    try:
        return CompletionAsked.model_validate(given)
    except pydantic.ValidationError as error:
        found = [(".".join(map(str, one["loc"])), one["msg"], one["type"]) for one in error.errors()]
        told = "; ".join(f"{where}: {_told(what, type_)}" for where, what, type_ in found[:4])
        raise Refused(400, told, param=found[0][0].partition(".")[0]) from None


def _told(message: str, kind: str) -> str:
    if kind == "extra_forbidden":
        return "this server knows no such parameter; leave it out"
    if kind == "missing":
        return "is missing"
    return message.removeprefix("Value error, ")


class Shape:
    """Answers to one request."""

    def __init__(self, model: str):
        self._head = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }

    def whole(self, pieces: Sequence[Piece], usage: Usage) -> dict[str, Any]:
        return self._head | {"choices": [self._choice(piece) for piece in pieces], "usage": _usage(usage)}

    def piece(self, piece: Piece, with_usage: bool) -> dict[str, Any]:
        """Return an event of a stream; with usage at the end the others say that they have none."""
        return self._head | {"choices": [self._choice(piece)]} | ({"usage": None} if with_usage else {})

    def usage(self, usage: Usage) -> dict[str, Any]:
        return self._head | {"choices": [], "usage": _usage(usage)}

    def _choice(self, piece: Piece) -> dict[str, Any]:
        return {
            "index": piece.choice, "text": piece.text, "logprobs": None, "finish_reason": piece.finish_reason,
        }  # fmt: skip


def _usage(usage: Usage) -> Mapping[str, Any]:
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.prompt + usage.completion,
        "prompt_tokens_details": {"cached_tokens": usage.reused},
    }
