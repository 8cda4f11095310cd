"""Draw the pages' pictures of schedules: `.venv/bin/python docs/draw.py` writes them into docs/pictures."""

import dataclasses
from io import BytesIO
from pathlib import Path

from PIL import Image

from dualpipe_jax.schedule import (
    ALL_SCHEDULES,
    CostModel,
    dualpipe,
    dualpipe_v,
    gpipe,
    one_f_one_b,
    plot,
    simulate,
    zb_h1,
)

PICTURES = Path(__file__).parent / "pictures"
ONE_SCALE = {"bands": False, "until": 36, "width": 7.5}
"""All pictures of 4 ranks and 8 microbatches have one scale of time, so that two can be compared by eye."""


def alone(schedule):
    """The same order, each half of a pair a slot of its own."""
    orders = tuple(tuple((action,) for slot in order for action in slot) for order in schedule.orders)
    return dataclasses.replace(schedule, name="two directions", orders=orders)


def pictures():
    """(path below docs/pictures, schedule, costs of a rank's share of the model, how it is drawn)."""
    equal, pairs = CostModel(), CostModel(FB=2.25)
    yield "understand_1.png", gpipe(4, 8), equal, ONE_SCALE
    yield "understand_2.png", one_f_one_b(4, 8), equal, ONE_SCALE
    yield "understand_3.png", zb_h1(4, 8), equal, ONE_SCALE
    yield "understand_4.png", alone(dualpipe(4, 8)), equal, ONE_SCALE
    yield "understand_5.png", dualpipe(4, 8), pairs, ONE_SCALE
    yield "understand_6.png", dualpipe_v(4, 8), pairs, ONE_SCALE
    yield "dualpipe_8_20.png", dualpipe(8, 20), pairs, {"bands": False}
    for recipe in ALL_SCHEDULES:
        yield f"gallery/{recipe.__name__}.png", recipe(4, 8), pairs, ONE_SCALE  # as `compare` has them there


def draw(schedule, costs, how):
    """A picture of few colours."""
    written = BytesIO()
    plot(simulate(schedule, costs.for_schedule(schedule)), **how).savefig(written, dpi=144)
    picture = Image.open(written).convert("RGB")
    return picture.quantize(128, Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)


def main():
    """Draw them all."""
    for name, schedule, costs, how in pictures():
        (PICTURES / name).parent.mkdir(parents=True, exist_ok=True)
        draw(schedule, costs, how).save(PICTURES / name, optimize=True)


if __name__ == "__main__":
    main()
