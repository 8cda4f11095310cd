"""The format of OpenAI's answers, for completions and for chats.

https://platform.openai.com/docs/api-reference/completions and .../chat
"""

import time
import uuid
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from models.decode import Score
from models.decode.text import TokenizerLike, TokenOffsets
from models.serve.job import Piece, Usage


class CompletionFormat:
    """The format of texts that continue a prompt.

    Args:
      model: the model's name.
      text: the tokenizer.
      likeliest: see ``SamplingParams``.
      first_tokens: for each text the first token of its prompt, if the prompt's tokens are returned with it; None
        otherwise.
    """

    def __init__(
        self, model: str, text: TokenizerLike, likeliest: int | None, first_tokens: Sequence[int | None]
    ):
        self._header = _header(model, "cmpl", "text_completion")
        self._decode, self._likeliest = text.decode, likeliest
        self._first_tokens = dict(enumerate(first_tokens))
        self._offsets: dict[int, TokenOffsets] = defaultdict(lambda: TokenOffsets(text.decode))

    def whole(self, pieces: Sequence[Piece], usage: Usage) -> dict[str, Any]:
        """The answer in one piece."""
        return self._header | {"choices": [self._choice(piece) for piece in pieces], "usage": _usage(usage)}

    def events(self, piece: Piece) -> Iterator[dict[str, Any]]:
        """The events of a stream for one piece."""
        yield self._header | {"choices": [self._choice(piece)]}

    def usage(self, usage: Usage) -> dict[str, Any]:
        """The last event of a stream that reports its usage."""
        return self._header | {"choices": [], "usage": _usage(usage)}

    def _choice(self, piece: Piece) -> dict[str, Any]:
        logprobs = None if self._likeliest is None else self._logprobs(piece)
        return {
            "index": piece.choice, "text": piece.text, "logprobs": logprobs, "finish_reason": piece.finish_reason,
        }  # fmt: skip

    def _logprobs(self, piece: Piece) -> dict[str, Any]:
        """Lists with an entry for each token; of a prompt's first token, which has no score, only text and offset.

        A stop token has one, too: lm_eval takes the last entry for that of a generated token, and cuts it off.
        """
        found: dict[str, list[Any]] = {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": [],
        }
        first = self._first_tokens.pop(piece.choice, None)
        scores: list[Score | None] = [*piece.scores] if first is None else [None, *piece.scores]
        if piece.stop_score is not None:
            scores.append(piece.stop_score)
        for score in scores:
            token = first if score is None else score.token
            assert token is not None
            text = self._decode([token])
            found["tokens"].append(text)
            found["token_logprobs"].append(None if score is None else score.logprob)
            found["top_logprobs"].append(None if score is None else self._top_logprobs(score, text))
            found["text_offset"].append(self._offsets[piece.choice].push(token))
        return found

    def _top_logprobs(self, score: Score, text: str) -> dict[str, float]:
        """The log-probabilities of the likeliest tokens and of the token itself, by their texts.

        If several tokens have the same text, for example parts of a character, the best one counts.
        """
        named = [(self._decode([token]), logprob) for token, logprob in score.likeliest] + [
            (text, score.logprob)
        ]
        return {name: max(each for other, each in named if other == name) for name, _ in named}


class ChatFormat:
    """The format of an assistant's messages.

    Args:
      model: the model's name.
      text: the tokenizer.
      likeliest: see ``SamplingParams``.
    """

    def __init__(self, model: str, text: TokenizerLike, likeliest: int | None):
        self._text, self._likeliest = text, likeliest
        self._header = _header(model, "chatcmpl", "chat.completion")
        self._chunk = self._header | {"object": "chat.completion.chunk"}
        self._started: set[int] = set()

    def whole(self, pieces: Sequence[Piece], usage: Usage) -> dict[str, Any]:
        choices = [
            self._choice(piece, "message", {"role": "assistant", "content": piece.text, "refusal": None})
            for piece in pieces
        ]
        return self._header | {"choices": choices, "usage": _usage(usage)}

    def events(self, piece: Piece) -> Iterator[dict[str, Any]]:
        more = {"content": piece.text}
        if piece.choice not in self._started:
            self._started.add(piece.choice)
            more = {"role": "assistant", **more}
        yield self._chunk | {"choices": [self._choice(piece, "delta", more)]}

    def usage(self, usage: Usage) -> dict[str, Any]:
        return self._chunk | {"choices": [], "usage": _usage(usage)}

    def _choice(self, piece: Piece, name: str, message: Mapping[str, Any]) -> dict[str, Any]:
        logprobs = None
        if self._likeliest is not None:
            logprobs = {
                "content": [self._token_with_alternatives(score) for score in piece.scores],
                "refusal": None,
            }
        return {
            "index": piece.choice, name: message, "logprobs": logprobs, "finish_reason": piece.finish_reason,
        }  # fmt: skip

    def _token_with_alternatives(self, score: Score) -> dict[str, Any]:
        likeliest = [self._token_logprob(*one) for one in score.likeliest]
        return self._token_logprob(score.token, score.logprob) | {"top_logprobs": likeliest}

    def _token_logprob(self, token: int, logprob: float) -> dict[str, Any]:
        text, whole = self._text.decode([token]), self._text.bytes_of(token)
        return {"token": text, "logprob": logprob, "bytes": list(whole)}


def _header(model: str, prefix: str, kind: str) -> dict[str, Any]:
    return {
        "id": f"{prefix}-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": model,
    }  # fmt: skip


def _usage(usage: Usage) -> Mapping[str, Any]:
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.prompt + usage.completion,
        "prompt_tokens_details": {"cached_tokens": usage.reused},
    }
