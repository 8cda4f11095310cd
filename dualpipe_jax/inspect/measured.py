"""Rates that were measured on real devices, in place of a compiler's or a data sheet's."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dualpipe_jax.inspect.rates import Rates


def measured_rates(file: str | Path, clock: float, *, switched: bool) -> Rates:
    """Rates from the file that ``dualpipe probe`` writes.

    The file has bytes and operations a second, programs are priced in cycles. Every instruction is priced by the
    measured rates of matrix products and of memory, also where the compiler has figures of its own; all-to-alls and
    permutes by their own rates, other collectives by links of the all-to-all's speed.

    Args:
      file: JSON with "rates": {"all-to-all": {"bytes_per_second", "latency", "devices"}, "permute":
        {"bytes_per_second", "latency"}, "memory", "flops"}, of which those will do that were measured.
      clock: hertz of the cycles.
      switched: whether links meet in a switch; see ``Rates``.

    Raises:
      ValueError: the file cannot be read, holds no rates, or ones that are no positive numbers.
    """
    rates = read_rates(file)
    exchange, permute = rates.get("all-to-all"), rates.get("permute")
    link, latency, collectives = None, 0.0, {}
    if exchange is not None:
        others = 1 - 1 / exchange["devices"]
        link = exchange["bytes_per_second"] * others * (1 if switched else 2) / clock
        latency = exchange["latency"] * clock
    if permute is not None:
        collectives["collective-permute"] = permute["bytes_per_second"] / clock
        latency = latency if exchange is not None else permute["latency"] * clock
    memory, flops = (rates[name] / clock if name in rates else None for name in ("memory", "flops"))
    return Rates(link, switched, collectives, latency, memory, flops, measured=True)


def read_rates(file: str | Path) -> Mapping[str, Any]:
    """The entry "rates" of the file, checked. Raises ValueError as ``measured_rates``."""
    try:
        entries = json.loads(Path(file).read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"--rates {file}: cannot read it: {error}") from None
    rates = entries.get("rates") if isinstance(entries, dict) else None
    if not isinstance(rates, dict) or not rates.keys() & {"all-to-all", "permute", "memory", "flops"}:
        raise ValueError(
            f"--rates {file}: no rates in it; `dualpipe probe` on the devices writes such a file"
        )
    for name, found in rates.items():
        numbers = {name: found} if name in _PLAIN else {}
        if name in _NUMBERS:
            if not isinstance(found, dict):
                wanted = ", ".join(_NUMBERS[name])
                raise ValueError(f"--rates {file}: {name} is {found!r}, must be an object with {wanted}")
            numbers = {f"{name}.{key}": found.get(key) for key in _NUMBERS[name]}
        for where, number in numbers.items():
            _check_number(where, number, file)
    return rates


_PLAIN = ("memory", "flops")
_NUMBERS: Mapping[str, tuple[str, ...]] = {
    "all-to-all": ("bytes_per_second", "latency", "devices"),
    "permute": ("bytes_per_second", "latency"),
}


def _check_number(where: str, number: Any, file: str | Path) -> None:
    name = where.rpartition(".")[2]
    least = 1 if name == "devices" else 0
    fits = type(number) in (int, float) and (number > least or (name == "latency" and number == 0))
    if not fits:
        words = f"from {least} on" if name == "latency" else f"above {least}"
        raise ValueError(f"--rates {file}: {where} is {number!r}, must be a number {words}")
