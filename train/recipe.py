"""The recipe of a run: that of its model, in proportion to the run's tokens, with the options that override it."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import models
from models import recipes
from models.recipes import Phase, Recipe
from train.config import FLAGS, TrainConfig, option, replaced
from train.model import model_config

FROM_RECIPE: Mapping[str, Callable[[Recipe, TrainConfig], Any]] = {
    "--learning-rate": lambda recipe, _: max(phase.start for phase in recipe.rates),
    "--warmup": lambda recipe, config: min(recipe.warmup, max(1, config.optimizer.steps // 10)),
    "--b1": lambda recipe, _: recipe.b1,
    "--b2": lambda recipe, _: recipe.b2,
    "--weight-decay": lambda recipe, _: recipe.weight_decay,
    "--clip": lambda recipe, _: recipe.clip,
    "--bias-rate": lambda recipe, _: recipe.bias_rates[0].start,
    "--mtp-weight": lambda recipe, _: recipe.mtp_weights[0].start or 0.3,
    "--balance-factor": lambda recipe, _: recipe.balance_factor,
    "--sequence": lambda recipe, _: recipe.sequence,
}
"""Flag -> function that gives the value of its option if it is left out. V2 had no multi-token prediction, so its
lambda is that of V3."""


def follow(config: TrainConfig) -> TrainConfig:
    """The options, with the recipe's values for those that are left out."""
    recipe = published_recipe(config)
    for flag, of in FROM_RECIPE.items():
        if option(config, flag) is None:
            config = replaced(config, FLAGS[flag], of(recipe, config))
    return config


def is_overridden(config: TrainConfig, flag: str) -> bool:
    """Whether an option's value differs from its default, which for the flags of ``FROM_RECIPE`` is the recipe's."""
    value = option(config, flag)
    if flag in FROM_RECIPE:
        return value is not None and value != FROM_RECIPE[flag](published_recipe(config), config)
    return value != option(TrainConfig(), flag)


def published_recipe(config: TrainConfig) -> Recipe:
    """The recipe of the options' model, as published or by this project's own rule; see ``models.recipes``."""
    return recipes.of(config.model.name, model_config(config))


def run_recipe(config: TrainConfig, numbers: models.Config) -> Recipe:
    """The recipe of a run: that of its model in proportion to the run's tokens, with the run's options.

    Args:
      config: options that ``follow`` has filled in.
      numbers: the configuration of the model.
    """
    asked, (last, size, _) = config.optimizer, config.batch_shape
    first = last if asked.first_microbatches is None else asked.first_microbatches
    base = dataclasses.replace(
        published_recipe(config),
        config=numbers,
        sequence=config.sequence,
        warmup=min(int(_number(config, "--warmup")), asked.steps - 1),
        first_batch=first * size,
        batch=last * size,
        batch_multiple=first * size,
        ramp=float(asked.ramp_tokens or 0),
        b1=_number(config, "--b1"),
        b2=_number(config, "--b2"),
        weight_decay=_number(config, "--weight-decay"),
        clip=_number(config, "--clip"),
        balance_factor=_number(config, "--balance-factor"),
    )
    peak, tokens = _number(config, "--learning-rate"), float(base.count_tokens(asked.steps))
    recipe = recipes.in_proportion(base, tokens, peak, numbers, ramp=base.ramp)
    if asked.constant_until is not None or asked.final_rate is not None:
        share, final = asked.constant_until or 0.0, 0.1 if asked.final_rate is None else asked.final_rate
        constant = (Phase(share * tokens, peak),) if share else ()
        recipe = dataclasses.replace(recipe, rates=(*constant, Phase(tokens, peak, final * peak)))
    return dataclasses.replace(
        recipe, bias_rates=_bias_rates(recipe, config), mtp_weights=_mtp_weights(recipe, config)
    )


def _number(config: TrainConfig, flag: str) -> float:
    value = option(config, flag)
    assert value is not None, f"{flag} is None: follow(config) takes the recipe's"
    return value


def _bias_rates(recipe: Recipe, config: TrainConfig) -> tuple[Phase, ...]:
    """The recipe's phases, scaled to the rate of the options; one phase for the whole run if it has none, as V2's."""
    rate, first = _number(config, "--bias-rate"), recipe.bias_rates[0].start
    if not first:
        return (Phase(recipe.tokens, rate),)
    return tuple(Phase(phase.until, phase.start * rate / first) for phase in recipe.bias_rates)


def _mtp_weights(recipe: Recipe, config: TrainConfig) -> tuple[Phase, ...]:
    weight, final = _number(config, "--mtp-weight"), config.model.final_mtp_weight
    if final is not None:
        falls = next((phase.until for phase in recipe.rates[:-1]), 0.0)
        before = (Phase(falls, weight),) if falls else ()
        return (*before, Phase(recipe.tokens, final))
    if weight == FROM_RECIPE["--mtp-weight"](recipe, config):
        return tuple(phase._replace(start=phase.start or weight) for phase in recipe.mtp_weights)
    return (Phase(recipe.tokens, weight),)


def describe(config: TrainConfig, recipe: Recipe) -> str:
    """The recipe of a run in words: its source, what was scaled, and which options override it.

    Args:
      config: options that ``follow`` has filled in.
      recipe: see ``run_recipe``.
    """
    whole, asked = published_recipe(config), config.optimizer
    lines = [recipe.source]
    rates = [f"{asked.learning_rate:.3g}"]
    for phase in recipe.rates:
        share = f"{phase.until / recipe.tokens:.0%}"
        rates.append(f"to {share}" if phase.end is None else f"cosine to {phase.end:.2g} at {share}")
        if phase.end is None and phase.start != recipe.rates[0].start:
            rates[-1] = f"{phase.start:.2g} {rates[-1]}"
    lines.append(
        f"learning rate {', '.join(rates)}; warm-up {recipe.warmup} of {asked.steps} steps; "
        f"bias rate {asked.bias_rate:g}"
    )
    own = [
        f"{flag} {option(config, flag):g} ({of(whole, config):g})"
        for flag, of in FROM_RECIPE.items()
        if is_overridden(config, flag)
    ]
    own += [
        f"{flag} {option(config, flag):g}"
        for flag in (
            "--constant-until",
            "--final-rate",
            "--final-mtp-weight",
            "--first-microbatches",
            "--ramp-tokens",
        )
        if option(config, flag) is not None
    ]
    if own:
        lines.append("options that overrule it (its own number): " + ", ".join(own))
    scaled = [
        f"{recipe.tokens:.3g} tokens for {whole.tokens:.3g}",
        f"{recipe.batch} sequences a step for {whole.batch}",
    ]
    if whole.tokens > 2 * recipe.tokens:
        lines.append("in proportion: " + ", ".join(scaled) + "; rates are not scaled with the batch")
    if whole.ramp and not recipe.ramp:
        lines.append(
            f"not followed: its batch grows from {whole.first_batch} over the first {whole.ramp / whole.tokens:.0%} of "
            "tokens, see --first-microbatches"
        )
    return ("\n" + " " * 11).join(lines)
