"""Requests: what they ask for, the limits that they must fit, and their completions."""

import dataclasses
from typing import Literal

import numpy as np

from dualpipe_jax.arguments import typechecked
from models.decode.scores import MAX_LIKELIEST, Score

STEPS_ON_GPU = 4
"""The number of decode steps that the host starts at once on a GPU. With nine layers of V2-Lite an H200 runs
one step in 1.3 ms, and the host took 2.3 ms to start one and read its results."""


class RequestError(ValueError):
    """Raised for a request that cannot be served; the message says what was given, what is needed and what to do."""


@typechecked
@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How a request's text is generated.

    Attributes:
      max_tokens: the largest number of tokens to generate.
      temperature: the number that divides the logits; 0 takes the likeliest token.
      top_p: see ``Sampling``.
      seed: a number from 0 to 2**32 - 1; the same request with the same seed gets the same text, whatever
        else is served at the same time.
      stop: the tokens at which the text ends; they are not part of it.
      likeliest: how many of the likeliest tokens to return with the log-probability of each token, 0 to 20;
        None returns no log-probabilities. The programs that return them are compiled when the first request
        asks for them.
      score_prompt: whether to return log-probabilities of the prompt's tokens, too. Then no part of the
        prompt is taken from the cache.
    """

    max_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    stop: tuple[int, ...] = ()
    likeliest: int | None = None
    score_prompt: bool = False


@typechecked
@dataclasses.dataclass(frozen=True)
class Limits:
    """Sizes that the programs are compiled for.

    Attributes:
      max_requests: the largest number of requests that are served at the same time; others wait.
      max_positions: the largest number of tokens of a request, its prompt and its generated tokens together.
      block_size: the number of positions of a block.
      num_blocks: the number of blocks of the cache; None gives room for ``max_requests`` of
        ``max_positions``.
      chunk_size: the largest number of tokens of a prompt that one row of a prefill takes in.
      max_prefill: the number of tokens of prompts that a device takes in at most in a step, so that requests that
        decode do not wait long; one chunk is always taken, with two microbatches two.
      min_table: the number of positions of a request that a step reads at least; see ``table_sizes``.
      num_steps: the number of decode steps that the host starts at once, and whose results it reads at once;
        None is ``STEPS_ON_GPU`` on a GPU, which runs a step in less time than the host starts one, and 1
        elsewhere.

    Raises:
      ValueError: a number is not positive.
    """

    max_requests: int = 8
    max_positions: int = 1024
    block_size: int = 16
    num_blocks: int | None = None
    chunk_size: int = 64
    max_prefill: int = 512
    min_table: int = 256
    num_steps: int | None = None

    def __post_init__(self) -> None:
        wrong = [f"{name} is {n}" for name, n in vars(self).items() if n is not None and n < 1]
        if wrong:
            raise ValueError(f"Limits: {', '.join(wrong)}; must be at least 1.")

    @property
    def table_size(self) -> int:
        """The largest number of blocks of one request."""
        return -(-self.max_positions // self.block_size)

    @property
    def table_sizes(self) -> tuple[int, ...]:
        """The numbers of blocks of a request that programs are compiled to read.

        The first holds ``min_table`` positions, each next one is twice as large, and the last is
        ``table_size``. A step reads the same number for all its requests: the smallest that holds the longest
        of them.
        """
        sizes = [-(-self.min_table // self.block_size)]
        while sizes[-1] < self.table_size:
            sizes.append(2 * sizes[-1])
        return (*sizes[:-1], self.table_size)

    @property
    def total_blocks(self) -> int:
        """The number of blocks of the cache."""
        return self.num_blocks or self.max_requests * self.table_size

    def share(self, num_devices: int) -> "Limits":
        """Return the limits of one of ``num_devices`` devices, which share requests and blocks equally.

        Raises:
          ValueError: the number of requests or blocks is no multiple of ``num_devices``.
        """
        shared = {"max_requests": self.max_requests, "num_blocks": self.total_blocks}
        wrong = [f"{name} is {number}" for name, number in shared.items() if number % num_devices]
        if wrong:
            raise ValueError(f"Limits: {', '.join(wrong)}; {num_devices} devices must share it equally.")
        return dataclasses.replace(self, **{name: n // num_devices for name, n in shared.items()})


@dataclasses.dataclass(frozen=True)
class Completion:
    """A request that has ended.

    Attributes:
      id: the number that ``Engine.add`` returned.
      tokens: the generated tokens, without the token that stopped it.
      finish_reason: "stop" at a stop token, "length" at ``max_tokens``, "cancelled", or "error".
      error: what went wrong; None if nothing did.
      num_drafted: the number of tokens that were guessed ahead.
      num_accepted: the number of guesses that were right.
      num_reused: the number of the prompt's tokens that were found in the cache, or on disk, because another
        request had the same beginning.
      scores: the scores of ``tokens``, if they were asked for.
      prompt_scores: the scores of the prompt's tokens except the first, if they were asked for.
      stop_score: the score of the stop token that ended the text, if scores were asked for; None if none did.
    """

    id: int
    tokens: tuple[int, ...]
    finish_reason: Literal["stop", "length", "cancelled", "error"]
    error: str | None = None
    num_drafted: int = 0
    num_accepted: int = 0
    num_reused: int = 0
    scores: tuple[Score, ...] = ()
    prompt_scores: tuple[Score, ...] = ()
    stop_score: Score | None = None


def check_request(prompt: np.ndarray, params: SamplingParams, limits: Limits, vocab: int) -> None:
    """Raise a RequestError that says why and what to do, if a request can never be served."""
    if prompt.ndim != 1 or not prompt.size:
        raise RequestError("the prompt is empty: give at least one token")
    if not np.issubdtype(prompt.dtype, np.integer):
        raise RequestError(f"the prompt's tokens are {prompt.dtype}, must be integers")
    for what, tokens in (("prompt holds", prompt), ("stop tokens hold", np.asarray(params.stop, object))):
        unknown = tokens[(tokens < 0) | (tokens >= vocab)]
        if unknown.size:
            raise RequestError(
                f"the {what} token {unknown[0]}, which the model does not know: its tokens are 0 to "
                f"{vocab - 1}; is this another model's tokenizer?"
            )
    wrong = [
        text
        for text, good in (
            (f"max_tokens is {params.max_tokens}, must be at least 1", params.max_tokens >= 1),
            (f"temperature is {params.temperature}, must be 0 or more", 0 <= params.temperature < np.inf),
            (f"top_p is {params.top_p}, must be above 0 and at most 1", 0 < params.top_p <= 1),
            (f"seed is {params.seed}, must lie between 0 and 2**32 - 1", 0 <= params.seed < 2**32),
            (
                f"likeliest is {params.likeliest}, must be 0 to {MAX_LIKELIEST}",
                0 <= (params.likeliest or 0) <= MAX_LIKELIEST,
            ),
            (
                "score_prompt is asked for without likeliest, which says how many tokens to tell: give 0 or more",
                not params.score_prompt or params.likeliest is not None,
            ),
        )
        if not good
    ]
    if wrong:
        raise RequestError("; ".join(wrong))
    total = len(prompt) + params.max_tokens
    if total > limits.max_positions:
        raise RequestError(
            f"the prompt of {len(prompt)} tokens and max_tokens {params.max_tokens} are {total} together, the "
            f"limit is max_positions {limits.max_positions}: shorten the prompt, or ask for at most "
            f"{limits.max_positions - len(prompt)} tokens"
            if len(prompt) < limits.max_positions
            else f"the prompt of {len(prompt)} tokens is too long: the limit is max_positions "
            f"{limits.max_positions}, what is generated included"
        )
    need = -(-(total - 1) // limits.block_size)
    if need > limits.total_blocks:
        raise RequestError(
            f"the prompt of {len(prompt)} tokens and max_tokens {params.max_tokens} take {need} blocks of "
            f"{limits.block_size} positions, and a device's cache has {limits.total_blocks} in all: ask for less, or "
            "raise num_blocks"
        )
