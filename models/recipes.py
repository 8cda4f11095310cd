"""Training recipes as data: optimizer, schedules, factors of the losses.

They are those of DeepSeek-V3 (arXiv:2412.19437, section 4.2) and of DeepSeek-V2 and V2-Lite (arXiv:2405.04434, sections
3.1 and B.1), and rules of our own for small models on short runs, which benchmarks/learning_rates.py tries::

    recipe = recipes.v3()
    recipe.learning_rate(step)      # and bias_rate, mtp_weight: functions of the step, which may be traced
    recipe.batch_size(step)         # in sequences; the step must be an int on the host, since this is a shape
    recipes.of("small", config)     # by the names of models.MODELS
"""

import bisect
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

import models.config as configs
from models.config import Config


class Phase(NamedTuple):
    """A phase of training, and the course of one value in it.

    Attributes:
      until: the number of tokens trained on when the phase ends.
      start: the value at its start.
      end: the value at its end, reached along half a cosine; None for ``start`` throughout.
    """

    until: float
    start: float
    end: float | None = None


@dataclasses.dataclass(frozen=True)
class Recipe:
    """One training run; its schedules are functions of the number of tokens.

    Attributes:
      source: the publication or the trials that it comes from.
      config: the model.
      tokens: the number of tokens to train on.
      rates: the learning rate; the first phase begins where the warmup ends.
      bias_rates: the step size of the selection biases, see ``models.moe.update_bias``; 0 to keep them fixed.
      mtp_weights: the factor of the multi-token prediction losses.
      balance_factor: the factor of the balance loss.
      sequence: the number of tokens of a sequence.
      warmup: the number of steps in which the learning rate rises from 0.
      first_batch: the number of sequences of the first step.
      batch: the number of sequences of a step after ``ramp`` tokens; until then it grows linearly in tokens.
      ramp: the number of tokens over which the batch grows; 0 for ``batch`` from the start.
      batch_multiple: batches are rounded down to a multiple of this, as microbatches and devices need it.
      b1: AdamW's b1.
      b2: AdamW's b2.
      weight_decay: AdamW's weight decay; norms and biases do not decay.
      clip: the largest norm of all gradients together.

    Raises:
      ValueError: the phases do not rise and end with ``tokens``, or ``batch_multiple`` is below 1 or above the smallest
        batch.
    """

    source: str
    config: Config
    tokens: float
    rates: tuple[Phase, ...]
    bias_rates: tuple[Phase, ...]
    mtp_weights: tuple[Phase, ...]
    balance_factor: float
    sequence: int = 4096
    warmup: int = 2000
    first_batch: int = 0
    batch: int = 0
    ramp: float = 0.0
    batch_multiple: int = 1
    b1: float = 0.9
    b2: float = 0.95
    weight_decay: float = 0.1
    clip: float = 1.0

    def __post_init__(self) -> None:
        wrong = [
            f"{name} must end with tokens, {self.tokens:g}, and rise until then"
            for name in ("rates", "bias_rates", "mtp_weights")
            if not _is_increasing([phase.until for phase in getattr(self, name)], self.tokens)
        ]
        if not 0 < self.batch_multiple <= (self.first_batch if self.ramp else self.batch):
            wrong.append(f"batch_multiple is {self.batch_multiple}, more than the smallest batch, or none")
        if wrong:
            raise ValueError(f"Recipe: {'; '.join(wrong)}.")

    @property
    def num_steps(self) -> int:
        """The number of steps until all tokens are trained on; the last step may go beyond them."""
        steps, tokens, step_tokens = self._ramp
        row = bisect.bisect_right(tokens, self.tokens) - 1
        return steps[row] + int(np.ceil((self.tokens - tokens[row]) / step_tokens[row]))

    def batch_size(self, step: int) -> int:
        """Return the number of sequences of a step; steps are numbered from 0."""
        steps, _, step_tokens = self._ramp
        return step_tokens[bisect.bisect_right(steps, step) - 1] // self.sequence

    def tokens_before(self, step: Any) -> Array:
        steps, tokens, step_tokens = self._ramp
        # No run has so many steps that int32 cannot count them: what a ramp does after that does not matter.
        begins = jnp.asarray(np.minimum(steps, np.iinfo(np.int32).max), jnp.int32)
        step = jnp.asarray(step)
        row = jnp.searchsorted(begins, step, side="right") - 1
        before, rate = jnp.asarray(tokens, jnp.float32)[row], jnp.asarray(step_tokens, jnp.float32)[row]
        return before + (step - begins[row]).astype(jnp.float32) * rate

    def count_tokens(self, step: int) -> int:
        """Return the number of tokens before a step, exactly; the step is an int on the host."""
        steps, tokens, step_tokens = self._ramp
        row = bisect.bisect_right(steps, step) - 1
        return tokens[row] + (step - steps[row]) * step_tokens[row]

    def learning_rate(self, step: Any) -> Array:
        """Return the learning rate of a step, float32: not 0 for the first step, the final rate for the last one."""
        done = jnp.asarray(step) + 1
        warm = jnp.minimum(done.astype(jnp.float32) / max(self.warmup, 1), 1)
        return warm * _value_at(self.rates, self.tokens_before(done), float(self.count_tokens(self.warmup)))

    def bias_rate(self, step: Any) -> Array:
        """Return the size of a step's change of the selection biases, float32."""
        return _value_at(self.bias_rates, self.tokens_before(step))

    def mtp_weight(self, step: Any) -> Array:
        """Return a step's factor of the multi-token prediction losses, float32; for "mtp_weight" in a batch."""
        return _value_at(self.mtp_weights, self.tokens_before(step))

    @functools.cached_property
    def _ramp(self) -> tuple[list[int], list[int], list[int]]:
        """For each batch size: the first step that has it, the tokens before that step, and the tokens of a step.

        A ramp may have any number of steps, but has few sizes.
        """
        rows = [(0, 0, self._batch_after(0) * self.sequence)]
        while (last := rows[-1])[1] < self.ramp:
            step, tokens, rate = last

            def has_grown(count: int, tokens: int = tokens, rate: int = rate) -> bool:
                return self._batch_after(tokens + count * rate) * self.sequence > rate

            most = int(np.ceil((self.ramp - tokens) / rate))
            count = 1 + bisect.bisect_left(range(1, most), True, key=has_grown)
            tokens += count * rate
            rows.append((step + count, tokens, self._batch_after(tokens) * self.sequence))
        steps, tokens_before, step_tokens = zip(*rows, strict=True)
        return list(steps), list(tokens_before), list(step_tokens)

    def _batch_after(self, tokens: float) -> int:
        size: float = self.batch
        if tokens < self.ramp:
            size = self.first_batch + (self.batch - self.first_batch) * tokens / self.ramp
        return int(size) // self.batch_multiple * self.batch_multiple


def v3(**changes: Any) -> Recipe:
    recipe = Recipe(
        source="DeepSeek-V3, arXiv:2412.19437, section 4.2",
        config=configs.v3(num_mtp_layers=1),
        tokens=14.8e12,
        rates=(
            Phase(10e12, 2.2e-4),
            Phase(14.3e12, 2.2e-4, 2.2e-5),
            Phase(14.633e12, 2.2e-5),
            Phase(14.8e12, 7.3e-6),
        ),
        bias_rates=(Phase(14.3e12, 1e-3), Phase(14.8e12, 0.0)),
        mtp_weights=(Phase(10e12, 0.3), Phase(14.8e12, 0.1)),
        balance_factor=1e-4,
        first_batch=3072,
        batch=15360,
        ramp=469e9,
    )
    return dataclasses.replace(recipe, **changes)


def v2(**changes: Any) -> Recipe:
    """DeepSeek-V2: 8.1T tokens. Of its three balance losses only the one over experts is implemented."""
    recipe = Recipe(
        source="DeepSeek-V2, arXiv:2405.04434, section 3.1",
        config=configs.v2(),
        tokens=8.1e12,
        rates=_step_decay(8.1e12, 2.4e-4, (0.6, 0.9)),
        bias_rates=(Phase(8.1e12, 0.0),),
        mtp_weights=(Phase(8.1e12, 0.0),),
        balance_factor=3e-3,
        first_batch=2304,
        batch=9216,
        ramp=225e9,
    )
    return dataclasses.replace(recipe, **changes)


def v2_lite(**changes: Any) -> Recipe:
    recipe = Recipe(
        source="DeepSeek-V2-Lite, arXiv:2405.04434, section B.1",
        config=configs.v2_lite(),
        tokens=5.7e12,
        rates=_step_decay(5.7e12, 4.2e-4, (0.8, 0.9)),
        bias_rates=(Phase(5.7e12, 0.0),),
        mtp_weights=(Phase(5.7e12, 0.0),),
        balance_factor=1e-3,
        batch=4608,
    )
    return dataclasses.replace(recipe, **changes)


def ours(config: Config, **changes: Any) -> Recipe:
    """A small model on a short run: learning rate by the width, a cosine to a tenth, biases that move fast enough."""
    tokens, rate = 1e6, rate_for(config.dim)
    recipe = Recipe(
        source="our own, tried at widths 64 to 512",
        config=config,
        tokens=tokens,
        rates=(Phase(tokens, rate, rate / 10),),
        bias_rates=(Phase(tokens, 0.01),),
        mtp_weights=(Phase(tokens, 0.3),),
        balance_factor=1e-4,
        sequence=64,
        warmup=20,
        batch=64,
    )
    return dataclasses.replace(recipe, **changes)


def rate_for(dim: int) -> float:
    """Return a learning rate for a width: 4e-3 at 64, 2.4e-4 at V3's 7168, where 2.2e-4 is published."""
    return 4e-3 * (64 / dim) ** 0.6


def of(name: str, config: Config) -> Recipe:
    """Return the recipe of a model of ``models.MODELS``, with ``config`` as the model.

    A model that is published with a recipe gets that recipe. If ``config`` has another width, the learning rate follows
    ``rate_for``. So it does for "67b-a2b", which otherwise has V3's recipe.
    """
    published = {"v3": v3, "v2": v2, "v2-lite": v2_lite, "67b-a2b": v3}
    if name not in published:
        return ours(config)
    recipe = published[name]()
    if config.dim == recipe.config.dim:
        return dataclasses.replace(recipe, config=config)
    rate = rate_for(config.dim)
    source = f"{recipe.source}; the rate by our rule for width {config.dim}"
    return in_proportion(recipe, recipe.tokens, rate, config, source=source)


def in_proportion(recipe: Recipe, tokens: float, rate: float, config: Config, **changes: Any) -> Recipe:
    """Return the recipe for another model: phases scaled to ``tokens``, learning rates scaled to at most ``rate``."""
    scale, highest = tokens / recipe.tokens, max(phase.start for phase in recipe.rates)

    def scaled(phases: Sequence[Phase], factor: float = 1.0) -> tuple[Phase, ...]:
        inner = [
            Phase(until * scale, start * factor, None if end is None else end * factor)
            for until, start, end in phases
        ]
        return (*inner[:-1], inner[-1]._replace(until=tokens))

    proportional: dict[str, Any] = dict(
        config=config,
        tokens=tokens,
        rates=scaled(recipe.rates, rate / highest),
        bias_rates=scaled(recipe.bias_rates),
        mtp_weights=scaled(recipe.mtp_weights),
        ramp=recipe.ramp * scale,
    )
    return dataclasses.replace(recipe, **(proportional | changes))


def _step_decay(tokens: float, rate: float, where: tuple[float, float]) -> tuple[Phase, ...]:
    """Return phases of ``rate``, 0.316 of it, and 0.316 of that, as in V2; ``where``: fractions of the tokens."""
    first, second = where
    return Phase(first * tokens, rate), Phase(second * tokens, 0.316 * rate), Phase(tokens, 0.316**2 * rate)


def _is_increasing(until: list[float], tokens: float) -> bool:
    return bool(until) and until[-1] == tokens and all(np.diff([0, *until]) > 0)


def _value_at(phases: Sequence[Phase], tokens: Array, begin: float = 0.0) -> Array:
    """Return the value after so many tokens, float32; after the last phase, the value at its end."""
    found = jnp.float32(phases[0].start)
    for phase in phases:
        end = phase.start if phase.end is None else phase.end
        progress = jnp.clip((tokens - begin) / max(phase.until - begin, 1.0), 0, 1)
        value = end + (phase.start - end) * (1 + jnp.cos(jnp.pi * progress)) / 2
        found = jnp.where(tokens >= begin, value, found)
        begin = phase.until
    return found.astype(jnp.float32)
