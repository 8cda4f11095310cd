"""Messages as the text that a model was trained to answer, by its checkpoint's own template."""

import datetime
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jinja2
import numpy as np
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from models.serve.errors import Refused


class Chat:
    """A checkpoint's chat template, Jinja as ``transformers`` reads it, in a sandbox.

    Args:
      template: its text.
      names: what it calls special tokens, such as "bos_token", and what these are in texts.
      encode: makes tokens of what it writes, and adds none.

    Raises:
      ValueError: it is not Jinja.
    """

    def __init__(self, template: str, names: Mapping[str, str], encode: Callable[[str], np.ndarray]):
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
        )
        environment.filters["tojson"] = _tojson
        environment.globals |= {"raise_exception": _raise, "strftime_now": _now}
        try:
            self._template = environment.from_string(template)
        except (jinja2.TemplateError, SyntaxError) as error:  # a break outside a loop is one of Python's
            raise ValueError(f"the chat template is not Jinja: {error}") from None
        self._names, self._encode = dict(names), encode

    def write(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The text that the model goes on with.

        Raises:
          Refused: 400, the template takes no such messages.
        """
        try:
            return self._template.render(
                messages=messages, add_generation_prompt=True, tools=None, **self._names
            )
        except Exception as error:  # a template is somebody's program, and fails in any way
            raise Refused(
                400, f"messages: the model's chat template refuses them: {error}", param="messages"
            ) from None

    def __call__(self, messages: Sequence[Mapping[str, Any]]) -> np.ndarray:
        """The tokens that the model goes on with, int32 [S]. Raises Refused as ``write``."""
        try:
            return self._encode(self.write(messages))
        except UnicodeEncodeError as error:
            raise Refused(400, f"messages: are not a text of Unicode: {error}", param="messages") from None


class _Generation(Extension):
    """``{% generation %}`` around what the assistant said: it marks that for training, and writes what is in it."""

    tags = {"generation"}  # noqa: RUF012 as its base has it

    def parse(self, parser: Parser) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _now(form: str) -> str:
    return datetime.datetime.now().strftime(form)
