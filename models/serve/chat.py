"""Turn messages into the text that a model was trained to answer, by its checkpoint's own template."""

import datetime
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jinja2
import numpy as np
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from models.serve.errors import Refused

MAX_ITERATIONS = 10_000_000
"""The number of turns of loops and of calls after which a template is stopped; it takes some seconds."""


class Chat:
    """A checkpoint's chat template, Jinja as ``transformers`` reads it, in a sandbox.

    Args:
      template: the template's text.
      names: the names of special tokens in the template, for example "bos_token", and the texts of these
        tokens.
      encode: a function from the text that the template writes to tokens; it must add no tokens of its own.

    Raises:
      ValueError: the template is not Jinja.
    """

    def __init__(self, template: str, names: Mapping[str, str], encode: Callable[[str], np.ndarray]):
        environment = _BoundedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
        )
        environment.filters |= {"tojson": _tojson, _COUNT_FILTER: _counted}
        environment.globals |= {"raise_exception": _raise, "strftime_now": _now}
        try:
            self._template = environment.from_string(template)
        except (
            jinja2.TemplateError,
            SyntaxError,
        ) as error:  # a break outside a loop raises Python's SyntaxError
            raise ValueError(f"the chat template is not Jinja: {error}") from None
        self._names, self._encode = dict(names), encode

    def write(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The text that the model continues.

        Raises:
          Refused: 400, the template does not accept these messages.
        """
        try:
            return self._template.render(
                messages=messages, add_generation_prompt=True, tools=None, **self._names
            )
        except Exception as error:  # a template is a foreign program, and may raise anything
            raise Refused(
                400, f"messages: the model's chat template refuses them: {error}", param="messages"
            ) from None

    def __call__(self, messages: Sequence[Mapping[str, Any]]) -> np.ndarray:
        """The tokens that the model continues, int32 [S]. Raises Refused like ``write``."""
        try:
            return self._encode(self.write(messages))
        except UnicodeEncodeError as error:
            raise Refused(400, f"messages: are not a text of Unicode: {error}", param="messages") from None


class _CountingContext(Context):
    """The context of one rendering of a template; it counts the turns of loops and the calls."""

    num_iterations = 0

    def count(self) -> None:
        self.num_iterations += 1
        if self.num_iterations > MAX_ITERATIONS:
            raise jinja2.TemplateError(
                f"it is not done after {MAX_ITERATIONS:,} turns of its loops and calls; send fewer or shorter "
                "messages, or serve the model with a template that takes them"
            )


class _BoundedEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox in which every rendering ends; that is needed because a thread cannot be stopped from outside."""

    context_class = _CountingContext

    def _generate(self, source: nodes.Template, *args: Any, **options: Any) -> str:
        for loop in source.find_all(nodes.For):
            loop.iter = nodes.Filter(
                loop.iter, _COUNT_FILTER, [], [], None, None, lineno=loop.lineno, environment=self
            )
        return super()._generate(source, *args, **options)

    # The arguments are named as in the base class, because what a template calls may have arguments of any
    # name.
    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        assert isinstance(__context, _CountingContext)
        __context.count()
        if args and isinstance(__obj, LoopContext):
            args = _counted(__context, args[0]), *args[1:]
        return super().call(__context, __obj, *args, **kwargs)


_COUNT_FILTER = "turns of a loop"
"""The name of the filter that counts turns; it has spaces, so that no template can use it."""


@jinja2.pass_context
def _counted(context: _CountingContext, items: Iterable[Any]) -> Iterator[Any]:
    for item in items:
        context.count()
        yield item


class _Generation(Extension):
    """``{% generation %}`` around an assistant's message: it marks the message for training; here only its
    content is written."""

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
