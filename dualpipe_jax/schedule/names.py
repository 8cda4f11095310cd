"""Find the recipe of a schedule by a name that a person typed."""

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping

from dualpipe_jax.schedule.ir import Schedule
from dualpipe_jax.schedule.recipes import ALL_SCHEDULES, Recipe

SCHEDULES: dict[str, Callable[..., Schedule]] = {recipe.__name__: recipe for recipe in ALL_SCHEDULES}

_ALIASES = {"1f1b": "one_f_one_b", "zb1p": "zb_h1", "zb2p": "zb_h2", "wave": "hanayo"}
_SPELLINGS = {name.replace("_", ""): name for name in SCHEDULES} | _ALIASES

_FINER_STAGES_PER_RANK = 4
"""The number of stages on each rank in the finer variant of recipes that take that number."""


def find(name: str) -> Callable[..., Schedule]:
    """Return the recipe of a name in any case, with or without hyphens: dualpipe_v, DualPipeV, zb-h1, 1f1b.

    Raises:
      ValueError: no schedule has this name; the message suggests similar names.
    """
    if is_known(name):
        return SCHEDULES[_SPELLINGS[_normalised(name)]]
    words = difflib.get_close_matches(_normalised(name), _SPELLINGS, n=3)
    near = dict.fromkeys(_SPELLINGS[word] for word in words)
    meant = f"did you mean {' or '.join(near)}? There" if near else "there"
    raise ValueError(f"there is no schedule {name!r}; {meant} are {', '.join(SCHEDULES)}")


def make(name: str, num_ranks: int, num_microbatches: int, finer: Mapping[str, int]) -> Schedule:
    """Make the schedule of a name.

    Args:
      name: the schedule's name, in any spelling that ``find`` accepts.
      num_ranks: the number of pipeline ranks.
      num_microbatches: the number of microbatches of the step, over all pipes together.
      finer: further keyword arguments of the recipe, such as ``{"num_stages_per_rank": 4}``.

    Raises:
      ValueError: no schedule has this name, its recipe refuses the counts, or it does not take an argument of
        ``finer``; the message then says which recipes do.
    """
    recipe = find(name)
    for choice in (choice for choice in finer if not takes(recipe, choice)):
        able = [known for known, other in SCHEDULES.items() if takes(other, choice)]
        raise ValueError(
            f"{recipe.__name__} takes no {flag_of(choice)}; {', '.join(able) or 'no schedule'} can"
        )
    return recipe(num_ranks, num_microbatches, **finer)


def flag_of(choice: str) -> str:
    """The option of the command line for a parameter of recipes: --stages-per-rank for num_stages_per_rank."""
    return "--" + choice.removeprefix("num_").replace("_", "-")


def takes(recipe: Callable[..., Schedule], choice: str) -> bool:
    """Whether a recipe has a parameter named ``choice``, such as num_stages_per_rank."""
    return choice in inspect.signature(recipe).parameters


def with_finer_variants(recipes: Iterable[Recipe]) -> Iterator[Recipe]:
    """Yield the recipes, and after each that takes ``num_stages_per_rank`` its variant with four stages per rank."""
    for recipe in recipes:
        yield recipe
        if takes(recipe, "num_stages_per_rank"):
            finer = functools.partial(recipe, **{"num_stages_per_rank": _FINER_STAGES_PER_RANK})
            functools.update_wrapper(finer, recipe)
            finer.__name__ = f"{recipe.__name__}, {_FINER_STAGES_PER_RANK} stages a rank"  # type: ignore[attr-defined]
            yield finer


def is_known(name: str) -> bool:
    return _normalised(name) in _SPELLINGS


def _normalised(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")
