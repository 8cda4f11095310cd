"""What a client is told when it does not get what it asked for."""

from collections.abc import Mapping
from typing import Any


class Refused(Exception):
    """An answer that is an error, in OpenAI's shape.

    Args:
      status: of HTTP.
      message: what was given, what is needed, what to do.
      param: which part of the request is meant.
      code: a word for programs.
      headers: of the answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        """The body of the answer: the error in OpenAI's format, as a dict for JSON."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        kind = "rate_limit_error" if self.status == 429 else kind
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}
