"""OpenAI's completions and chats: the requests that a client may send.

https://platform.openai.com/docs/api-reference/completions and .../chat
"""

import json
from typing import Annotated, Any, Literal, TypeVar

import pydantic
from pydantic import AfterValidator, BeforeValidator, Field

from models.decode.scores import MAX_LIKELIEST
from models.serve.errors import Refused

Prompt = str | list[int]

# Python writes no integer of more than 4300 digits into a message; JSON may hold one of that length.
_Count = Annotated[int, Field(ge=1, lt=2**31)]


def _as_prompts(given: Any) -> list[Prompt]:
    """The prompts as a list, from one text, one list of tokens, or a list of either."""
    if isinstance(given, str) or _is_tokens(given):
        return [given]
    if isinstance(given, list) and (
        all(isinstance(one, str) for one in given) or all(map(_is_tokens, given))
    ):
        return given
    raise ValueError("must be a text, a list of texts, a list of tokens, or a list of such lists")


def _is_tokens(given: Any) -> bool:
    """Whether it is a list of tokens, or an empty list: the engine says what is wrong with an empty prompt."""
    return isinstance(given, list) and all(type(token) is int and abs(token) < 2**31 for token in given)


def _as_stops(given: Any) -> list[str]:
    return [given] if isinstance(given, str) else given


def _check_stops(given: list[str]) -> list[str]:
    if len(given) > 4 or not all(given):
        raise ValueError("must be at most 4 texts, none of them empty")
    return given


class _Strict(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", strict=True)

    @pydantic.model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, given: Any) -> Any:
        return {k: v for k, v in given.items() if v is not None} if isinstance(given, dict) else given


class StreamOptions(_Strict):
    """Options of a stream: whether it ends with the usage."""

    include_usage: bool = False


class _RequestBody(_Strict):
    """The parameters of any request; any other parameter is refused by its name."""

    model: str
    temperature: float = Field(1.0, ge=0, allow_inf_nan=False)
    top_p: float = Field(1.0, gt=0, le=1)
    n: _Count = 1
    seed: int | None = None
    stop: Annotated[list[str], BeforeValidator(_as_stops), AfterValidator(_check_stops)] = []
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    user: str = ""
    # OpenAI's parameters that this server does not support: only the values that change nothing are accepted.
    frequency_penalty: Annotated[float, Field(ge=0, le=0)] = 0
    presence_penalty: Annotated[float, Field(ge=0, le=0)] = 0
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] = {}


class CompletionRequest(_RequestBody):
    """The parameters of a request for completions."""

    max_tokens: _Count = 16
    logprobs: int | None = Field(None, ge=0, le=MAX_LIKELIEST)
    prompt: Annotated[list[Prompt], BeforeValidator(_as_prompts), Field(min_length=1)]
    echo: bool = False
    best_of: Literal[1] = 1

    @property
    def likeliest(self) -> int | None:
        """See ``SamplingParams``."""
        return self.logprobs


class TextPart(_Strict):
    """A part of a message's content; only text is supported."""

    type: Literal["text"]
    text: str


class Message(_Strict):
    """One message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart]
    name: str = ""

    @property
    def text(self) -> str:
        """Its content, with the parts joined."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatRequest(_RequestBody):
    """The parameters of a request for a chat. Without ``max_tokens`` a text may take all positions that are left."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_tokens: _Count | None = None
    max_completion_tokens: _Count | None = None
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=MAX_LIKELIEST)
    # Not supported either: only the values that change nothing are accepted.
    tool_choice: Literal["none"] = "none"
    response_format: dict[Literal["type"], Literal["text"]] = {"type": "text"}

    @pydantic.model_validator(mode="after")
    def _check_consistency(self) -> "ChatRequest":
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise ValueError("max_tokens and max_completion_tokens say the same: give one of them")
        if self.top_logprobs and not self.logprobs:
            raise ValueError(f"top_logprobs is {self.top_logprobs} without logprobs: set logprobs to true")
        return self

    @property
    def token_limit(self) -> int | None:
        """The largest number of tokens to generate; None for no limit of its own."""
        return self.max_tokens or self.max_completion_tokens

    @property
    def likeliest(self) -> int | None:
        """See ``SamplingParams``."""
        return self.top_logprobs if self.logprobs else None


_Body = TypeVar("_Body", bound=_RequestBody)


def parse(body: bytes, kind: type[_Body]) -> _Body:
    """Read a request of the type ``kind``. Raises Refused, 400, with a message that says what is wrong with it."""
    try:
        given = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Refused(400, f"the body is not JSON: {error}") from None
    if not isinstance(given, dict):
        raise Refused(400, "the body must be a JSON object")
    try:
        return kind.model_validate(given)
    except pydantic.ValidationError as error:
        found = [(".".join(map(str, one["loc"])), one["msg"], one["type"]) for one in error.errors()]
        message = "; ".join(
            f"{where}: {_error_message(what, type_)}".removeprefix(": ") for where, what, type_ in found[:4]
        )
        raise Refused(400, message, param=found[0][0].partition(".")[0] or None) from None


def _error_message(message: str, kind: str) -> str:
    if kind == "extra_forbidden":
        return "this server knows no such parameter; leave it out"
    if kind == "missing":
        return "is missing"
    return message.removeprefix("Value error, ")
