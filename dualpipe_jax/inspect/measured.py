"""Rates that were measured on real devices, in place of those of a compiler or a data sheet."""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dualpipe_jax.inspect.rates import Rates, gpu_kernels


def measured_rates(file: str | Path, clock: float, *, switched: bool) -> Rates:
    """Return the rates of a file that ``dualpipe probe`` writes.

    The file has bytes and operations per second; programs are priced in cycles. Every instruction is priced by the
    measured rates of matrix products and of memory, even if the compiler has figures of its own: products by the rate
    that was reached at their size; cuDNN's attention and the grouped products of ``parallel.mosaic`` by their own
    rates, or like other products if those were not measured. All-to-alls and permutes are priced by their own rates,
    other collectives by links with the speed of the all-to-all.

    Args:
      file: JSON with "rates": {"all-to-all": {"bytes_per_second", "latency", "devices"}, "permute":
        {"bytes_per_second", "latency"}, "memory", "flops", "products": [{"size", "flops_per_second"}, ...],
        "attention": {"forward", "backward"}, "grouped", "guards": {form: {"taken_seconds"}}}. Entries that were not
        measured may be missing. Units are bytes and operations per second, and seconds; the size of a product is in
        operations.
      clock: the hertz of the cycles.
      switched: whether links meet in a switch; see ``Rates``.

    Raises:
      ValueError: if the file cannot be read or holds no rates, or if a rate is not a positive, finite number (a latency
        and the time of guards may be 0), or if two products have the same size.
    """
    rates = read_rates(file)
    exchange, permute = rates.get("all-to-all"), rates.get("permute")
    link, latency, collectives, latencies = None, 0.0, {}, {}
    if exchange is not None:
        others = 1 - 1 / exchange["devices"]
        link = exchange["bytes_per_second"] * others * (1 if switched else 2) / clock
        latency = exchange["latency"] * clock
    if permute is not None:
        collectives["collective-permute"] = permute["bytes_per_second"] / clock
        latencies["collective-permute"] = permute["latency"] * clock
    memory, flops = (rates[name] / clock if name in rates else None for name in ("memory", "flops"))
    products = sorted((one["size"], one["flops_per_second"] / clock) for one in rates.get("products", ()))
    attention = rates.get("attention", {})
    kernels = [
        None if rate is None else rate / clock
        for rate in (attention.get("forward"), attention.get("backward"), rates.get("grouped"))
    ]
    return Rates(
        link,
        switched,
        collectives,
        latency,
        memory,
        products[-1][1] if products and flops is None else flops,
        tuple(products),
        latencies=latencies,
        kernel_flops=gpu_kernels(*kernels),
        measured=True,
    )


def read_rates(file: str | Path) -> Mapping[str, Any]:
    """Return the checked entry "rates" of the file. Raises ValueError like ``measured_rates``."""
    try:
        entries = json.loads(Path(file).read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"--rates {file}: cannot read it: {error}") from None
    rates = entries.get("rates") if isinstance(entries, dict) else None
    if not isinstance(rates, dict) or not rates.keys() & {*_SCALARS, *_OBJECT_FIELDS, _PRODUCTS}:
        raise ValueError(
            f"--rates {file}: no rates in it; `dualpipe probe` on the devices writes such a file"
        )
    for name, found in rates.items():
        for where, number in _entry_numbers(name, found, file):
            _check_number(where, number, file)
    return rates


def _entry_numbers(name: str, found: Any, file: str | Path) -> Iterator[tuple[str, Any]]:
    """Yield the path and value of each number that an entry must hold; nothing for an entry that is not read."""
    if name in _SCALARS:
        yield name, found
    elif name in _OBJECT_FIELDS:
        if not isinstance(found, dict):
            wanted = ", ".join(_OBJECT_FIELDS[name])
            raise ValueError(f"--rates {file}: {name} is {found!r}, must be an object with {wanted}")
        yield from ((f"{name}.{key}", found.get(key)) for key in _OBJECT_FIELDS[name])
    elif name == _PRODUCTS:
        if not (isinstance(found, list) and found and all(isinstance(one, dict) for one in found)):
            wanted = "a list of objects with size, flops_per_second"
            raise ValueError(f"--rates {file}: products is {found!r}, must be {wanted}")
        sizes = [one.get("size") for one in found]
        if twice := [size for place, size in enumerate(sizes) if size in sizes[:place]]:
            raise ValueError(f"--rates {file}: products has size {twice[0]!r} twice; leave one of them")
        for place, one in enumerate(found):
            yield from ((f"products[{place}].{key}", one.get(key)) for key in ("size", "flops_per_second"))
    elif name == _GUARDS:
        if not (isinstance(found, dict) and all(isinstance(one, dict) for one in found.values())):
            wanted = "an object with an object with taken_seconds for each form"
            raise ValueError(f"--rates {file}: guards is {found!r}, must be {wanted}")
        yield from ((f"guards.{form}.taken_seconds", one.get("taken_seconds")) for form, one in found.items())


_GUARDS = "guards"
_PRODUCTS = "products"
_SCALARS = ("memory", "flops", "grouped")
_OBJECT_FIELDS: Mapping[str, tuple[str, ...]] = {
    "all-to-all": ("bytes_per_second", "latency", "devices"),
    "permute": ("bytes_per_second", "latency"),
    "attention": ("forward", "backward"),
}


def _check_number(where: str, number: Any, file: str | Path) -> None:
    name = where.rpartition(".")[2]
    least = 1 if name == "devices" else 0
    may_be_zero = name in ("latency", "taken_seconds")
    fits = type(number) in (int, float) and (least < number < math.inf or (may_be_zero and number == 0))
    if not fits:
        words = f"from {least} on" if may_be_zero else f"above {least}"
        raise ValueError(f"--rates {file}: {where} is {number!r}, must be a number {words}")
