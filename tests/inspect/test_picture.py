"""The picture of a timeline: what is drawn where, what it says, files written."""

import sys
from pathlib import Path

import pytest

from dualpipe_jax.inspect import overlap, plot
from dualpipe_jax.inspect.picture import COLOURS
from dualpipe_jax.inspect.rates import Rates, tpu_rates
from tests.inspect.by_hand import done, module, start, work

pytest.importorskip("matplotlib", reason="pictures need matplotlib")

TEXTS = Path(__file__).parent / "texts"
LINES = (
    work("v", 100),
    start("a", scope="jvp(dispatch)"),
    start("s", "collective-permute"),
    work("w", 400, "transpose(jvp())"),
    work("small", 1),
    work("y", 100, "transpose(jvp())"),
    done("a"),
    work("z", 2400, "slots"),
    done("s", "collective-permute"),
)
KIB = 1024
LINK = Rates(link=2 * 0.75)


def drawn(*lines, rates=LINK, **options):
    return plot(overlap(module(*(lines or LINES)), rates), "main", **options)


def spans(figure):
    """(start, end) of the boxes of each collection, by what it is."""
    return {
        c.get_gid(): [(round(b.x0, 3), round(b.x1, 3)) for b in (p.get_extents() for p in c.get_paths())]
        for c in figure.axes[0].collections
    }


def words(figure):
    return [text.get_text() for text in (*figure.texts, *figure.axes[0].texts)]


def test_work_waits_and_collectives_stand_at_their_times():
    figure = drawn()
    assert spans(figure) == {
        "work forward": [(0, 0.1)],
        "work backward": [(0.1, 0.601)],
        "work wait": [(0.601, 1.124)],
        "work unknown": [(1.124, 3.524)],
        "all-to-all a": [(0.1, 1.124)],
        "collective-permute s": [(0.1, 0.783)],
    }, "the smallest piece is drawn with its neighbours"
    axes, rows = figure.axes[0], ["computation", "all-to-all", "collective-permute"]
    assert [label.get_text() for label in axes.get_yticklabels()] == rows
    assert axes.get_xlabel() == "kcycles, modelled" and axes.get_xlim() == pytest.approx((0, 3.524))


def test_what_it_says():
    said = words(drawn(title="a pair", clock=1e6))
    assert said[0] == "a pair"
    assert "all-to-all: 48.9 % hidden    collective-permute: 73.4 % hidden" in said[1]
    assert "time: 1.174 of the larger of computation and communication" in said[1]
    assert "3.52 kcycles   3.52 ms at 0.001 GHz   work 3.00   collectives 1.71" in said
    assert "dispatch F, 48.9 % hidden" in said and "waits 0.52" in said
    assert words(drawn())[0] == "main"


def test_without_durations_it_claims_nothing():
    said = words(drawn(rates=None))
    assert "all-to-all: ? hidden" in said[1] and "time:" not in said[1]
    assert not any("collectives" in text for text in said)


def test_the_legend_names_what_is_there():
    (legend,) = drawn().legends
    named = [text.get_text() for text in legend.get_texts()]
    assert named == ["forward", "backward", "neither", "the core waits"]
    (legend,) = drawn(work("v", 10)).legends
    assert [text.get_text() for text in legend.get_texts()] == ["forward"]


def test_a_collective_has_the_colour_of_its_direction():
    from matplotlib.colors import to_hex

    boxes = {c.get_gid(): to_hex(c.get_facecolor()[0]) for c in drawn().axes[0].collections}
    assert boxes["all-to-all a"] == boxes["work forward"] == COLOURS["forward"]
    assert boxes["collective-permute s"] == COLOURS["unknown"]


@pytest.mark.parametrize("ending", ["svg", "png", "SVG"])
def test_files_are_written_and_are_the_same_each_time(tmp_path, ending):
    found = overlap((TEXTS / "v5e_pair.hlo").read_text(), tpu_rates("v5e"))
    paths = [tmp_path / f"{name}.{ending}" for name in "ab"]
    for path in paths:
        plot(found, "main.0_spmd", path)
    first, second = (path.read_bytes() for path in paths)
    assert first == second and len(first) > 5000


def test_nothing_to_draw_is_drawn_all_the_same():
    figure = drawn(work("v", 0))
    assert spans(figure) == {} and figure.legends


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"path": "pair.jpg"}, "plot: cannot tell a format from 'pair.jpg'; end the name in .svg or .png, such as"),
        ({"clock": 0.0}, "plot: clock=0.0; it must be above 0 hertz, such as 1.75e9"),
    ],
)  # fmt: skip
def test_what_cannot_be_drawn(options, message):
    with pytest.raises(ValueError, match=message):
        drawn(**options)


def test_without_matplotlib_it_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ModuleNotFoundError, match=r"not installed; run: .* install -e '.*\[plot\]'$"):
        drawn()


def test_directions_may_have_other_names():
    names = {"forward": ("microbatch A", "A"), "backward": ("microbatch B", "B")}
    figure = drawn(names=names)
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert legend == ["microbatch A", "microbatch B", "neither", "the core waits"]
    assert any(text.startswith("dispatch A") for text in words(figure))
