"""How a person's name of a schedule finds its recipe."""

import difflib
from collections.abc import Callable

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


def is_known(name: str) -> bool:
    return _plain(name) in _spellings()


def _spellings() -> dict[str, str]:
    return {_plain(known): known for known in SCHEDULES} | {
        other: known for other, known in _ALSO_CALLED.items() if known in SCHEDULES
    }


def _plain(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")
