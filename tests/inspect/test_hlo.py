"""Reading the text of compiled programs."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from dualpipe_jax.inspect import hlo, read
from dualpipe_jax.inspect.hlo import Array, Call

TEXTS = sorted((Path(__file__).parent / "texts").glob("*.hlo"))

SMALL = """\
HloModule jit_f, is_scheduled=true, entry_computation_layout={(f32[8]{0})->f32[8]{0}}

FileNames
1 "f.py"

%inner (p.1: f32[8]) -> f32[8] {
  %p.1 = f32[8]{0} parameter(0)
  ROOT %neg = f32[8]{0} negate(%p.1), metadata={op_name="jit(f)/transpose(jvp(a))/neg"}
}, execution_thread="sparsecore"

%body (s: (s32[], bf16[2,3])) -> (s32[], bf16[2,3]) {
  %s = (s32[]{:T(128)}, /*index=1*/bf16[2,3]{1,0:T(8,128)(2,1)S(1)}) parameter(0)
  an odd line that is no instruction
  %i = s32[]{:T(128)} get-tuple-element(%s), index=0
  ROOT %out = (s32[], bf16[2,3]) tuple(%i, %i)
}

%cond (s: (s32[], bf16[2,3])) -> pred[] {
  %s.1 = (s32[], bf16[2,3]) parameter(0)
  ROOT %p = pred[] constant(false)
}

ENTRY %main.1 (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %c = s32[2,2]{1,0} constant({ { 1, 2 }, { 3, 4 } })
  %t = (s32[], bf16[2,3]) custom-call((f32[8]{0}) %x, f32[8]{0} %x), custom_call_target="a(b)", \
backend_config={"x":"%not"}
  %w = (s32[], bf16[2,3]) while((s32[], bf16[2,3]) %t), condition=%cond, body=%body, \
backend_config={"known_trip_count":{"n":"7"}}
  %q = f32[8]{0} conditional(%c, %x, %x), branch_computations={%inner, %inner.missing}
  %y = f32[8]{0} custom-call(%x), custom_call_target="tpu_custom_call", kernel_metadata={{
"block": 512,
  "layout": 1}
}}, metadata={op_name="jit(f)/jvp(attention)/kernel"}
  ROOT %r = f32[8]{0} fusion(%x), kind=kLoop, calls=%inner, backend_config={"estimated_cycles":"123"}
}
"""


def test_every_part_of_a_line():
    module = read(SMALL)
    assert (module.name, module.entry, module.is_scheduled) == ("jit_f", "main.1", True)
    assert list(module.computations) == ["inner", "body", "cond", "main.1"]
    main = module.computations["main.1"]
    opcodes = ["parameter", "constant", "custom-call", "while", "conditional", "custom-call", "fusion"]
    assert [i.opcode for i in main] == opcodes
    call, loop, branch, _, root = main.instructions[2:]
    assert call.operands == ("x", "x") and call.target == "a(b)" and call.config == '{"x":"%not"}'
    assert call.arrays == (Array("s32", ()), Array("bf16", (2, 3))) and call.nbytes == 4 + 12
    assert loop.calls == (Call("condition", "cond"), Call("body", "body")) and loop.trips == 7
    assert loop.operands == ("t",)
    assert branch.called("branch") == ("inner", "inner.missing")
    assert root.is_root and root.cycles == 123 and main.root is root and call.cycles is None
    assert module.computations["inner"].root.op_name == "jit(f)/transpose(jvp(a))/neg"


def test_an_instruction_may_go_on_over_several_lines():
    kernel = read(SMALL).computations["main.1"].by_name["y"]
    assert kernel.op_name == "jit(f)/jvp(attention)/kernel" and '"layout": 1' in kernel.attributes
    assert kernel.operands == ("x",) and kernel.target == "tpu_custom_call"


def test_an_odd_line_is_skipped():
    assert [i.name for i in read(SMALL).computations["body"]] == ["s", "i", "out"]


def test_what_runs_line_by_line_and_from_where():
    module = read(SMALL)
    within = {"inner": "main.1/q branch 0", "body": "main.1/w body", "cond": "main.1/w condition"}
    assert module.executed == within | {"main.1": "main.1"}
    ((body, (name, loop)),) = module.loops.items()
    assert (body, name, loop.name) == ("body", "main.1", "w")
    inside = [i.name for i in module.inside("main.1", enter_loops=False)]
    assert "neg" in inside and "out" not in inside
    assert "out" in [i.name for i in module.inside("main.1")]


SHAPES = {"pred[3,5]": 15, "f8e4m3fn[4,4]": 16, "f8e5m2[7]": 7, "s4[3]": 2, "u4[8]": 4, "f4e2m1fn[8]": 4}
SHAPES |= {"c64[2]": 16, "c128[2]": 32, "f64[]": 8, "u8[0]": 0, "s32[<=5]": 20, "token[]": 0}
SHAPES |= {"bf16[2,3]{1,0:T(8,128)(2,1)S(1)}": 12, "((f32[2]{0}, token[]), (bf16[2], u32[]{:S(2)}))": 16}


def test_bytes_of_shapes():
    assert {shape: sum(a.nbytes for a in hlo.arrays(shape)) for shape in SHAPES} == SHAPES


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.stem)
def test_no_line_of_a_compiled_text_is_lost(path):
    text = path.read_text()
    module = read(text)
    lines = [line for line in text.splitlines() if re.match(r"\s+(ROOT )?%\S+ = ", line)]
    assert sum(len(c.instructions) for c in module.computations.values()) == len(lines) > 20
    assert module.is_scheduled and len(module.computations) == text.count("\n}")
    for computation in module.computations.values():
        assert computation.root is not None
        for instruction in computation:
            assert set(instruction.operands) <= set(computation.by_name), instruction.name
            assert set(instruction.called()) <= set(module.computations), instruction.name
    estimates = [int(n) for n in re.findall(r'estimated_cycles":"(\d+)', text)]
    found = [i.cycles for c in module.computations.values() for i in c if i.cycles is not None]
    assert sorted(found) == sorted(estimates)


def test_reads_what_jax_compiles_here():
    compiled = jax.jit(lambda x: jnp.sin(x) @ x).lower(jnp.ones((16, 16))).compile()
    module = read(compiled)
    assert module.is_scheduled and read(module) is module
    assert any(i.opcode == "dot" or "matmul" in i.target for i in module.inside(module.entry))


@pytest.mark.parametrize("text", ["", "module @jit_f attributes {}", "HloModule empty, is_scheduled=true\n"])
def test_text_without_a_module_is_refused(text):
    with pytest.raises(ValueError, match="no HLO module with an ENTRY computation .* not compiled yet"):
        read(text)


def test_a_large_text_is_read():
    """7 MB, in about a second; in hours, if that grew with its square."""
    header, body = (Path(__file__).parent / "texts/v5e_pair.hlo").read_text().split("\n", 1)
    before, entry = body.split("ENTRY ")
    many = [before.replace("computation", f"c{k}_") for k in range(900)]
    text = "\n".join([header, *many, "ENTRY " + entry])
    assert len(text) > 6.7e6
    assert len(read(text).computations) > 900


COUNTS = """HloModule counts, is_scheduled=true

%inner (s: (s32[], s32[])) -> (s32[], s32[]) {
  %s = (s32[], s32[]) parameter(0)
  %k = s32[] get-tuple-element(%s), index=0
  %by = s32[] get-tuple-element(%s), index=1
  %next = s32[] add(%k, %by)
  ROOT %out = (s32[], s32[]) tuple(%next, %by)
}

%is_less (t: (s32[], s32[])) -> pred[] {
  %t = (s32[], s32[]) parameter(0)
  %j = s32[] get-tuple-element(%t), index=0
  %end = s32[] constant(END)
  ROOT %lt = pred[] compare(%j, %end), direction=LT
}

ENTRY %main (x: s32[]) -> (s32[], s32[]) {
  %x = s32[] parameter(0)
  %from = s32[] constant(FROM)
  %copied = s32[] copy(%from)
  %step = s32[] constant(STEP)
  %begin = (s32[], s32[]) tuple(%copied, %step)
  ROOT %loop = (s32[], s32[]) while(%begin), condition=%is_less, body=%inner
}
"""


@pytest.mark.parametrize(
    "begin, end, step, trips",
    [(0, 5, 1, 5), (1, 20, 3, 7), (2, 11, 3, 3), (-2, 1, 1, 3), (5, 5, 1, 0), (9, 5, 1, 0), (0, 5, 0, None)],
)
def test_trips_that_the_compiler_does_not_tell_are_counted(begin, end, step, trips):
    def read_loop(text):
        for name, number in {"FROM": begin, "END": end, "STEP": step}.items():
            text = text.replace(f"({name})", f"({number})")
        return read(text).computations["main"].by_name["loop"].trips

    assert read_loop(COUNTS) == trips
    assert trips is None or trips == len(range(begin, end, step))
    # Loops that data end, that count otherwise, or whose step another iteration changes.
    for known, other in {
        "tuple(%copied, %step)": "tuple(%x, %step)",
        "constant(END)": "get-tuple-element(%t), index=0",
        "direction=LT": "direction=NE",
        "tuple(%next, %by)": "tuple(%next, %k)",
        "add(%k, %by)": "multiply(%k, %by)",
    }.items():
        assert read_loop(COUNTS.replace(known, other)) is None, other


def test_a_text_of_a_tpu_has_the_trips_of_its_scan_and_none_of_its_guard():
    """Which tell nothing of either; the scan is over five ticks, as ``make_texts`` makes it."""
    text = (Path(__file__).parent / "texts" / "v5e_ticks.hlo").read_text()
    assert "known_trip_count" not in text
    loops = {i.name: i.trips for c in read(text).computations.values() for i in c if i.opcode == "while"}
    assert loops == {"while.24": 5, "while.25": None}
