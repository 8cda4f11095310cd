"""Files of a compiled program: which computation is drawn, and that each ending gets what it stands for."""

import json
from pathlib import Path

import pytest

from dualpipe_jax.inspect import overlap, read
from dualpipe_jax.inspect.rates import Rates
from dualpipe_jax.inspect.target import Target
from dualpipe_jax.pods import readings
from dualpipe_jax.pods.timeline import write
from tests.inspect.by_hand import done, module, start, work

TARGET = Target.parse("v5e:4x4")
ENTRY = [start("a"), work("w", 400), done("a")]


def pair(name, cycles):
    """The body of a guard."""
    lines = "\n  ".join([start(f"{name}.a"), work(f"{name}.w", cycles), done(f"{name}.a")])
    return f"%{name} (x: f32[256]) -> f32[256] {{\n  %x = f32[256]{{0}} parameter(0)\n  {lines}\n}}\n"


def guard(name, scope):
    metadata = f'metadata={{op_name="jit(step)/while/body/{scope}/while"}}'
    return f"%g.{name} = f32[256] while(%x), condition=%none, body=%{name}, {metadata}"


def written(folder, text, *names):
    found = read(text)
    files = [folder / name for name in names]
    write(list(map(str, files)), lambda: text, overlap(found, Rates(link=1.0)), found, TARGET, "a program")
    return [file.read_text() for file in files]


def drawn(folder, text):
    (trace,) = written(folder, text, "pair.trace")
    return json.loads(trace)["otherData"]["computation"]


def test_the_slowest_pair_is_drawn(tmp_path):
    bodies = {"forward": ("forward/middle", 9000), "short": ("pair/middle-middle", 100)}
    bodies |= {"long": ("pair/first-last", 5000)}
    lines = [guard(name, scope) for name, (scope, _) in bodies.items()]
    text = module(*lines, more="".join(pair(name, cycles) for name, (_, cycles) in bodies.items()))
    assert drawn(tmp_path, text) == "long"


def test_where_there_are_pairs_their_exchanges_alone_are_counted():
    lines = [guard("both", "pair/middle-middle"), guard("alone", "forward/middle"), *ENTRY]
    with_pair = read(module(*lines, more=pair("both", 100) + pair("alone", 100)))
    without = read(module(*lines[1:], more=pair("alone", 100)))
    for found, names in ((with_pair, ["both.a"]), (without, ["a", "alone.a"])):
        counted = readings.read("text", found, overlap(found, Rates(link=1.0)), None)
        assert sorted(one.name for one in counted.all_to_alls) == names and counted.all_to_all.count == len(
            names
        )


def test_without_pairs_what_communicates_longest_is_drawn(tmp_path):
    assert drawn(tmp_path, module(*ENTRY)) == "main"
    twice = pair("twice", 10).replace("\n}", f"\n  {start('b')}\n  {done('b')}\n}}")
    assert drawn(tmp_path, module(guard("twice", "forward/middle"), *ENTRY, more=twice)) == "twice"


def test_each_ending_gets_its_own(tmp_path):
    pytest.importorskip("matplotlib", reason="pictures need matplotlib")
    text = module(*ENTRY)
    picture, trace, first, second = written(tmp_path, text, "p.svg", "p.TRACE", "p.hlo", "p.txt")
    assert picture.startswith("<?xml") and json.loads(trace)["traceEvents"] and first == second == text


def test_nothing_to_draw_and_the_text_is_there_all_the_same(tmp_path):
    text = module(work("w", 1))
    with pytest.raises(ValueError, match="^by_hand: no collectives, so there is no overlap to draw$"):
        written(tmp_path, text, "pair.svg", "pair.hlo")
    assert Path(tmp_path, "pair.hlo").read_text() == text
