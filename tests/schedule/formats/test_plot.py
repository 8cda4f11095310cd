"""The picture: every slot a box in the right place, pairs framed, figures and legend printed, files written."""

import dataclasses
import itertools
import re
import sys

import pytest
from matplotlib import rcParams
from matplotlib.colors import to_hex

from dualpipe_jax.present.numbers import Units
from dualpipe_jax.schedule import CostModel, MemoryModel, Op, Placement, lower_bound, simulate
from dualpipe_jax.schedule.blame import critical_path
from dualpipe_jax.schedule.formats.colours import COLOURS, colours, num_shades, shade, shade_names
from dualpipe_jax.schedule.formats.plot import plot
from dualpipe_jax.schedule.recipes import dualpipe, dualpipe_v, gpipe, one_f_one_b, zb_h1
from dualpipe_jax.schedule.recipes.classic import interleaved_1f1b

COSTS = CostModel(1, 1.5, 0.5, FB=2.25)


def collections(figure):
    return {collection.get_gid(): collection for collection in figure.axes[0].collections}


def spans(collection):
    """(start, end, rank) of each box of a collection, to four digits."""
    boxes = [path.get_extents() for path in collection.get_paths()]
    return sorted((round(box.x0, 4), round(box.x1, 4), int(box.y0)) for box in boxes)


def words(figure):
    return [text.get_text() for text in figure.texts]


def legend(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


@pytest.mark.parametrize("schedule", [gpipe(3, 4), dualpipe(4, 8), dualpipe_v(3, 7), interleaved_1f1b(2, 4)])
def test_every_action_has_a_box_at_its_time(schedule):
    timeline = simulate(schedule, COSTS)
    drawn = collections(plot(timeline))
    wanted = {}
    for rank, order in enumerate(schedule.orders):
        for slot, start, end in zip(order, timeline.starts[rank], timeline.ends[rank], strict=True):
            for action in slot:
                name = f"boxes {action.op} {shade(schedule.placement, action.stage)}"
                wanted.setdefault(name, []).append((round(start, 4), round(end, 4), rank))
    assert {name: spans(held) for name, held in drawn.items() if name.startswith("boxes")} == {
        name: sorted(held) for name, held in wanted.items()
    }


def test_pairs_and_only_they_are_framed_with_the_forward_above():
    schedule = dualpipe_v(3, 8)
    timeline = simulate(schedule, COSTS)
    drawn = collections(plot(timeline))
    pairs = sorted(
        (round(start, 4), round(end, 4), rank)
        for rank, order in enumerate(schedule.orders)
        for slot, start, end in zip(order, timeline.starts[rank], timeline.ends[rank], strict=True)
        if len(slot) == 2
    )
    assert pairs and spans(drawn["pairs"]) == pairs
    halves = [box.get_extents() for box in drawn["boxes B 1"].get_paths() if box.get_extents().height < 0.6]
    assert halves and all(0.4 < box.y0 % 1 < 0.6 for box in halves)
    assert "pairs" not in collections(plot(simulate(gpipe(2, 2))))


def numbers(schedule):
    return [text for text in plot(simulate(schedule)).axes[0].texts if text.get_text().isdigit()]


def test_numbers_are_microbatches_within_their_pipe():
    schedule = dualpipe(4, 8)
    drawn = sorted(int(text.get_text()) for text in numbers(schedule))
    assert drawn == sorted(a.microbatch for order in schedule.orders for slot in order for a in slot)
    assert max(drawn) == 3


def test_numbers_shrink_and_then_go():
    def sizes(schedule):
        return [text.get_size() for text in numbers(schedule)]

    assert min(sizes(one_f_one_b(2, 8))) > 7
    assert min(sizes(dualpipe(16, 64))) > 5, "what people look at must be readable"
    assert 2 < min(sizes(one_f_one_b(2, 128))) < 7
    assert sizes(one_f_one_b(2, 800)) == []


def test_short_boxes_have_as_large_numbers_as_one_digit_allows():
    sizes = [text.get_size() for text in numbers(interleaved_1f1b(4, 8))]
    assert min(sizes) > 7, "no number has two digits"


def test_numbers_of_the_second_of_two_shades_are_underlined():
    schedule = dualpipe(4, 8)
    axes = plot(simulate(schedule)).axes[0]
    lines = [
        line for held in axes.collections if held.get_gid() == "underlines" for line in held.get_segments()
    ]
    boxes = [path.get_extents() for held in axes.collections if re.match(r"boxes . 1", held.get_gid())
             for path in held.get_paths()]  # fmt: skip
    assert (
        len(lines)
        == len(boxes)
        == sum(action.stage >= 4 for order in schedule.orders for slot in order for action in slot)
    )
    for (left, high), (right, low) in lines:
        (box,) = (box for box in boxes if box.x0 < left < right < box.x1 and box.y0 < high < box.y1)
        assert high == low > (box.y0 + box.y1) / 2
    for other in (gpipe(2, 4), interleaved_1f1b(2, 4, 3)):
        assert "underlines" not in collections(plot(simulate(other)))


def test_the_bound_is_drawn_under_the_boxes():
    axes = plot(simulate(gpipe(4, 8))).axes[0]
    (line,) = (line for line in axes.lines if line.get_gid() == "bound")
    held = collections(plot(simulate(gpipe(4, 8))))
    assert held["idle"].get_zorder() < line.get_zorder() < held["boxes B 0"].get_zorder()


def test_two_pictures_can_have_one_scale_and_no_bands():
    figures = [plot(simulate(recipe(4, 8)), bands=False, until=40, width=7.5) for recipe in (gpipe, dualpipe)]
    for figure in figures:
        (axes,) = figure.axes
        assert axes.get_xlim() == (0, 40) and tuple(figure.get_size_inches()) == tuple(
            figures[0].get_size_inches()
        )
        assert axes.get_xlabel() == "time" and figure.get_figwidth() == 7.5
        assert all(text.get_size() > 4 for text in axes.texts)
        assert "peak live activations" in " ".join(words(figure))
    with_bands = plot(simulate(gpipe(4, 8)))
    assert len(with_bands.axes) == 2 and with_bands.get_figheight() > figures[0].get_figheight() + 1
    assert plot(simulate(gpipe(4, 8)), until=5).axes[0].get_xlim() == (0, 33), "nothing is cut off"


def test_the_figure_grows_with_ranks_and_time():
    small, tall, wide = (plot(simulate(zb_h1(*counts))) for counts in ((4, 8), (8, 8), (4, 40)))
    assert tall.get_figheight() > small.get_figheight() and wide.get_figwidth() > small.get_figwidth()


def test_figures_are_printed():
    timeline = simulate(dualpipe(4, 8), COSTS)
    printed = " ".join(words(plot(timeline)))
    assert printed.startswith("dualpipe   4 ranks, 8 microbatches")
    assert f"bubble {100 * timeline.bubble:.1f} %" in printed
    assert f"makespan {timeline.makespan:.4g}" in printed
    assert "peak live activations 5" in printed
    assert "cost of a stage: F 1, I 1.5, W 0.5, FB 2.25" in printed
    schedule = dualpipe_v(4, 10)  # of a whole rank's share: 9 halves
    figure = plot(simulate(schedule, COSTS.for_schedule(schedule)))
    assert "peak live activations 4.5" in " ".join(words(figure))
    assert "send 0.1" in words(plot(simulate(gpipe(1, 1), CostModel(send=0.1))))[2]


def test_memory_is_a_band_for_each_rank_and_none_lies_under_another():
    timeline = simulate(one_f_one_b(3, 6), COSTS)
    sizes = MemoryModel(2, 1, 0, 0.5, parameters=10)
    panel = plot(timeline, memory=sizes).axes[1]
    most = max(timeline.memory(sizes))
    for rank in range(3):
        line = panel.lines[rank]
        times, kept = timeline.memory_over_time(rank, sizes)
        assert tuple(line.get_xdata()) == (*times, timeline.makespan)
        heights = [rank + 0.94 - y for y in line.get_ydata()]
        assert heights == pytest.approx([0.86 * amount / most for amount in (*kept, kept[-1])])
        assert line.get_drawstyle() == "steps-post"
        assert all(rank < y < rank + 1 for y in line.get_ydata())
    assert [text.get_text() for text in panel.texts] == ["peak 20.5", "peak 17", "peak 13.5"]
    assert panel.get_title("left") == "memory, all ranks to one scale"
    assert plot(timeline, memory=sizes, memory_label="GiB").axes[1].get_title("left").startswith("GiB, ")


@pytest.mark.parametrize("schedule", [dualpipe(4, 8), one_f_one_b(3, 6)], ids=lambda s: s.name)
def test_idle_time_is_hatched_and_summed(schedule):
    timeline = simulate(schedule, COSTS)
    axes = plot(timeline).axes[0]
    idle = collections(plot(timeline))["idle"]
    waited = [0.0] * schedule.num_ranks
    for start, end, rank in spans(idle):
        waited[rank] += end - start
    assert waited == pytest.approx(list(timeline.idle))
    assert idle.get_hatch() and to_hex(idle.get_facecolor()[0]) != "#ffffff"
    said = [text.get_text() for text in axes.texts if text.get_text().startswith("idle ")]
    assert said == [f"idle {round(idle, 3):g}" for idle in timeline.idle]
    assert "idle" not in collections(plot(simulate(gpipe(1, 2))))


def test_sends_are_lines_between_ranks_where_they_take_time():
    schedule = one_f_one_b(2, 3)
    timeline = simulate(schedule, CostModel(send=0.5))
    lines = collections(plot(timeline))["sends"].get_segments()
    assert len(lines) == 2 * 3  # each microbatch there and back
    assert {(float(a[1]), float(b[1])) for a, b in lines} == {(0.5, 1.5), (1.5, 0.5)}
    assert all(b[0] - a[0] == pytest.approx(0.5) for a, b in lines)
    assert "sends" not in collections(plot(simulate(schedule)))


def test_the_proven_bound_is_marked_where_it_is_shorter():
    def marks(schedule):
        axes = plot(simulate(schedule)).axes[0]
        lines = [float(line.get_xdata()[0]) for line in axes.lines if line.get_gid() == "bound"]
        return lines, [text.get_text() for text in axes.texts if "bound" in text.get_text()]

    bound = lower_bound(4, 8, placement=Placement.linear(4))
    assert marks(gpipe(4, 8)) == ([bound], [f"proven bound {bound:g}"])
    assert marks(zb_h1(4, 8)) == ([], [])


def test_a_name_is_no_formula(tmp_path):
    schedule = dataclasses.replace(gpipe(2, 2), name=r"$x_$ \frac{")
    for ending in ("png", "svg"):
        plot(simulate(schedule), tmp_path / f"a.{ending}", memory_label="$x_$")
        assert (tmp_path / f"a.{ending}").stat().st_size > 1000


def test_the_legend_names_what_is_drawn():
    assert legend(plot(simulate(gpipe(2, 2)))) == ["F forward", "B backward", "idle"]
    forward, *others = legend(plot(simulate(dualpipe(2, 4))))
    assert (forward, *others[:3]) == (
        "F forward",
        "B backward",
        "I backward for input",
        "W backward for weights",
    )
    assert others[3:] == ["overlapped pair", "pipe 0, pipe 1 underlined"]


def test_shades_tell_pipes_and_laps():
    both, v, lap = Placement.bidirectional(3), Placement.v(3), interleaved_1f1b(2, 4, 3).placement
    assert [shade(both, stage) for stage in range(6)] == [0, 0, 0, 1, 1, 1]
    assert [shade(v, stage) for stage in range(6)] == [0, 0, 0, 1, 1, 1]
    assert [shade(lap, stage) for stage in range(6)] == [0, 0, 1, 1, 2, 2]
    assert [shade_names(p) for p in (both, v, lap)] == [
        ("pipe 0", "pipe 1"),
        ("way there", "way back"),
        ("lap 0", "lap 1", "lap 2"),
    ]
    drawn = collections(plot(simulate(dualpipe(2, 4))))
    for op, at in itertools.product(Op, range(2)):
        (colour,) = {to_hex(c) for c in drawn[f"boxes {op} {at}"].get_facecolors()}
        assert colour == COLOURS[op][at]
    assert colours(Op.F, 3)[::2] == list(COLOURS[Op.F]) and len(set(colours(Op.F, 3))) == num_shades(lap)


def test_files_are_written_the_same_each_time_and_nothing_global_is_touched(tmp_path):
    settings, loaded = dict(rcParams), "matplotlib.pyplot" in sys.modules
    timeline = simulate(dualpipe(2, 4))
    plot(timeline, tmp_path / "a.svg")
    plot(timeline, str(tmp_path / "b.SVG"))
    plot(timeline, tmp_path / "a.png")
    svg = (tmp_path / "a.svg").read_text()
    assert svg == (tmp_path / "b.SVG").read_text()
    assert 'id="pairs"' in svg and re.search(r'id="boxes F 1"', svg)
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert (dict(rcParams), "matplotlib.pyplot" in sys.modules) == (settings, loaded)


def test_what_cannot_be_drawn(tmp_path, monkeypatch):
    timeline = simulate(gpipe(1, 1))
    message = (
        r"plot: cannot tell a format from '.*step.pdf'; end the name in .svg or .png, such as 'step.svg'"
    )
    with pytest.raises(ValueError, match=message):
        plot(timeline, tmp_path / "step.pdf")
    with pytest.raises(ValueError, match="such as 'step.svg'"):
        plot(timeline, "step")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ModuleNotFoundError, match=r"not installed; run: .* install -e '.*\[plot\]'$"):
        plot(timeline)


def test_a_chain_of_waiting_is_framed_and_joined():
    timeline = simulate(one_f_one_b(2, 3), CostModel(send=0.25))
    chain = critical_path(timeline)
    drawn = collections(plot(timeline, chain=chain))
    assert spans(drawn["chain"]) == sorted((link.start, link.end, link.rank) for link in chain)
    joints = [tuple(map(tuple, line)) for line in drawn["chain joints"].get_segments()]
    assert joints == [
        ((before.end, before.rank + 0.5), (link.start, link.rank + 0.5))
        for link, before in itertools.pairwise(chain)
    ]
    assert "waits for the one before" in legend(plot(timeline, chain=chain))
    assert "chain" not in collections(plot(timeline))


def test_units_stand_behind_what_is_written():
    schedule = gpipe(2, 4)
    sizes = MemoryModel(residual_i=2**30, extra={-1: 3 * 2**29})
    figure = plot(simulate(schedule, CostModel(50, 60, 40)), memory=sizes, units=Units("ms", "B"))
    printed = " ".join(words(figure))
    assert "makespan 750 ms   peak memory 5.5 GiB" in printed
    assert "cost of a stage: F 50, I 60, W 40, FB 150 ms" in printed
    assert "idle 150 ms" in [text.get_text() for text in figure.axes[0].texts]
    assert figure.axes[1].get_xlabel() == "time, ms"
    assert [text.get_text() for text in figure.axes[1].texts] == ["peak 4 GiB", "peak 5.5 GiB"]
