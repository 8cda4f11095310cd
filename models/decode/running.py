"""The state of requests that devices keep, so that a step needs nothing from the host about the step before.

Shape suffixes: B slots, S tokens of a step (two with drafts), N rows of a prefill, W stop tokens.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from dualpipe_jax.functional import Tree
from models.decode.cache import Rows
from models.decode.sampling import Sampling
from models.decode.scores import Scores
from models.decode.steps import Decoded, Prefilled

NUM_STOPS = 8
"""The number of a request's stop tokens that devices know. Only the host knows further ones: after such a
token a row runs on in vain until the host has read it."""


class Running(NamedTuple):
    """The state of the requests that decode, one for each slot.

    Attributes:
      tokens: int32 [B], the newest token, which no step has been fed yet.
      drafts: int32 [B], a guess at the token after that; -1 for none.
      starts: int32 [B], the newest token's position.
      max_positions: int32 [B], the first position at which no token is fed any more.
      stops: int32 [B, W], the tokens that end the request; -1 for none.
      live: bool [B], whether the request goes on.
    """

    tokens: Array | np.ndarray
    drafts: Array | np.ndarray
    starts: Array | np.ndarray
    max_positions: Array | np.ndarray
    stops: Array | np.ndarray
    live: Array | np.ndarray


class FinishedPrompts(NamedTuple):
    """The rows of a prefill that end their prompts; the requests of these rows decode from then on.

    Attributes:
      slots: int32 [N], the slot of the row's request on its device; -1 where the prompt does not end.
      max_positions, stops: see ``Running``.
    """

    slots: np.ndarray
    max_positions: np.ndarray
    stops: np.ndarray


def empty_running(num_slots: int) -> Running:
    """The state of slots without requests."""
    zeros = np.zeros(num_slots, np.int32)
    return Running(zeros, zeros - 1, zeros, zeros, no_stops(num_slots), zeros > 0)


def no_stops(num_rows: int) -> np.ndarray:
    """Stop tokens of rows that have none, int32 [rows, W]."""
    return np.full((num_rows, NUM_STOPS), -1, np.int32)


def stateful_prefill(run: Callable[..., tuple[Prefilled, Any, Any]]) -> Callable[..., Any]:
    """Wrap a prefill ``run`` so that it also writes the requests whose prompts end with it into their slots."""

    def prefill(
        weights: Tree,
        cache: Array,
        rows: Rows,
        next_tokens: Array,
        sampling: Sampling | None,
        running: Running,
        finished: FinishedPrompts,
    ) -> Any:
        out, counts, cache = run(weights, cache, rows, next_tokens, sampling)
        starts_N = jnp.asarray(rows.starts) + jnp.asarray(rows.lengths)
        stopped_N = _has_stop_token(out.tokens[:, None], finished.stops)
        live_N = out.finite & (starts_N < finished.max_positions) & ~stopped_N
        new = Running(out.tokens, out.drafts, starts_N, finished.max_positions, finished.stops, live_N)
        place_N = jnp.where(finished.slots < 0, len(running.tokens), finished.slots)
        running = jax.tree.map(
            lambda old, one: jnp.asarray(old).at[place_N].set(one, mode="drop"), running, new
        )
        return (out, running), counts, cache

    return prefill


def stateful_decode(run: Callable[..., tuple[Decoded, Any, Any]], num_tokens: int) -> Callable[..., Any]:
    """Wrap a decode ``run`` of ``num_tokens`` tokens a row so that it is fed with the results of the steps before."""

    def decode(
        weights: Tree, cache: Array, wanted: Array, tables: Array, sampling: Sampling | None, running: Running
    ) -> Any:
        guessed_B = (running.drafts >= 0) & (running.starts + 1 < running.max_positions)
        length_B = jnp.where(running.live & wanted, 1 + guessed_B.astype(jnp.int32), 0)
        tokens_BS = jnp.stack([running.tokens, running.drafts], axis=1)[:, :num_tokens]
        rows = Rows(
            jnp.where(jnp.arange(num_tokens) < length_B[:, None], tokens_BS, 0),
            jnp.where(length_B > 0, running.starts, 0),
            length_B,
            tables,
        )
        out, counts, cache = run(weights, cache, rows, sampling)
        return (out, _advance(running, out)), counts, cache

    return decode


def repeated_decode(decode: Callable[..., Any], num_steps: int) -> Callable[..., Any]:
    """Run ``num_steps`` steps of a ``decode`` in one program; their results are stacked in order, [B, steps, ...]."""

    def steps(weights: Tree, cache: Array, *rows: Any) -> Any:
        *inputs, running = rows

        def one_step(carry: tuple[Array, Running], _: None) -> Any:
            (out, running), counts, cache = decode(weights, carry[0], *inputs, carry[1])
            return (cache, running), (_pack(out), out.scores, counts)

        begin = cache, jax.tree.map(jnp.asarray, running)
        # XLA makes no loop of one step.
        (cache, running), (*outs, counts) = lax.scan(one_step, begin, length=num_steps)
        out = _unpack(*jax.tree.map(lambda leaf: jnp.moveaxis(leaf, 0, 1), outs))
        return (out, running), jnp.sum(counts, axis=0), cache

    return steps


def _pack(out: Decoded) -> Array:
    """Everything but scores as one array, int32 [B, S + 4], because a loop stores each array by a kernel of its own."""
    rest = out.accepted, out.num_fed, out.finite.astype(jnp.int32), out.drafts
    return jnp.concatenate([out.tokens, jnp.stack(rest, axis=1)], axis=1)


def _unpack(numbers: Array, scores: Scores | None) -> Decoded:
    """The inverse of ``_pack``, for any number of steps: ``numbers`` is [..., S + 4]."""
    accepted, num_fed, finite, drafts = (numbers[..., place] for place in range(-4, 0))
    return Decoded(numbers[..., :-4], accepted, num_fed, finite.astype(bool), drafts, scores)


def results_of_step(out: Tree, step: int) -> Tree:
    """The results of one step of ``repeated_decode``."""
    return jax.tree.map(lambda leaf: leaf[:, step], out)


def _advance(running: Running, out: Decoded) -> Running:
    """The state after a step; rows that were fed nothing stay as they are."""
    counts_BS = jnp.arange(out.tokens.shape[1]) < out.accepted[:, None]
    starts_B = running.starts + out.accepted
    last_B = jnp.take_along_axis(out.tokens, jnp.maximum(out.accepted - 1, 0)[:, None], axis=1)[:, 0]
    live_B = out.finite & (starts_B < running.max_positions)
    live_B &= ~_has_stop_token(jnp.where(counts_BS, out.tokens, -2), running.stops)
    was_fed = out.accepted > 0
    return running._replace(
        tokens=jnp.where(was_fed, last_B, running.tokens),
        drafts=jnp.where(was_fed, out.drafts, running.drafts),
        starts=starts_B,
        live=jnp.where(was_fed, live_B, running.live),
    )


def _has_stop_token(tokens_BS: Array, stops_BW: Array | np.ndarray) -> Array:
    return jnp.any(tokens_BS[:, :, None] == jnp.asarray(stops_BW)[:, None], axis=(1, 2))
