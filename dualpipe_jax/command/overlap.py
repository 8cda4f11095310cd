"""`dualpipe overlap`: how much of the all-to-alls' time a target's compiler hides."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import tyro

from dualpipe_jax.command.explain import counted_totals, program_report
from dualpipe_jax.command.options import CommandError, Count, check_files
from dualpipe_jax.command.output import say_written, show, show_json
from dualpipe_jax.pods.plain import filled, plain
from dualpipe_jax.pods.plan import Plan, read_plan
from dualpipe_jax.pods.request import Request
from dualpipe_jax.pods.results import AllToAll, Answer, Compiled
from dualpipe_jax.present.numbers import format_cycles, percent
from dualpipe_jax.present.table import Table
from dualpipe_jax.schedule.lowering.unit_key import UnitKey

Files = Annotated[tuple[Path, ...], tyro.conf.arg(metavar="FILE ...", aliases=["-o"])]
"""The type of the option for files that a compiled program is written to."""

TargetName = Annotated[str, tyro.conf.arg(metavar="TARGET")]
"""The type of the option for the devices, which need not be here."""

RatesFile = Annotated[Path | None, tyro.conf.arg(name="rates", metavar="FILE")]
"""The type of the option for a file of measured rates."""

PlanFile = Annotated[Path | None, tyro.conf.arg(name="plan", metavar="FILE")]
"""The type of the option for a file that `dualpipe plan` wrote."""

_SERVING = "prefill", "decode"
_ENDINGS = ".svg", ".png", ".trace", ".hlo", ".txt"


@dataclasses.dataclass(frozen=True)
class Overlap:
    """Compile an overlapped pair for devices that are not here, and read what hides behind what. Exit status 1
    where too little is hidden. All times are the compiler's model, or a roofline where it has none (GPUs).

    dualpipe overlap --target v5e:4x4 --pp 4 --ep 4 --program v2-lite --layers-per-stage 1

    dualpipe overlap --target v5p:4x4x2 --what prefill

    dualpipe overlap --target v5p:2x2x2 --compiled FOLDER_OF_XLA_DUMP
    """

    COMMON: ClassVar = (
        "target", "program", "layers-per-stage", "set", "pp", "ep", "sequence", "dispatch", "capacity-factor", "what",
        "plan", "output",
    )  # fmt: skip

    target: TargetName
    """The devices: v5e:4x4 or v5p:8x8x16, likewise v4, v6e and tpu7x, or h100:NODESxGPUS,
    likewise a100, h200, b200 and gb200."""
    what: Literal["train", "prefill", "decode"] = "train"
    """train: an overlapped pair of a pipeline. prefill, decode: a step of serving in two microbatches, with
    the experts over all devices of the target. It has --layers-per-stage layers with experts (4 if left out),
    and --sequence is the length of the prompts, or of the context in decode."""
    requests: Count = None
    """Number of requests of a device, with --what prefill or decode. If left out, 16,384 tokens of prompts,
    or 128 requests in decode."""
    at_least: Annotated[float, tyro.conf.arg(metavar="PERCENT")] = 97.0
    """How much of the all-to-alls' time must be hidden; else the exit status is 1."""
    whole: bool = False
    """Compile the whole training step instead of one pair. This takes several times as long."""
    compiled: Annotated[Path | None, tyro.conf.arg(metavar="DUMP")] = None
    """Compile nothing, but read a program that was compiled for the target before, by whomever: its text, or a
    folder of XLA's --xla_dump_to with --xla_dump_hlo_as_text. Each exposed collective is explained."""
    output: Files = ()
    """Files to write. Their endings say what: .svg and .png are a picture of the pair's timeline, .trace is
    the same for Perfetto, .hlo and .txt are the compiled program's text."""
    rates_file: RatesFile = None
    """File of rates that `dualpipe probe` measured. Times follow from these instead of the compiler's
    figures."""
    json: bool = False
    """Print JSON, for programs."""
    plan_file: PlanFile = None
    """File that `dualpipe plan` wrote, which says --program and all options of the step."""
    plan: Annotated[Plan | None, tyro.conf.arg(name="step")] = None

    def run(self) -> int:
        if self.compiled is not None and (self.whole or self.plan_file or self.plan):
            raise CommandError("--compiled: that program is compiled already; drop --whole and its options")
        if not 0 <= self.at_least <= 100:
            raise CommandError(f"--at-least {self.at_least:g}: give a percentage, from 0 to 100")
        self._check_what()
        trained = "nothing" if self.compiled is not None else "step" if self.whole else "pair"
        what = trained if self.what == "train" else self.what
        request = Request(
            plan_of_options(self.plan, self.plan_file),
            self.target,
            what,
            tuple(map(str, self.output)),
            None if self.compiled is None else str(self.compiled),
            None if self.rates_file is None else str(self.rates_file),
            requests=self.requests,
        )
        found = ask_pods(request)
        compiled, target = found.compiled, found.target
        assert compiled is not None
        title = f"{name_of(found)} ({target.devices} devices)\n" if self.compiled is None else ""
        hidden = counted_totals(compiled).hidden
        enough = hidden is not None and 100 * hidden >= self.at_least
        if self.json:
            show_json(plain(found) | {"at_least": self.at_least / 100, "enough": enough})
        elif compiled.out_of_memory is not None:
            show(title, "does not fit:", compiled.out_of_memory)
        elif compiled.what == "text":
            own = _sentences(compiled, self.at_least, enough)[1:] if compiled.units else []  # one of ours
            pairs: list[str | Table] = [collectives_table(compiled), "", *own, ""] if own else []
            show(*pairs, *program_report(compiled, target.name, self.at_least, enough))
        else:
            rest = _sentences(compiled, self.at_least, enough)
            show(title, collectives_table(compiled), "", *dispatch_words(found), *rest)
        return 0 if enough else 1

    def _check_what(self) -> None:
        """Refuse options of a pipeline with serving, and options of serving with a pipeline."""
        if self.what == "train":
            if self.requests is not None:
                raise CommandError(
                    "--requests: a pair has none; add --what prefill or --what decode, or drop it"
                )
            return
        asked, usual = self.plan or Plan(), Plan()
        fixed = ["dp", "pp", "ep", "ep_nodes", "schedule", "stages_per_rank", "max_stash", "microbatches"]
        fixed += ["microbatch_size", "remat", "shard", "moments", "gradient_sums", "stage_layers"]
        given = [name for name in fixed if getattr(asked, name) != getattr(usual, name)]
        given += [name for name in ("whole", "compiled") if getattr(self, name)]
        given += ["plan"] if self.plan_file else []
        if given:
            options = ", ".join(f"--{name.replace('_', '-')}" for name in given)
            raise CommandError(
                f"--what {self.what}: experts lie over all of the target, and nothing is trained; drop {options}"
            )


def plan_of_options(given: Plan | None, file: Path | None) -> Plan:
    """The plan in a file if one is named, else the plan of the options; ``given`` is None if there are no such options.

    Raises:
      CommandError: both are given.
      ValueError: the file holds no plan.
    """
    if file is None:
        return given or Plan()
    if given is not None:
        raise CommandError(f"--plan {file}: says all of the program; drop its options")
    return read_plan(file)


def ask_pods(request: Request, title: str | None = None) -> Answer:
    """Ask ``dualpipe_jax.pods`` in a child process; ``title`` is the name of the work in lines about its progress.

    Raises:
      ValueError, ModuleNotFoundError: the request cannot be met; the compiler or matplotlib is not installed.
      ChildDied: the compiler ended its process.
    """
    from dualpipe_jax.command.child import ask
    from dualpipe_jax.inspect.measured import read_rates
    from dualpipe_jax.inspect.target import Target

    target, compile, files = request.target, request.compile, tuple(map(Path, request.files))
    if files and compile == "nothing" and request.compiled is None:
        raise CommandError(
            "--output: nothing is compiled, so there is nothing to write; drop it or --compile"
        )
    if request.compiled is not None and not Path(request.compiled).exists():
        raise CommandError(f"--compiled {request.compiled}: there is no such file or folder")
    for file in files:
        if file.suffix.lower() not in _ENDINGS:
            raise CommandError(f"--output {file}: cannot tell what to write; end it in {', '.join(_ENDINGS)}")
    check_files(*files)
    if request.rates is not None:
        read_rates(Path(request.rates))
    known = Target.parse(target)
    _check_timed(known, request)
    environment = {"JAX_PLATFORMS": "cpu", **known.environment}
    rates = None if request.rates is None else str(Path(request.rates).absolute())
    request = dataclasses.replace(request, files=tuple(str(file.absolute()) for file in files), rates=rates)
    called = title or target
    if compile != "nothing":
        try:
            known.check_compiler()
        except ModuleNotFoundError:
            # Errors in the options are found without a compiler, and are reported first.
            counted = dataclasses.replace(request, compile="draw", files=())
            if compile not in _SERVING:
                ask("dualpipe_jax.pods", plain(counted), environment, called)
            raise
    answer = filled(Answer, ask("dualpipe_jax.pods", plain(request), environment, called))
    if answer.compiled is not None and answer.compiled.out_of_memory is None:
        say_written(*files)
    return answer


def _check_timed(target: Any, request: Request) -> None:
    """Refuse options that do not apply to CPU devices, whose units are run and timed: no program's text is read."""
    if target.platform != "cpu":
        return
    given = {"--output": bool(request.files), "--rates": request.rates is not None}
    if request.compile not in ("nothing", "units"):
        raise CommandError(
            f"--target {target}: on CPU nothing overlaps, and a whole step is run by scripts/train; its units are "
            "timed by `dualpipe plan` and `dualpipe dryrun --compile units`"
        )
    if wrong := [name for name, there in given.items() if there]:
        raise CommandError(
            f"--target {target}: its units are run and timed, not read; drop {', '.join(wrong)}"
        )


def collectives_table(compiled: Compiled) -> Table:
    """A table of the all-to-alls in the order of the program: times in cycles, payloads in MiB of a device."""
    columns: dict[str, Callable[[AllToAll], str]] = {
        "all-to-all": lambda row: row.name,
        "of": lambda row: row.direction or "",
        "form": lambda row: row.form,
        "MiB": lambda row: f"{row.payload / 2**20:.1f}",
        "takes": lambda row: format_cycles(row.duration),
        "exposed": lambda row: format_cycles(row.exposed),
        "hidden": lambda row: percent(row.hidden),
        "matmuls of the other": lambda row: str(row.opposite_matmuls),
    }
    return Table.of(columns, compiled.all_to_alls)


def units_table(compiled: Compiled) -> Table:
    """A table of units: their cycles, and the ratio of these to the larger and to the sum of their two parts."""
    head = ("unit", "cycles", "computation", "communication", "exposed", "over the larger", "over the sum")
    rows = [
        (
            str(key),
            *map(format_cycles, (unit.cycles, unit.computation, unit.communication, unit.exposed)),
            *("" if ratio is None else f"{ratio:.3f}" for ratio in (unit.over_limit, unit.over_sum)),
        )
        for key, unit in compiled.units.items()
    ]
    return Table(head, tuple(rows))


def sent_words(compiled: Compiled) -> str:
    """The data that a device sends in all-to-alls, and their number, in words."""
    total = sum(row.payload for row in compiled.all_to_alls)
    return f"sent: {total / 2**20:.1f} MiB of a device in {len(compiled.all_to_alls)} all-to-alls"


def exposed_sends_words(compiled: Compiled) -> str:
    """The cycles of a tick's sends that the work of its unit is too short to hide, by kind of unit, in words."""
    beside = (
        f"{format_cycles(cycles)} beside {name or 'no unit'}"
        for name, cycles in compiled.sends_exposed.items()
    )
    return f"sends of a tick: {format_cycles(compiled.sends.cycles)}; exposed {', '.join(beside)}"


def name_of(found: Answer) -> str:
    """The plan and the target in words."""
    plan, target = found.program, found.target
    assert plan is not None
    if found.compiled is not None and found.compiled.what in _SERVING:
        how = "two microbatches" if plan.overlap else "one microbatch"
        return f"{plan.model}, {found.compiled.what} in {how}, ep {plan.ep} on {target.name}"
    return f"{plan.model}, {plan.schedule_in_words}, {plan.layout} on {target.name}"


def dispatch_words(found: Answer) -> list[str]:
    """How tokens reach experts, and the share of them that is dropped, in words; empty where that is unknown."""
    plan = found.program
    if plan is None or found.dropped is None:
        return []
    if plan.room is None:
        return ["dispatch: dropless"]
    whose = "an expert" if plan.dispatch == "capacity" else "two devices"
    return [
        f"dispatch: {plan.dispatch}, room for {plan.room:g} x an even load of {whose}; "
        f"{100 * found.dropped:.2g} % of the assignments dropped under uniform routing"
    ]


def _sentences(compiled: Compiled, at_least: float, enough: bool) -> list[str]:
    totals, sends = counted_totals(compiled), compiled.sends
    copied = [copy for copy in compiled.copies if copy.of_state]
    hidden = "an unknown share" if totals.hidden is None else percent(totals.hidden)
    lines = [
        f"hidden: {hidden} of {format_cycles(totals.cycles)} cycles of all-to-all "
        f"({'enough' if enough else 'too little'}: {at_least:g} % asked for)",
        sent_words(compiled),
    ]
    if compiled.followed is not None:
        all_hidden = compiled.all_to_all.hidden
        share = "unknown" if all_hidden is None else percent(all_hidden)
        lines.insert(1, f"that is without the last one, behind which the model goes on; with it: {share}")
    else:
        lines.append(
            f"sends: {sends.count} in flight beside it, {format_cycles(sends.exposed)} of "
            f"{format_cycles(sends.cycles)} exposed, {format_cycles(sends.waits)} waited for"
        )
        lines += [exposed_sends_words(compiled)] if compiled.sends_exposed else []
    # In a text it is unknown which arrays are slots, sums and parameters.
    if compiled.what != "text":
        lines.append(f"copies of slots, sums or parameters in a loop: {len(copied) or 'none'}")
        lines += [f"  {copy.array} {copy.op_name}" for copy in copied[:8]]
    for op, name in {"FB": "pair", **{what: what for what in _SERVING}}.items():
        if (pair := compiled.units.get(UnitKey(op))) is None:
            continue
        apart = f" ({pair.computation / pair.communication:.2f} : 1)" if pair.communication else ""
        lines.append(
            f"{name}: {format_cycles(pair.cycles)} cycles, {pair.over_limit:.3f} of the larger of its computation "
            f"and its communication{apart}, {pair.over_sum:.3f} of their sum"
            + (f"; a lower bound, {pair.unpriced} instructions have no price" if pair.unpriced else "")
        )
    return lines
