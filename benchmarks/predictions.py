"""Predicted step time and MFU of DualPipe, DualPipeV, 1F1B and ZB-V on devices that are not here.

A prediction of the compiler's model (TPU) or a roofline (GPU), no measurement. For each target the units of each of the
four schedules are compiled (`dualpipe dryrun --compile units`), with a stage as deep as the schedule has it: half a
rank's layers on a V. Their cycles, and those of what stands beside them in a tick, make the step, in the engine's
ticks; what stands beside the ticks (pools cleared, the second copy of DualPipe's stages, reductions) is added. The last
column is what `choose` goes by: DualPipe's units alone, divided by two for a V.

    python benchmarks/predictions.py [TARGET ...] [--json FILE] [--from FILE ...]

A target whose compiler is not installed is skipped: run again with another environment's Python, `--from` the first
one's file. What is in such a file is not compiled anew. A compilation takes minutes.
"""

import argparse
import dataclasses
import json
import sys
from pathlib import Path

from bare_pair import CASES as NEAR_ONE

from dualpipe_jax.command.child import Died
from dualpipe_jax.command.overlap import study
from dualpipe_jax.inspect import MissingCompiler
from dualpipe_jax.pods.plain import filled, plain
from dualpipe_jax.pods.results import Answer
from dualpipe_jax.present.numbers import percent
from dualpipe_jax.present.table import Table
from dualpipe_jax.schedule.costs import stages_a_share
from dualpipe_jax.schedule.names import SCHEDULES

NAMES = ("dualpipe", "dualpipe_v", "one_f_one_b", "zb_v")
CASES = NEAR_ONE | {
    "h100:4x8": dataclasses.replace(NEAR_ONE["v5p:4x4x4"], ep=8, microbatch_size=16),
}
"""Programs as DualPipe runs them; nodes of the H100s are pipeline ranks."""


def program_of(target, name):
    """The target's program under a schedule: as many layers in all."""
    program = CASES[target]
    parts = stages_a_share(SCHEDULES[name](program.pp, 4 * program.pp).placement)
    return dataclasses.replace(program, schedule=name, layers_per_stage=int(program.layers_per_stage / parts))


def compile_all(targets, known, keep):
    """Compile what is not known, keeping each answer at once; why targets were skipped."""
    skipped = {}
    for target in targets:
        for name in NAMES:
            if name in known.get(target, {}):
                continue
            try:
                found = study(program_of(target, name), target, "units")
            except (MissingCompiler, Died) as error:
                skipped[target] = f"{name}: {error}" if isinstance(error, Died) else str(error)
                break
            known.setdefault(target, {})[name] = found
            keep(known)
    return skipped


def row(target, name, of_target):
    """A schedule's line of the table."""
    found, scaled = of_target.get(name), by_name(of_target.get("dualpipe")).get(name)
    other = f"{scaled.seconds:.4g} ({percent(scaled.mfu)})" if scaled and scaled.seconds else ""
    if found is None or found.memory is None:
        return target, f"{name}, not compiled", "", "", "", "", other
    gib = f"{found.memory.needed / 2**30:.1f} of {found.memory.limit / 2**30:.1f}"
    gib += "" if found.memory.fits else ", does not fit"
    if (step := found.step) is None:
        return target, name, "", "", "", gib, other
    seconds = total(found)
    mark = "**" if name == shortest(of_target) else ""
    more = step.overhead_cycles / (step.cycles + step.overhead_cycles)
    return (
        target,
        f"{mark}{name}{mark}",
        f"{'at least ' if step.lower_bound else ''}{seconds:.4g}",
        percent(step.mfu * step.seconds / seconds),
        percent(more),
        gib,
        other,
    )


def total(found):
    """Seconds of a step with all that is known of it."""
    step = found.step
    return step.seconds * (1 + step.overhead_cycles / step.cycles)


def by_name(found):
    """What `choose` goes by."""
    return {} if found is None or found.step is None else {each.name: each for each in found.step.schedules}


def shortest(of_target):
    """The schedule with the shortest step of those that fit; None as long as one is not compiled."""
    if not set(NAMES) <= of_target.keys():
        return None
    there = {name: total(f) for name, f in of_target.items() if f.memory.fits and f.step}
    return min(there, key=there.get, default=None)


def report(known):
    """The tables, as Markdown."""
    rows = [row(target, name, of) for target, of in known.items() for name in NAMES]
    head = ("target", "schedule", "step, s", "MFU", "beside ticks", "GiB", "by DualPipe's units, s (MFU)")
    lines = [
        "**A prediction of the compiler's model (H100: of a roofline), not a measurement.** Nothing ran on these",
        "devices. The optimizer's update is not in it. Bold: the shortest step that fits.\n",
        Table(head, tuple(rows)).markdown(),
        "",
    ]
    for target, of in known.items():
        ranked = [p for p in by_name(of.get("dualpipe")).values() if not p.refused]
        if ranked:
            first = ", ".join(f"`{p.name}` {p.seconds:.4g} s" for p in ranked[:3])
            lines.append(f"- {target}: from DualPipe's units `choose` ranks, of all that fit, {first} first.")
    return "\n".join([*lines, "", units(known)])


def units(known):
    """What the steps are made from."""
    names = ("F", "I", "W", "B", "FB", "head")
    rows = []
    for target, of in known.items():
        for name, found in of.items():
            there = found.compiled.units
            cells = (f"{there[unit].cycles / 1e6:.3f}" if unit in there else "" for unit in names)
            send = found.compiled.sends.each
            layers = found.program.layers_per_stage
            rows.append((target, name, str(layers), *cells, f"{send / 1e6:.3f}"))
    head = ("target", "schedule", "layers", *(f"{unit}, Mcycles" for unit in names), "send")
    return Table(head, tuple(rows)).markdown()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "targets", nargs="*", metavar="TARGET", help=f"of {', '.join(CASES)}; all if left out"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to keep what was compiled")
    parser.add_argument(
        "--from", type=Path, nargs="*", default=[], dest="files", metavar="FILE", help="such files"
    )
    given = parser.parse_args()
    if unknown := set(given.targets) - CASES.keys():
        parser.error(f"{', '.join(unknown)}: there are {', '.join(CASES)}")
    known = {}
    for file in given.files:
        for target, of_target in json.loads(file.read_text()).items():
            known[target] = known.get(target, {}) | {n: filled(Answer, f) for n, f in of_target.items()}

    def keep(known):
        if given.json:
            given.json.write_text(json.dumps(plain(known)))

    for target, why in compile_all(given.targets or CASES, known, keep).items():
        print(f"skipped {target}: {why}", file=sys.stderr)
    keep(known)
    print(report(known))


if __name__ == "__main__":
    main()
