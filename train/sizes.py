"""Models by name, and how many parameters they have."""

import dataclasses
import difflib
from collections.abc import Mapping

import models


def size(
    name: str, num_layers: int | None = None, changes: Mapping[str, float] | None = None
) -> models.Config:
    """The numbers of a model.

    Arguments:
      name: of ``models.MODELS``.
      num_layers: layers with experts, instead of its own.
      changes: other fields of ``models.Config``, such as {"dim": 2048}.

    Raises:
      ValueError: there is no such model or field.
    """
    if name not in models.MODELS:
        near = difflib.get_close_matches(name, models.MODELS, n=1, cutoff=0.4)
        meant = f"did you mean {near[0]}? " if near else ""
        raise ValueError(f"model {name!r}: {meant}there are {', '.join(models.MODELS)}")
    numbers = models.MODELS[name]()
    given = dict(changes or {})
    fields = {
        field.name for field in dataclasses.fields(numbers) if field.type in (int, float, "int", "float")
    }
    if unknown := given.keys() - fields:
        raise ValueError(
            f"model {name}: no number {', '.join(sorted(unknown))}; there are {', '.join(sorted(fields))}"
        )
    if num_layers is not None:
        dense = int(given.get("num_dense_layers", numbers.num_dense_layers))
        given["num_layers"] = num_layers + dense
    return dataclasses.replace(numbers, **given)  # type: ignore[arg-type]
