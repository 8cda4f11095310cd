"""How a person's name of a schedule finds its recipe."""

import difflib
import inspect
from collections.abc import Callable, Mapping

from dualpipe_jax.schedule.ir import Schedule
from dualpipe_jax.schedule.recipes import ALL_SCHEDULES

SCHEDULES: dict[str, Callable[..., Schedule]] = {recipe.__name__: recipe for recipe in ALL_SCHEDULES}

_ALSO_CALLED = {"1f1b": "one_f_one_b", "zb1p": "zb_h1", "zb2p": "zb_h2", "wave": "hanayo"}


def find(name: str) -> Callable[..., Schedule]:
    """The recipe of a name, however it is spelt: dualpipe_v, DualPipeV, zb-h1, 1f1b.

    Raises:
      ValueError: there is none; says which names are near.
    """
    if not is_known(name):
        spelt = _spellings()
        near = dict.fromkeys(spelt[word] for word in difflib.get_close_matches(_plain(name), spelt, n=3))
        meant = f"did you mean {' or '.join(near)}? There" if near else "there"
        raise ValueError(f"there is no schedule {name!r}; {meant} are {', '.join(SCHEDULES)}")
    return SCHEDULES[_spellings()[_plain(name)]]


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


def is_known(name: str) -> bool:
    return _plain(name) in _spellings()


def _spellings() -> dict[str, str]:
    return {_plain(known): known for known in SCHEDULES} | {
        other: known for other, known in _ALSO_CALLED.items() if known in SCHEDULES
    }


def _plain(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")
