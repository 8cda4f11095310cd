"""How a person's name of a schedule finds its recipe."""

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping

from dualpipe_jax.schedule.ir import Schedule
from dualpipe_jax.schedule.recipes import ALL_SCHEDULES, Recipe

SCHEDULES: dict[str, Callable[..., Schedule]] = {recipe.__name__: recipe for recipe in ALL_SCHEDULES}

_ALSO_CALLED = {"1f1b": "one_f_one_b", "zb1p": "zb_h1", "zb2p": "zb_h2", "wave": "hanayo"}
_SPELLINGS = {name.replace("_", ""): name for name in SCHEDULES} | _ALSO_CALLED

_FINER = 4
"""Stages a rank of the finer cut of recipes that take a number of them."""


def find(name: str) -> Callable[..., Schedule]:
    """The recipe of a name, however it is spelt: dualpipe_v, DualPipeV, zb-h1, 1f1b.

    Raises:
      ValueError: there is none; says which names are near.
    """
    if is_known(name):
        return SCHEDULES[_SPELLINGS[_plain(name)]]
    words = difflib.get_close_matches(_plain(name), _SPELLINGS, n=3)
    near = dict.fromkeys(_SPELLINGS[word] for word in words)
    meant = f"did you mean {' or '.join(near)}? There" if near else "there"
    raise ValueError(f"there is no schedule {name!r}; {meant} are {', '.join(SCHEDULES)}")


def make(name: str, num_ranks: int, num_microbatches: int, finer: Mapping[str, int]) -> Schedule:
    """The schedule of a name, cut as finely as is said, where its recipe leaves a choice.

    Raises:
      ValueError: there is none of that name, or not with these counts, or its recipe does not leave that choice; says
        which recipes do.
    """
    recipe = find(name)
    for choice in (choice for choice in finer if not takes(recipe, choice)):
        able = [known for known, other in SCHEDULES.items() if takes(other, choice)]
        flag = "--" + choice.removeprefix("num_").replace("_", "-")
        raise ValueError(f"{recipe.__name__} takes no {flag}; {', '.join(able) or 'no schedule'} can")
    return recipe(num_ranks, num_microbatches, **finer)


def takes(recipe: Callable[..., Schedule], choice: str) -> bool:
    """Whether a recipe leaves the choice of that name, such as num_stages_per_rank."""
    return choice in inspect.signature(recipe).parameters


def with_finer(recipes: Iterable[Recipe]) -> Iterator[Recipe]:
    """Recipes, and beside each that cuts the model at will what it makes of four stages a rank."""
    for recipe in recipes:
        yield recipe
        if takes(recipe, "num_stages_per_rank"):
            finer = functools.partial(recipe, **{"num_stages_per_rank": _FINER})
            functools.update_wrapper(finer, recipe)
            finer.__name__ = f"{recipe.__name__}, {_FINER} stages a rank"  # type: ignore[attr-defined]
            yield finer


def is_known(name: str) -> bool:
    return _plain(name) in _SPELLINGS


def _plain(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")
