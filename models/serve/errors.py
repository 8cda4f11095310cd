"""The errors that a client gets as answers."""

from collections.abc import Mapping
from typing import Any


class Refused(Exception):
    """An answer that is an error, in OpenAI's format.

    Args:
      status: the HTTP status.
      message: a text that says what was given, what is needed and what to do.
      param: the parameter of the request that is wrong; None if no single one is.
      code: a word by which programs recognise the error.
      headers: the headers of the answer.
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
        # A message may quote what came, half a surrogate pair too, which no answer can hold.
        message = message.encode(errors="backslashreplace").decode()
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        """The body of the answer: the error in OpenAI's format, as a dict for JSON."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        kind = "rate_limit_error" if self.status == 429 else kind
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}
