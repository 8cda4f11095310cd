"""Why a collective is exposed, in small programs written by hand; what no order comes below, against all orders."""

import itertools

import numpy as np
import pytest

from dualpipe_jax.inspect import overlap, read
from dualpipe_jax.inspect.dump import find_program
from dualpipe_jax.inspect.exposure import Dependence
from dualpipe_jax.inspect.rates import Rates
from tests.inspect.by_hand import done, module, start

BYTE_A_CYCLE = Rates(collectives={"all-to-all": 1.0})
FLIGHT = 1024
"""Cycles of every exchange here: of a f32[256]."""


def of(name, cycles, *needs, more=""):
    """Work that reads what others made, or the program's argument."""
    operands = ", ".join(f"%{one}" for one in needs or ["x"])
    more += (
        f', metadata={{op_name="jit(f)/layer/{name}/mul"}}, backend_config={{"estimated_cycles":"{cycles}"}}'
    )
    return f"%{name} = f32[256]{{0}} fusion({operands}){more}"


def explained(*lines, more=""):
    return overlap(module(*lines, more=more), BYTE_A_CYCLE).exposures


def test_work_that_was_put_elsewhere():
    (found,) = explained(
        *(
            of("early", 300),
            start("a"),
            of("beside", 100),
            done("a"),
            of("reads", 50, "a.done"),
            of("late", 600),
        )
    )
    assert (found.cause, found.collective.exposed) == ("order", FLIGHT - 100)
    assert found.elsewhere == 300 + 600 and found.gain == 900
    assert [(piece.name, piece.cycles) for piece in found.could] == [("late", 600), ("early", 300)]
    assert str(found) == (
        "a (all-to-all, 1 KiB): 924 of 1.02 k cycles exposed. The scheduler's order: 900 cycles of work that neither "
        "feeds it nor reads it stand before its start or behind its done (late (600, layer/late/mul), early (300, "
        "layer/early/mul)), and 100 of work between."
    )


def test_all_work_makes_or_reads_what_is_sent():
    """Directly, through others, or because the compiler says that it must wait."""
    waits = of("waits", 900, more=", control-predecessors={%a.done}")
    lines = of("makes", 500), of("more", 10, "makes"), start("a", after="more"), done("a")
    (found,) = explained(*lines, of("reads", 400, "a.done"), of("reads_that", 300, "reads"), waits)
    assert (found.cause, found.elsewhere, found.gain, found.could) == ("dependence", 0, 0, ())
    assert found.why == "Dependence: all other work feeds it or reads it, or stands between already."
    (found,) = explained(*lines, of("reads", 400, "a.done"), of("other", 100))
    assert (found.cause, found.gain) == ("dependence", 100)
    assert (
        "What else there is could hide 9.8 % of what is exposed: other (100, layer/other/mul)." in found.why
    )


@pytest.mark.parametrize(
    "number, cause, words",
    [
        (
            30,
            "order",
            "1.20 k cycles of work that neither feeds it nor reads it stand before its start or behind its done (w0 ",
        ),
        (5, "dependence", "What else there is could hide 19.6 % of what is exposed: w0 "),
        (1, "dependence", "all other work feeds it or reads it"),
    ],
)
def test_the_largest_of_many_small_pieces_is_named(number, cause, words):
    """Each is under a twentieth of what is exposed; it was said of 30 of them that all work feeds it or reads it."""
    pieces = [of(f"w{k}", 41 if not k and number > 1 else 40) for k in range(number)]
    (found,) = explained(start("a"), done("a"), *pieces)
    assert (found.cause, len(found.could)) == (cause, int(number > 1)) and words in found.why
    (found,) = explained("%a = f32[256]{0} all-to-all(%x), replica_groups={{0,1,2,3}}", *pieces)
    assert ("nothing could run beside it" in found.why) == (number == 1)


def test_one_waits_for_another_of_its_kind():
    (found,) = explained(start("a"), start("b"), of("beside", 1500), done("a"), done("b"))
    assert (found.collective.name, found.cause, found.queued) == ("b", "link", FLIGHT)
    assert found.collective.exposed == 2 * FLIGHT - 1500
    assert "another all-to-all was running for 1.02 k cycles after its start" in found.why


def test_synchronous_ones():
    at_once = "%a = f32[256]{0} all-to-all(%{}), replica_groups={{0,1,2,3}}"
    (found,) = explained(at_once.replace("{}", "x"), of("free", 700), of("reads", 300, "a"))
    assert (found.cause, found.collective.exposed, found.elsewhere) == ("synchronous", FLIGHT, 700)
    assert "the compiler lets the core wait, although there are 700 cycles of work" in found.why
    (found,) = explained(of("makes", 700), at_once.replace("{}", "makes"), of("reads", 300, "a"))
    assert found.why.endswith("all work feeds it or reads it: nothing could run beside it.")


def test_what_costs_most_stands_first():
    """A loop's own as often as it runs; work outside of the loop does not help."""
    body = "\n".join(["%body (p: f32[256]) -> f32[256] {", "  %x = f32[256]{0} parameter(0)"])
    body += "\n  " + "\n  ".join([start("b"), done("b"), of("reads", 800, "b.done")]) + "\n}\n"
    loop = "%w = f32[256]{0} while(%x), condition=%c, body=%body"
    loop += ', backend_config={"known_trip_count":{"n":"3"}}'
    first, second = explained(
        start("a"), of("beside", 24), done("a"), loop, of("last", 10, "w", "a.done"), more=body
    )
    assert (first.collective.name, first.times, first.lost) == ("b", 3, 3 * FLIGHT)
    assert first.cause == "dependence" and "all other work of the loop's body" in first.why
    assert (second.collective.name, second.times, second.lost) == ("a", 1, 1000)
    assert (second.cause, second.elsewhere) == ("order", 3 * 800), "a loop is work, its waits are not"


def test_of_a_loop_in_a_loop_each_round_counts():
    def body(name, *lines):
        return (
            "\n  ".join([f"%{name} (x: f32[256]) -> f32[256] {{", "%x = f32[256]{0} parameter(0)", *lines])
            + "\n}\n"
        )

    def loop(name, trips):
        known = f'backend_config={{"known_trip_count":{{"n":"{trips}"}}}}'
        return f"%w.{name} = f32[256]{{0}} while(%x), condition=%none, body=%{name}, {known}"

    more = body("inner", start("b"), done("b")) + body("outer", loop("inner", 2))
    (found,) = explained(loop("outer", 3), more=more)
    assert (found.collective.name, found.times, found.lost) == ("b", 6, 6 * FLIGHT)


def graph(rng, works):
    """Works that read earlier ones, a send and what comes back: name -> (cycles, names that it needs)."""
    found = {}
    for number in range(works):
        before = [name for name in found if rng.random() < 0.4]
        found[f"w{number}"] = int(rng.integers(100, 900)), before
        if number == works // 2:
            found["a"] = None, [f"w{rng.integers(number + 1)}"]
            found["a.done"] = None, ["a"]
    found["last"] = 1, [name for name in found if name != "a"]
    return found


def written(found, order):
    lines = {"a": start("a", after=found["a"][1][0]), "a.done": done("a")}
    return module(*(lines.get(name) or of(name, found[name][0], *found[name][1]) for name in order))


def orders(found):
    inner = [name for name in found if name != "last"]
    for order in itertools.permutations(inner):
        place = {name: at for at, name in enumerate(order)}
        if all(place[one] < place[name] for name in inner for one in found[name][1]):
            yield *order, "last"


@pytest.mark.parametrize("seed", range(6))
def test_no_order_is_shorter_than_is_said(seed):
    """All orders of small programs, laid end to end; for some of them the least is reached."""
    found = graph(np.random.default_rng(seed), 5)
    times = []
    for order in orders(found):
        main = overlap(written(found, order), BYTE_A_CYCLE).computations["main"]
        times.append((main.cycles, main.least))
    (least,) = {least for _, least in times}
    assert len(times) > 5 and min(cycles for cycles, _ in times) >= least
    paths = {}
    for name in found:  # the longest chain, and all work
        cycles, needs = found[name]
        longest = max((paths[one] for one in needs), default=0)
        paths[name] = longest + (FLIGHT if name == "a.done" else cycles or 0)
    work = sum(cycles or 0 for cycles, _ in found.values())
    assert least == max(*paths.values(), work, FLIGHT)


def test_in_any_order_collectives_of_one_kind_take_turns():
    """Neither waits for the other, and there is little work: only their link is busy all the time."""
    text = module(start("a"), start("b"), of("w", 100), done("a"), done("b"))
    main = overlap(text, BYTE_A_CYCLE).computations["main"]
    assert main.least == main.cycles == 2 * FLIGHT


@pytest.mark.parametrize("seed", range(4))
def test_what_is_related_is_the_closure(seed):
    found = graph(np.random.default_rng(seed), 6)
    (main,) = (c for c in read(written(found, found)).computations.values() if c.name == "main")
    at, dependence = main.position, Dependence(main)
    needs = np.eye(len(at), dtype=bool)
    for name in found:
        needs[at[name], [at[one] for one in found[name][1] or ["x"]]] = True
    closure = np.linalg.matrix_power(needs.astype(int), len(at)) > 0
    for name in found:
        wanted = set(np.flatnonzero(closure[at[name]] | closure[:, at[name]]).tolist())
        assert dependence.related(at[name]) == wanted


def test_a_program_is_found_among_dumped_files(tmp_path):
    """The one that communicates most, at the last point at which it was written."""
    sends = module(start("a"), done("a"))
    for name, text in {
        "module_0000.jit_small.cl_9.after_codegen.txt": module(of("w", 1)),
        "module_0001.jit_step.cl_9.after_optimizations.txt": sends,
        "module_0001.jit_step.cl_9.after_codegen.txt": sends,
        "module_0001.jit_step.cl_9.after_optimizations-buffer-assignment.txt": "BufferAssignment:",
        "module_0001.jit_step.cl_9.before_optimizations.txt": sends * 2,
        "module_0002.jit_seed.cpu_after_optimizations.txt": module(),
        "module_0003.jit_other.sm_9.0a_gpu_after_optimizations.txt": module(of("w", 1), of("v", 1)),
    }.items():
        (tmp_path / name).write_text(text)
    file, others = find_program(tmp_path)
    assert file.name == "module_0001.jit_step.cl_9.after_codegen.txt"
    assert [other.name.split(".")[1] for other in others] == ["jit_other", "jit_small", "jit_seed"]
    assert find_program(file) == (file, [])


def test_a_folder_without_a_program_is_told_with_what_to_do(tmp_path):
    (tmp_path / "module_0000.jit_f.after_codegen.hlo.pb").write_bytes(b"")
    with pytest.raises(
        ValueError, match=r"in this folder's 1 files; compile with XLA_FLAGS=.*--xla_dump_hlo_as_text"
    ):
        find_program(tmp_path)
