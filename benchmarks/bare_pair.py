"""What guards, slot pools and sends cost a pair, by the compiler's model of devices that are not here.

Three programs are compiled for each target. The engine's pair, as `dualpipe overlap` reads it. And twice the bare
pair: the same stage's forward of one microbatch and full backward of another in one function, residuals and gradients
plain arguments and results; no ticks, guards, slots, sends or sums of gradients. Once in our own order
(`interleave`), once in the compiler's.

    python benchmarks/bare_pair.py [--target v5e:4x4 [options of `dualpipe overlap`]]

Without a target: all of CASES. A target of CASES brings its program along, unless options say another.
"""

import dataclasses

import tyro

from dualpipe_jax.command.output import show
from dualpipe_jax.command.overlap import study
from dualpipe_jax.pods.plan import Plan
from dualpipe_jax.pods.results import Compiled
from dualpipe_jax.present.numbers import percent
from dualpipe_jax.present.table import Table
from dualpipe_jax.schedule.lowering.unit_key import UnitKey

_V2_LITE = Plan("v2-lite", layers_per_stage=2, sequence=2048, dispatch="capacity", capacity_factor=1.0)
_CHANGE = ("num_dense_layers=0", "num_shared_experts=1", "vocab=1024", "top_k=8")
CASES = {
    "v5p:4x4x4": dataclasses.replace(
        _V2_LITE, ep=16, microbatch_size=32, set=(*_CHANGE, "num_experts=64", "expert_hidden=1152")
    ),
    "v5e:4x4": dataclasses.replace(
        _V2_LITE, microbatch_size=8, set=(*_CHANGE, "num_experts=32", "expert_hidden=512", "num_heads=8")
    ),
}
"""Near 1 : 1 of computation and communication, where it is hardest."""

PAIR = UnitKey("FB")
FORMS = {
    "pair": "the engine's",
    "bare_ordered": "bare, our order",
    "bare": "bare, the compiler's order",
}


@dataclasses.dataclass(frozen=True)
class Options:
    """The engine's pair against the bare one."""

    target: str | None = None
    """Devices, see `dualpipe overlap`; all of CASES if left out."""
    plan: Plan = dataclasses.field(default_factory=Plan)


def report(target: str, plan: Plan) -> None:
    """Compile the three and print the table."""
    found = {form: study(plan, target, form).compiled for form in FORMS}
    rows = tuple((title, *cells(found[form], found["pair"])) for form, title in FORMS.items())
    head = ("pair", "Mcycles", "computation", "communication", "hidden", "over the larger", "engine over it")
    show(f"\n{plan.model}, pp {plan.pp} x ep {plan.ep} on {target}\n", Table(head, rows))
    for form, title in FORMS.items():
        if found[form].out_of_memory:
            show(f"\n{title}: refused, {found[form].out_of_memory[:300]}")


def cells(compiled: Compiled, engine: Compiled) -> tuple[str, ...]:
    """A pair's figures; empty where its compiler refuses it."""
    if compiled.out_of_memory or engine.out_of_memory:
        return ("",) * 6
    pair, whole = compiled.units[PAIR], engine.units[PAIR]
    parts = (f"{(part or 0) / 1e6:.3f}" for part in (pair.cycles, pair.computation, pair.communication))
    ratios = (f"{number:.3f}" for number in (pair.over_limit, whole.cycles / pair.cycles))
    return *parts, percent(compiled.all_to_all.hidden), *ratios


def main() -> None:
    given = tyro.cli(Options, config=(tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff))
    for target in [given.target] if given.target else CASES:
        report(target, CASES.get(target, given.plan) if given.plan == Plan() else given.plan)


if __name__ == "__main__":
    main()
