"""All experiments by name. The names are listed in ``findings``, which imports no JAX."""

import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from dualpipe_jax.engine.guard import usual_divergence
from dualpipe_jax.inspect.compiler import IN_ORDER
from dualpipe_jax.probe import diverging, layer, parts, timing, units
from dualpipe_jax.probe.diverging import why_no_groups, why_no_ranks
from dualpipe_jax.probe.findings import FORMS, GUARD_FORMS, PERMUTE_INSIDE, REPEATS, TRIALS
from dualpipe_jax.probe.place import Place
from dualpipe_jax.worker import say

Experiment = Callable[[Place], dict[str, Any]]


def _trial(works: Callable[[Place], str], *needs: Callable[[Place], str]) -> Experiment:
    """An experiment with the result {"ok": True} or {"ok": False, "why": ...}; {"skipped": why} if a need is unmet."""

    def run(place: Place) -> dict[str, Any]:
        wrong = works(place)
        return {"ok": False, "why": wrong} if wrong else {"ok": True}

    return _skip_unless(run, *needs)


def _skip_unless(experiment: Experiment, *needs: Callable[[Place], str]) -> Experiment:
    def run(place: Place) -> dict[str, Any]:
        lacking = [why for need in needs if (why := need(place))]
        return {"skipped": lacking[0]} if lacking else experiment(place)

    return run


def _trials() -> Iterator[tuple[str, Experiment]]:
    for form in GUARD_FORMS:
        of = functools.partial(diverging.diverging, form=form)
        guard, exchange, beside, _ = (f"{trial}-{form}" for trial in TRIALS)
        yield guard, _trial(of, why_no_ranks)
        yield exchange, _trial(functools.partial(of, exchange=True), why_no_ranks, why_no_groups)
        yield beside, _trial(functools.partial(of, exchange=True, beside=True), why_no_ranks, why_no_groups)
    for form in FORMS:
        yield f"units-{form}", _trial(functools.partial(units.check_units, form=form))
    yield PERMUTE_INSIDE, _trial(diverging.permute_inside, why_no_ranks, why_no_groups)


EXPERIMENTS: Mapping[str, Experiment] = {
    **dict(_trials()),
    **{f"cost-{form}": functools.partial(timing.guards, form=form) for form in GUARD_FORMS},
    "rate-all-to-all": _skip_unless(timing.all_to_alls, why_no_groups),
    "rate-permute": _skip_unless(timing.permutes, why_no_ranks),
    "rate-matmul": timing.matmuls,
    "rate-products": parts.products,
    "rate-attention": parts.attention,
    "rate-grouped": parts.grouped,
    "rate-copy": timing.copies,
    "layer": layer.layer,
    **dict.fromkeys(REPEATS, units.repeats),
}


def experiment(asked: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Run the experiments that are asked for, one after another.

    Yields {"devices": ..., "results": {name: ...}}, first without results and then after each experiment.
    """
    # XLA reads its flags when it first looks for devices.
    if asked.get("sums_in_order"):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {IN_ORDER}"
    if several := asked.get("processes"):
        # The coordinator binds to the processes' common address alone, because it trusts whoever reaches it.
        address = several["coordinator"]
        jax.distributed.initialize(
            address,
            several["count"],
            several["number"],
            cluster_detection_method="deactivate",
            coordinator_bind_address=address if several["number"] == 0 else None,
        )
    place = Place.make(asked["pp"], asked["ep"])
    found: dict[str, Any] = {"devices": describe(place), "results": {}}
    yield found
    names: Sequence[str] = asked["experiments"]
    for name in names:
        say(name)
        try:
            found["results"][name] = EXPERIMENTS[name](place)
        # Any error is a finding about these devices.
        except Exception as error:
            words = str(error).strip().splitlines() or [""]
            found["results"][name] = {"ok": False, "why": f"{type(error).__name__}: {words[0][:300]}"}
        yield found


def describe(place: Place) -> dict[str, Any]:
    device = place.mesh.devices.flat[0]
    return {
        "platform": device.platform,
        "kind": device.device_kind,
        "number": place.mesh.size,
        "processes": jax.process_count(),
        "pp": place.pp,
        "ep": place.ep,
        "jax": jax.__version__,
        "usual_divergence": usual_divergence(device.platform),
    }
