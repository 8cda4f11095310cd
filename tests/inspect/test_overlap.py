"""What hides behind what, in texts of real compilers and in small ones written by hand."""

import io
import itertools
import json
from pathlib import Path

import jax
import numpy as np
import pytest
import rich.console
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from dualpipe_jax import make_mesh
from dualpipe_jax.inspect import gpu_rates, overlap, products, read
from dualpipe_jax.inspect.collectives import collectives
from dualpipe_jax.inspect.rates import Rates, tpu_rates
from dualpipe_jax.inspect.scheduler import parse_statistics
from tests.inspect.by_hand import done, module, start, work

TEXTS = Path(__file__).parent / "texts"
H100_CLOCK = 1.83e9  # at which its matrix units reach 989 TFLOP/s
PAYLOAD = 8 << 20
"""Bytes of every exchange in the stored texts: 1024 tokens of width 4096 in bf16."""
RATES = Rates(collectives={"all-to-all": PAYLOAD / 400e3, "collective-permute": PAYLOAD / 300e3})


def report(name, rates=RATES, **options):
    return overlap((TEXTS / f"{name}.hlo").read_text(), rates, **options)


BYTE_A_CYCLE = Rates(collectives={"all-to-all": 1.0, "collective-permute": 1.0})
KIB = 1024


# ------------------------------------------------------------------------- texts that compilers wrote


def test_pair_on_v5e():
    found = report("v5e_pair")
    kinds = [(c.kind, c.form, c.direction, c.payload, c.group_size) for c in found.collectives]
    assert kinds == [
        ("all-to-all", "sync", "forward", PAYLOAD, 4),
        ("all-to-all", "async", "backward", PAYLOAD, 4),
        ("all-to-all", "async", "forward", PAYLOAD, 4),
        ("all-to-all", "async", "backward", PAYLOAD, 4),
        ("collective-permute", "async", "unknown", PAYLOAD, None),
    ]
    # Each of the three has one matrix product between, and the compiler's estimate of it stands in the text.
    assert [c.cycles_between for c in found.collectives] == [0, 271238, 271238, 278532, 271238 + 278532]
    assert [c.waits for c in found.collectives] == [400e3, 128762, 128762, 121468, 0]
    exposed = [400e3, 128762, 128762, 121468, 121468]
    assert [c.exposed for c in found.collectives] == exposed, "the last beside a wait"
    assert [c.opposite_matmuls for c in found.collectives] == [0, 1, 1, 0, 0]
    assert found.collectives[1].matmuls == {"forward": 1, "backward": 0, "unknown": 0}
    assert found.collectives[2].matmul_cycles == {"forward": 0, "backward": 271238, "unknown": 0}
    assert found.hidden() == pytest.approx(1 - (400e3 + 128762 * 2 + 121468) / 1600e3)
    assert found.hidden("collective-permute") == pytest.approx(1 - 121468 / found.collectives[-1].duration)
    main = found.computations["main.0_spmd"]
    assert main.work == 319296 + 3 * 271238 + 2 * 278532
    assert main.waits == 400e3 + 128762 * 2 + 121468
    assert main.unpriced == ("copy.11",)


def test_without_the_flag_every_exchange_on_v5e_is_exposed():
    found = report("v5e_sync")
    exchanges = found.select("all-to-all")
    assert [c.form for c in exchanges] == ["sync"] * 4
    assert found.hidden() == 0 and sum(c.exposed for c in exchanges) == 1600e3
    assert report("v5e_sync", rates=None).hidden() == 0, "known without any duration"


def test_sparse_core_pairs_on_v5p():
    exchanges = report("v5p_sparse_core").select("all-to-all")
    assert [(c.form, c.payload, c.group_size) for c in exchanges] == [("sparsecore", PAYLOAD, 4)] * 4
    assert [c.direction for c in exchanges] == ["forward", "backward", "forward", "backward"]
    assert [c.opposite_matmuls for c in exchanges] == [0, 1, 1, 0]


def test_h100_counts_matmuls_and_believes_is_sync():
    found = report("h100_pair", rates=None)
    exchanges = found.select("all-to-all")
    assert [c.form for c in exchanges] == ["sync", "async", "async", "async"]
    assert [c.direction for c in exchanges] == ["forward", "backward", "forward", "backward"]
    assert [c.opposite_matmuls for c in exchanges] == [0, 1, 1, 0]
    assert [c.hidden for c in exchanges] == [0, None, None, None]
    assert found.hidden() is None, "one is known to be exposed, of the others nothing is known"
    assert found.select("collective-permute")[0].matmuls["backward"] == 2


def test_h100_by_roofline():
    found = report("h100_pair", rates=gpu_rates("h100", published=True))
    product = 2 * 1024 * 4096 * 4096 / (989e12 / H100_CLOCK)
    exchange = PAYLOAD * 0.75 / (450e9 / H100_CLOCK)
    first, second, third, _ = found.select("all-to-all")
    assert second.duration == pytest.approx(exchange)
    assert second.matmul_cycles["forward"] == pytest.approx(product)
    assert second.exposed == 0 and first.exposed == pytest.approx(exchange) and third.hidden == 1
    main = found.computations["main.0_spmd"]
    assert main.unpriced == () and main.work == pytest.approx(6 * product), "bound by arithmetic throughout"


def test_send_around_a_guard():
    found = report("v5e_ticks")
    (send,) = found.collectives
    assert send.context == "main.6_spmd/while.24 body"
    (guard,) = [w for w in send.between if w.opcode == "while"]
    assert guard.matmuls == {"forward": 1} and guard.direction == "forward"
    body, tick = (found.computations[f"wide.region_{name}_spmd.sunk"] for name in ("1.1", "0.3"))
    assert found.computations["main.6_spmd"].cycles == pytest.approx(5 * tick.cycles, rel=0.01)
    assert guard.cycles == pytest.approx(body.cycles, rel=0.01) and body.cycles > 300e3
    idle = report("v5e_ticks", trips={"region_1": 0, ".": 5})  # the first that matches counts
    assert [w.cycles for w in idle.collectives[0].between if w.opcode == "while"] == [0]
    assert idle.collectives[0].exposed > 0
    tick = idle.computations["wide.region_0.3_spmd.sunk"].cycles
    assert idle.computations["main.6_spmd"].cycles == pytest.approx(5 * tick, rel=0.01)


def test_cpu_has_only_synchronous_ones():
    found = report("cpu_ticks", rates=None)
    assert [(c.kind, c.form, c.hidden) for c in found.collectives] == [("collective-permute", "sync", 0)]
    assert "ppermute" in str(found)


def test_the_schedulers_own_account_stands_beside():
    statistics = parse_statistics((TEXTS / "v5e_pair.log").read_text())
    found = report("v5e_pair", statistics=statistics)
    assert found.statistics["main.0_spmd"].after.wasted == {"all-to-all": 489058.0}
    assert found.hidden() == report("v5e_pair").hidden()
    assert "the scheduler's own account" in str(found)
    assert json.loads(found.to_json())["statistics"][0]["before"]["wasted"]


def test_rates_agree_with_the_scheduler():
    """It priced two all-to-alls and a permute when nothing stood between (log: before scheduling)."""
    before = parse_statistics((TEXTS / "v5e_pair.log").read_text())[0].before.wasted
    rates = tpu_rates("v5e:4x4")
    send = rates.collective("collective-permute", PAYLOAD, None)
    assert before["collective-permute"] == pytest.approx(send, rel=1e-3)
    assert before["all-to-all"] == pytest.approx(4 * rates.collective("all-to-all", PAYLOAD, 4), rel=1e-3)


# ------------------------------------------------------------------------------------ written by hand


def test_exposed_is_what_the_work_between_does_not_cover():
    text = module(start("a"), work("w", 400), done("a"), work("v", 100))
    (found,) = overlap(text, BYTE_A_CYCLE).collectives
    assert (found.duration, found.cycles_between, found.exposed) == (KIB, 400, KIB - 400)
    assert found.hidden == pytest.approx(400 / KIB)
    time = overlap(text, BYTE_A_CYCLE).computations["main"]
    assert (time.cycles, time.work, time.waits) == (KIB + 100, 500, KIB - 400)


def test_collectives_of_one_kind_share_their_links():
    both = module(start("a"), start("b"), work("w", 1500), done("a"), done("b"))
    found = overlap(both, BYTE_A_CYCLE)
    assert [c.exposed for c in found.collectives] == [0, 2 * KIB - 1500]
    b = "b", "collective-permute"
    other = module(start("a"), start(*b), work("w", 1500), done("a"), done(*b))
    assert [c.exposed for c in overlap(other, BYTE_A_CYCLE).collectives] == [0, 0]


def test_a_wait_for_another_collective_hides_nothing():
    text = module(start("a"), start("b", "collective-permute"), done("a"), done("b", "collective-permute"))
    found = overlap(text, BYTE_A_CYCLE)
    assert [(c.exposed, c.waits, c.hidden) for c in found.collectives] == [(KIB, KIB, 0), (KIB, 0, 0)]
    assert found.computations["main"].waits == KIB, "only once"


def test_of_a_flight_only_what_lies_beside_work_is_hidden():
    """By hand: a is in flight from 10 to 10 + K, b from 110 to 110 + K; the core waits for a from 310 on."""
    b, others = ("b", "collective-permute"), (work("w", 200), done("a"), work("x", 50))
    text = module(work("u", 10), start("a"), work("v", 100), start(*b), *others, done(*b))
    a, b = overlap(text, BYTE_A_CYCLE).collectives
    assert (a.exposed, a.waits) == (KIB - 300, KIB - 300)
    assert (b.exposed, b.waits) == (KIB - 250, 50)
    assert b.hidden == pytest.approx(250 / KIB)


WRAPPED = """
%wrapped (p: f32[256]) -> f32[256] {
  %p.2 = f32[256]{0} parameter(0)
  ROOT %inner = f32[256]{0} all-to-all(%p.2), replica_groups=[2,4]<=[8], metadata={op_name="transpose(jvp())/a2a"}
}
"""


@pytest.mark.parametrize("opcode", ["async", "call"])
def test_wrapped_collectives(opcode):
    thread = ", calls=%wrapped"
    if opcode == "call":
        thread = ', async_execution_thread="sparsecore", to_apply=%wrapped'
    shape, before, between = "((f32[256]{0}), f32[256]{0}, u32[])", work("before", 100), work("between", 300)
    first, second = (f"%s = {shape} {opcode}-start(%x){thread}", f"%u = {shape} {opcode}-update(%s){thread}")
    last = f"%d = f32[256]{{0}} {opcode}-done(%u){thread}"
    text = module(first, before, second, between, last, more=WRAPPED)
    (found,) = overlap(text, BYTE_A_CYCLE).collectives
    assert (found.kind, found.direction) == ("all-to-all", "backward")
    assert (found.payload, found.group_size) == (KIB, 4)
    if opcode == "call":
        assert found.form == "sparsecore" and found.cycles_between == 300, "it starts at the update"
    else:
        assert found.form == "async" and found.cycles_between == 400


def test_a_ragged_exchange_sends_its_first_operand():
    """As XLA:TPU writes it: it is also given the array to write into, and offsets and sizes."""
    sizes, into = "%n = s32[4]{0} constant({1, 1, 1, 1})", "%o = f32[64]{0} constant({...})"
    operands = "(%x, %o, %n, %n, %n, /*index=5*/%n)"
    exchange = f"%r = f32[64]{{0}} ragged-all-to-all{operands}, channel_id=1, replica_groups={{{{0,1,2,3}}}}"
    (found,) = overlap(module(sizes, into, exchange), BYTE_A_CYCLE).collectives
    assert (found.kind, found.form, found.payload) == ("ragged-all-to-all", "sync", KIB)


@pytest.mark.parametrize(
    "line",
    ["fusion(%x), kind=kLoop, calls=%gone", "conditional(%x, %x, %x), branch_computations={%gone, %lost}"],
)
def test_a_text_may_lack_what_it_calls(line):
    """Then the instruction reads its operands and writes its result: each f32[256], and one more at 1 byte a cycle."""
    parsed = read(module(f"%w = f32[256]{{0}} {line}"))
    found = overlap(parsed, Rates(memory=1.0))
    assert found.computations["main"].cycles == KIB * (line.count("%x") + 1)
    assert products(found, parsed, "main") == (0, 0)


def test_groups_of_devices():
    """As jax 0.10 has them written, and as 0.12 has."""
    sizes = {"{{0,1},{2,3},{4,5},{6,7}}": 2, "[2,4]<=[8]": 4, "[2,4]<=[4,2]T(1,0)": 4}
    sizes |= {"mesh['pp'=4,'ep'=2] {'ep'}": 2, "mesh['pp'=4,'ep'=2] {'pp','ep'}": 8}
    sizes |= {"mesh['x'=8] {'x':(1)2}": 2}
    for groups, size in sizes.items():
        text = module(start("a").replace("{{0,1,2,3},{4,5,6,7}}", groups), done("a"))
        assert [c.group_size for c in overlap(text, BYTE_A_CYCLE).collectives] == [size], groups


@pytest.mark.parametrize(
    "laid, second",
    [
        ("", (4, 5, 6, 7)),
        (", device_ids=([4,2]T(1,0))", (1, 3, 5, 7)),
        (", device_ids=(7,6,0,1,5,4,2,3)", (5, 4, 2, 3)),
    ],
)
def test_groups_of_a_mesh_have_its_devices(laid, second):
    """As XLA of jax 0.12 prints a mesh whose devices are not in order."""
    text = module(
        start("a").replace("{{0,1,2,3},{4,5,6,7}}", f"mesh['pp'=2,'ep'=4]{laid} {{'ep'}}"), done("a")
    )
    parsed = read(text)
    (pair,) = collectives(parsed, parsed.computations[parsed.entry])
    assert pair.groups is not None and pair.groups[1] == second


def test_groups_of_devices_are_read_from_what_this_jax_compiles():
    mesh = make_mesh(4, 2)
    spec = P(("pp", "ep"))
    work = lambda x: jax.lax.psum(jax.lax.all_to_all(x, "ep", 0, 0, tiled=True), "pp")  # noqa: E731
    exchanged = jax.shard_map(work, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    x = jax.device_put(np.zeros((64, 4), np.float32), NamedSharding(mesh, spec))
    found = overlap(read(jax.jit(exchanged).lower(x).compile()), BYTE_A_CYCLE).collectives
    assert {c.kind: c.group_size for c in found} == {"all-to-all": 2, "all-reduce": 4}


def test_a_done_elsewhere_leaves_it_open():
    (found,) = overlap(module(start("a"), work("w", 10)), BYTE_A_CYCLE).collectives
    assert found.exposed is None and found.hidden is None and found.cycles_between == 10


def test_a_wrapped_thing_that_is_no_collective_is_none():
    begun = "%s = ((f32[256]), f32[256], u32[]) async-start(%x), calls=%dot_fusion"
    text = module(begun, "%d = f32[256] async-done(%s)")
    assert not overlap(text).collectives
    assert str(overlap(text)) == "by_hand: no collectives"


def test_a_fusion_belongs_where_its_matmuls_do():
    text = module(start("a"), work("w", 10, "jvp()", ", calls=%dot_fusion"), work("v", 5, "jvp()"), done("a"))
    first, second = overlap(text).collectives[0].between
    assert (first.direction, first.matmuls) == ("backward", {"backward": 1})
    assert (second.direction, second.matmuls) == ("forward", {})


def test_directions_are_a_matter_of_patterns():
    text = module(start("a"), work("w", 10, "mine/back"), work("v", 10, "mine/there"), done("a"))
    assert [w.direction for w in overlap(text).collectives[0].between] == ["unknown", "unknown"]
    named = overlap(text, forward=["mine/there"], backward=["mine/back"]).collectives[0].between
    assert [w.direction for w in named] == ["backward", "forward"]
    assert not overlap(text, forward=[], backward=[]).collectives[0].opposite_matmuls


def test_kernels_that_count_as_matmuls():
    kernels = {"__cublas$gemm": 1, "tpu_custom_call": 1, "__gpu$xla.gpu.triton": 1, "Sharding": 0, "TopK": 0}
    for target, count in kernels.items():
        named = f'custom_call_target="{target}", metadata={{op_name="jit(f)/jvp()/k"}}'
        text = module(start("a"), f"%k = f32[256]{{0}} custom-call(%x), {named}", done("a"))
        (found,) = overlap(text).collectives
        assert found.matmuls["forward"] == count, target
        (found,) = overlap(text, matmul_calls=[]).collectives
        assert found.matmuls["forward"] == 0, target


def test_rates_price_kernels_and_copies():
    kernel = 'custom_call_target="tpu_custom_call", metadata={op_name="flash"}'
    call = f"%k = f32[256]{{0}} custom-call(%x), {kernel}"
    text = module(start("a"), call, "%c = f32[256]{0} copy(%k)", done("a"))
    assert overlap(text).collectives[0].cycles_between == 0
    priced = overlap(text, Rates(memory=2.0, kernels={"flash": 500.0})).collectives[0]
    assert [w.cycles for w in priced.between] == [500, 2 * KIB / 2]
    unknown = overlap(text, Rates(memory=2.0)).collectives[0]
    assert [w.cycles for w in unknown.between] == [None, 2 * KIB / 2]


def test_a_conditional_costs_its_longest_branch():
    branches = "".join(
        f"%{name} (p: f32[256]) -> f32[256] {{\n  %x = f32[256]{{0}} parameter(0)\n  ROOT {work('in_' + name, n)}\n}}\n"
        for name, n in {"short": 10, "long": 70}.items()
    )
    text = module("%c = f32[256] conditional(%x, %x, %x), branch_computations={%short, %long}", more=branches)
    found = overlap(text).computations
    assert found["main"].cycles == 70 and found["short"].cycles == 10
    assert found["long"].context == "main/c branch 1"


def test_waits_inside_a_branch_are_no_work():
    bodies = {"short": [work("v", 10)], "long": [start("a"), work("w", 24), done("a")]}
    branches = "".join(
        f"%{name} (p: f32[256]) -> f32[256] {{\n  %x = f32[256]{{0}} parameter(0)\n  "
        + "\n  ".join(lines)
        + "\n}\n"
        for name, lines in bodies.items()
    )
    text = module("%c = f32[256] conditional(%x, %x, %x), branch_computations={%short, %long}", more=branches)
    main = overlap(text, BYTE_A_CYCLE).computations["main"]
    assert (main.cycles, main.waits) == (KIB, KIB - 24)


def test_waits_inside_a_loop_are_no_work():
    lines = [start("a"), work("w", 24), done("a")]
    head = "%body (p: f32[256]) -> f32[256] {\n  %x = f32[256]{0} parameter(0)\n"
    body = head + "".join(f"  {li}\n" for li in lines) + "}\n"
    trips = 'backend_config={"known_trip_count":{"n":"3"}}'
    loop = f"%l = f32[256] while(%x), condition=%none, body=%body, {trips}"
    text = module(start("s", "collective-permute"), loop, done("s", "collective-permute"), more=body)
    found = overlap(text, BYTE_A_CYCLE)
    assert (found.computations["main"].cycles, found.computations["main"].waits) == (3 * KIB, 3 * (KIB - 24))
    send = found.select("collective-permute")[0]
    assert send.waits == 0 and send.cycles_between == 3 * 24
    once = "in its time the loop runs once: it works 24 cycles and waits"
    assert send.exposed == pytest.approx(KIB - 24), once
    assert found.select(within="l body") == found.select("all-to-all")
    assert found.hidden("all-to-all", within="l body") == pytest.approx(24 / KIB)
    assert found.hidden("all-gather") is None


def test_timeline_is_laid_end_to_end():
    text = module(work("v", 10), start("a"), work("w", 400, "transpose(jvp())"), done("a"), work("z", 5))
    found = overlap(text, BYTE_A_CYCLE)
    assert [(e.start, e.end, e.name, e.kind, e.direction, e.lane) for e in found.timeline("main")] == [
        (0, 10, "v", "fusion", "forward", "compute"),
        (10, 410, "w", "fusion", "backward", "compute"),
        (10, 10 + KIB, "a", "all-to-all", "unknown", "all-to-all"),
        (410, 10 + KIB, "a", "wait", "unknown", "compute"),
        (10 + KIB, 15 + KIB, "z", "fusion", "forward", "compute"),
    ]
    wait, told = found.timeline("main")[3], found.timeline("main")[0]
    assert (told.op_name, wait.op_name) == ("jit(f)/jvp()/mul", "") and not told.matmuls
    unknown = overlap(text).timeline("main")
    assert [(e.start, e.end) for e in unknown if e.lane == "all-to-all"] == [(10, 410)]
    with pytest.raises(KeyError, match="no computation 'maine'; there are main"):
        found.timeline("maine")


@pytest.mark.parametrize("path", sorted(TEXTS.glob("*.hlo")), ids=lambda path: path.stem)
def test_reports_hold_together(path):
    found = overlap(path.read_text(), RATES)
    values = json.loads(found.to_json())
    assert len(values["collectives"]) == len(found.collectives)
    for line in str(found).splitlines():
        assert line == line.rstrip()
    for name, time in found.computations.items():
        events = [e for e in found.timeline(name) if e.lane == "compute"]
        assert all(a.end == pytest.approx(b.start) for a, b in itertools.pairwise(events))
        assert time.cycles == pytest.approx(events[-1].end if events else 0)
        own = sum(c.waits for c in found.collectives if c.computation == name)
        loops = any(body_of == name for body_of, _ in read(path.read_text()).loops.values())
        assert time.waits >= own if loops else time.waits == own
        known = [c for c in found.inside(name) if c.exposed is not None]
        assert all(c.waits - 1e-6 <= c.exposed <= c.duration + 1e-6 for c in known)


def test_rich_prints_what_plain_text_says():
    found = report("v5e_pair")
    console = rich.console.Console(width=200, file=io.StringIO(), color_system=None)
    console.print(found)
    shown = console.file.getvalue()
    words = [word for word in shown.split() if set(word) != {"─"}]
    assert words == [word for word in str(found).split()[1:] if set(word) != {"-"}]
    console.print(overlap(module(work("w", 1))))
    assert "by_hand: no collectives" in console.file.getvalue()


def test_an_unscheduled_module_is_refused():
    text = module(work("w", 1)).replace(", is_scheduled=true", "")
    assert read(text).entry == "main"
    message = "by_hand is not scheduled, so the order of its lines says nothing; pass what"
    with pytest.raises(ValueError, match=message):
        overlap(text)


@pytest.mark.parametrize("name", ["forward", "backward", "matmul_calls"])
def test_one_text_is_not_taken_for_its_letters(name):
    message = f"overlap: {name} is the text 'scope'; give regular expressions, such as \\['scope'\\]"
    with pytest.raises(TypeError, match=message):
        overlap(module(work("w", 1)), **{name: "scope"})


def test_what_crosses_a_link():
    shares = {"all-to-all": (1.5, 0.75), "all-gather": (0.375, 0.75), "all-reduce": (0.75, 1.5)}
    for kind, (torus, switch) in (shares | {"collective-permute": (1, 1)}).items():
        assert Rates(link=2.0, latency=7).collective(kind, 4000, 4) == 7 + torus * 2000, kind
        assert Rates(link=2.0, switched=True).collective(kind, 4000, 4) == switch * 2000, kind


def test_an_unknown_tpu_is_refused_by_name():
    message = r"'v3:2x2' is none of v4, v5e, v5p, v6e, tpu7x; for other devices use Rates\(link="
    with pytest.raises(ValueError, match=message):
        tpu_rates("v3:2x2")
