"""Results of experiments in words, and as a file of rates. No JAX is imported: the parent process must never hang."""

import dataclasses
import statistics
from collections.abc import Iterator, Mapping
from typing import Any, Literal

Form = Literal["loop", "switch", "none"]

GUARD_FORMS: tuple[Form, ...] = ("loop", "switch")
"""Forms of guards in which ranks diverge."""

FORMS: tuple[Form, ...] = (*GUARD_FORMS, "none")

TRIALS = {
    "guard": "work in a {} that only some ranks take",
    "all-to-all": "an all-to-all of one group in such a {}",
    "permute-beside": "a late permute of all ranks beside such a {}",
    "units": "all units of the engine, compared with plain JAX",
}
"""The trials that each form has to pass, in order. Without guards ("none") only ``units`` is tried."""

PERMUTE_INSIDE = "permute-inside"
"""An experiment that is run only on request: the engine does not need what it tries."""

MEASURES = {
    "cost-loop": "a tick's guards, as loops",
    "cost-switch": "a tick's guards, as one conditional",
    "rate-all-to-all": "all-to-all within a group",
    "rate-permute": "permute to the next rank",
    "rate-matmul": "matrix product",
    "rate-products": "matrix products by size",
    "rate-attention": "causal attention",
    "rate-grouped": "products of unequal groups",
    "rate-copy": "copy, read plus written",
    "layer": "units of a plain layer",
    "repeats": "a step run again, compared bit for bit",
    "repeats-in-order": "the same where XLA is told to sum in order",
}

REPEATS_IN_ORDER = "repeats-in-order"
"""An experiment that runs in a process of its own, because XLA reads its flags once."""

REPEATS = ("repeats", REPEATS_IN_ORDER)

DEFAULT_EXPERIMENTS = (
    *(f"{trial}-{form}" for form in GUARD_FORMS for trial in [*TRIALS][:3]),
    *(f"units-{form}" for form in FORMS),
    *MEASURES,
)
"""Names of the experiments that are run by default, in order."""

_FORM_NAMES = {"loop": "loop of zero or one trips", "switch": "conditional"}
_SLOW_SHARE = 0.7
"""A group is reported as slow if its rate is below this share of the median of all groups."""


@dataclasses.dataclass(frozen=True)
class Recommendation:
    """The setting to use, and why.

    Attributes:
      divergence: the setting of ``Pipeline(divergence=...)``; None if none works, or too little was tried to tell.
      told: whether enough was tried to tell.
      sentences: why, and what else is worth knowing.
    """

    divergence: str | None
    told: bool
    sentences: tuple[str, ...]


def title(name: str) -> str:
    if name in MEASURES:
        return MEASURES[name]
    if name == PERMUTE_INSIDE:
        return "a permute in a loop that only some ranks take"
    trial, _, form = name.rpartition("-")
    ways = {"loop": "in loops", "switch": "in one conditional", "none": "in lockstep"}
    return f"{TRIALS[trial]}, {ways[form]}" if trial == "units" else TRIALS[trial].format(_FORM_NAMES[form])


def outcome(result: Mapping[str, Any]) -> str:
    if "skipped" in result:
        return f"not tried: {result['skipped']}"
    if "why" in result:
        return str(result["why"])
    if "ok" in result:
        return "works"
    if "flops_per_second" in result:
        return _flops(result["flops_per_second"])
    if "products" in result:
        parts = (f"{_flops(one['flops_per_second'])} at {one['width']}" for one in result["products"])
        return ", ".join(parts)
    if "forward" in result:
        return f"F {_flops(result['forward'])}, B {_flops(result['backward'])}"
    if "bytes_per_second" in result:
        latency = f", {_time(result['latency'])} each" if result.get("latency") else ""
        return f"{result['bytes_per_second'] / 1e9:.3g} GB/s{latency}"
    if "differ" in result:
        return _repeats_in_words(result)
    if "skipped_seconds" in result:
        return (
            f"{_time(result['skipped_seconds'])} with none taken, {_time(result['taken_seconds'])} with one"
        )
    return ", ".join(f"{unit} {_time(result[unit])}" for unit in ("F", "B", "I", "W", "FB"))


def _flops(rate: float) -> str:
    return f"{rate / 1e12:.3g} TFLOP/s"


def _repeats_in_words(result: Mapping[str, Any]) -> str:
    if not result["differ"]:
        return f"the same in {result['runs']} runs"
    return f"differs in {len(result['differ'])} of {result['leaves']} arrays: {', '.join(result['differ'])}"


def recommend(results: Mapping[str, Mapping[str, Any]], usual: Form) -> Recommendation:
    """The setting to use: ``usual``, the engine's default on these devices, if it works, else the next that does."""
    order = (usual, *(form for form in FORMS if form != usual))
    states = {form: passes(results, form) for form in FORMS}
    setting = next((form for form in order if states[form]), None)
    told = setting is not None or False in states.values()
    return Recommendation(setting, told, tuple(_sentences(results, setting, states, usual)))


def passes(results: Mapping[str, Mapping[str, Any]], form: str) -> bool | None:
    """Whether a form passed its trials; None if none of them failed, and the last, the units, was not run."""
    found = [results.get(f"{trial}-{form}", {}).get("ok") for trial in TRIALS]
    return False if False in found else found[-1]


def _sentences(
    results: Mapping[str, Mapping[str, Any]],
    setting: str | None,
    states: Mapping[Form, bool | None],
    usual: Form,
) -> Iterator[str]:
    broken = [form for form in GUARD_FORMS if states[form] is False]
    if setting is None and False in states.values():
        yield "Nothing works that was tried: look at the reasons above before you train here."
    elif setting is None:
        yield "Too little was tried to name a setting: that takes the experiments whose names begin with units."
    elif setting == "none":
        yield (
            'Use Pipeline(..., divergence="none"): ranks may not part ways here. Every rank then runs every unit at '
            "every tick; docs/how_it_works.md says what that costs."
        )
    else:
        default = ", which is the default here" if setting == usual else ""
        yield f'Use Pipeline(..., divergence="{setting}"){default}: ranks may part ways in a {_FORM_NAMES[setting]}.'
    if broken and setting not in (None, "none"):
        yield f"Not in a {' nor in a '.join(_FORM_NAMES[form] for form in broken)}."
    lone = {
        result["skipped"] for name, result in results.items() if name not in MEASURES and "skipped" in result
    }
    yield from (f"Of ranks that part ways nothing was learnt ({why})." for why in sorted(lone))
    yield from _cheaper_guards(results, setting)
    loose, in_order = (results.get(name, {}).get("differ") for name in REPEATS)
    if loose:
        known = {
            True: "with scripts/train --deterministic, too, so a resumed run will not repeat what a whole one does",
            False: "with scripts/train --deterministic it does not",
            None: f"the experiment {REPEATS_IN_ORDER} tells whether XLA can be told not to",
        }
        yield f"Run again, a step differs in its last bits; {known[None if in_order is None else bool(in_order)]}."
    for name in ("rate-all-to-all", "rate-permute"):
        yield from _slow_links(MEASURES[name], results.get(name, {}).get("by_group", {}))


def _cheaper_guards(results: Mapping[str, Mapping[str, Any]], setting: str | None) -> Iterator[str]:
    other = {"loop": "switch", "switch": "loop"}.get(setting or "")
    own, less = (results.get(f"cost-{form}", {}).get("taken_seconds") for form in (setting, other))
    if own is not None and less is not None and less < own / 2:
        yield (
            f'Guards of the form "{other}" take {_time(own - less)} less a tick; if ticks are '
            "short, try it, for what it does to pools decides as well."
        )


def _slow_links(what: str, by_group: Mapping[str, float]) -> Iterator[str]:
    if len(by_group) > 2:
        usual = statistics.median(by_group.values())
        slow = [
            f"{group} {rate / usual:.0%}" for group, rate in by_group.items() if rate < _SLOW_SHARE * usual
        ]
        if slow:
            yield f"Slow links, in the median of all groups, {what}: {', '.join(slow)}."


_RATES: Mapping[str, tuple[str, str | tuple[str, ...]]] = {
    "all-to-all": ("rate-all-to-all", ("bytes_per_second", "latency", "devices")),
    "permute": ("rate-permute", ("bytes_per_second", "latency")),
    "memory": ("rate-copy", "bytes_per_second"),
    "flops": ("rate-matmul", "flops_per_second"),
    "grouped": ("rate-grouped", "flops_per_second"),
    "products": ("rate-products", "products"),
    "attention": ("rate-attention", ("forward", "backward")),
}
"""For each rate in the file, the experiment that measures it, and the keys of its result that are kept.

A single key keeps its figure alone, several are kept with their keys.
"""


def rates_file(found: Mapping[str, Any], divergence: str | None) -> dict[str, Any]:
    """The file that ``dualpipe overlap`` and ``dryrun`` read as --rates, ``choose`` and ``search`` as --costs.

    "rates" are bytes a second ("all-to-all" and "permute", each with its latency in seconds; "memory"), operations a
    second ("flops" of a large product; "products", each with its size in operations; "attention", with "forward" and
    "backward"; "grouped"), and seconds ("guards"). "costs" are the times of ``layer`` in milliseconds.
    """
    results = {name: result for name, result in found["results"].items() if "ok" not in result}
    rates: dict[str, Any] = {}
    for name, (experiment, kept) in _RATES.items():
        result = results.get(experiment, {})
        if isinstance(kept, str) and kept in result:
            rates[name] = result[kept]
        elif not isinstance(kept, str) and kept[0] in result:
            rates[name] = {key: result[key] for key in kept}
    guards = {form: results[f"cost-{form}"] for form in GUARD_FORMS if f"cost-{form}" in results}
    if guards:
        rates["guards"] = guards
    layer = results.get("layer", {})
    more: dict[str, Any] = {}
    if "F" in layer:
        more = {"costs": _costs(layer, rates.get("permute")), "units": {"time": "ms"}, "of": layer["of"]}
    return {"made_by": "dualpipe probe", **found, "divergence": divergence, "rates": rates, **more}


def _costs(layer: Mapping[str, Any], permute: Mapping[str, float] | None) -> dict[str, float]:
    send = 0.0
    if permute is not None:
        send = permute["latency"] + layer["boundary_bytes"] / permute["bytes_per_second"]
    seconds = {unit: layer[unit] for unit in ("F", "I", "W", "FB")} | {"send": send}
    return {unit: 1e3 * time for unit, time in seconds.items()}


def _time(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"
