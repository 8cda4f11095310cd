"""The model as one device sees it: each kind of stage traced and split.

Values that depend on parameters alone are taken out of the stage functions (``split.hoist``).
"""

from typing import Any, NamedTuple

import jax

from dualpipe_jax.contract import At, StagedModel, Tree
from dualpipe_jax.engine import checks
from dualpipe_jax.engine.kinds import ForwardKind, Kind, raw_stage, with_dropped_count
from dualpipe_jax.engine.prepared import Prepared
from dualpipe_jax.engine.trees import Vary, raw, raw_zeros, sum_dtype, zeros
from dualpipe_jax.schedule import Placement
from dualpipe_jax.split import hoist


class TracedModel(NamedTuple):
    """A model's kinds of stages.

    Attributes:
      kinds: the kinds in the order of the table's numbers. The first and the last stage have kinds of their
        own, even if the model uses the same kind inside.
      prepared: the values that kinds compute from parameters alone.
      boundary: types of the value between two stages, keys as integers; None if there is only one stage.
      result: types of the x that the last stage returns, keys typed.
    """

    kinds: list[ForwardKind]
    prepared: Prepared
    boundary: Tree
    result: Tree


def trace(
    model: StagedModel,
    params: tuple[Tree, Tree],
    at: At,
    placement: Placement,
    vary: Vary,
    wanted: tuple[tuple[Tree, Tree], At] | None,
    sums: tuple[Tree, Tree, Any] | None,
) -> TracedModel:
    """Trace each kind of stage, inside shard_map.

    Arguments:
      params: types of one stage's own and of the shared parameters, as the stage sees them.
      at: types of the stage's ``At``.
      wanted: for each leaf of params and of ``at`` whether it has a gradient; None for a forward-only
        program.
      sums: own and shared parameters as they are stored, and the dtype in which gradients are summed (None:
        see ``sum_dtype``), if products are to output gradients in that dtype; else None.
    """
    last = model.num_stages - 1
    x, boundary = None, None
    if last:
        first = model.kinds[model.kind_of[0]]
        x = jax.eval_shape(
            lambda own, shared, at: checks.call_stage(model.kind_of[0], first, own, shared, None, at).x,
            *params,
            at,
        )
        boundary = jax.eval_shape(raw, x)
    result = checks.check_kinds(model, *params, x, at, trains=wanted is not None)
    stages = [(name, k == 0, k == last) for k, name in enumerate(model.kind_of)]
    names = sorted(set(stages), key=stages.index)
    given = [None if is_first else x for _, is_first, _ in names]
    seen = [vary(raw_zeros((x, at))) for x in given]
    functions = [
        with_dropped_count(
            raw_stage(name, model.kinds[name], params, (x, at), vary),
            vary(raw_zeros(params)),
            sees,
        )
        for (name, _, _), x, sees in zip(names, given, seen, strict=True)
    ]
    hoisted = [hoist(f, vary(raw_zeros(params)), s) for f, s in zip(functions, seen, strict=True)]
    trained = jax.tree.map(lambda _: False, params) if wanted is None else wanted[0]
    prepared = Prepared(hoisted, tuple(map(names.index, stages)), placement, vary, trained)
    own, shared = raw_zeros(params)
    arguments = vary(((own, zeros(prepared.types)), shared))
    sums_in = None if sums is None else _sum_dtypes(*sums, prepared)
    kinds: list[ForwardKind] = []
    for number, (name, _, is_last) in enumerate(names):
        stage = name, prepared.function(number), arguments, seen[number]
        if wanted is None:
            kinds.append(ForwardKind(*stage))
        else:
            of_params = (trained[0], prepared.wanted), trained[1]
            kinds.append(Kind(*stage, is_last=is_last, wanted=(of_params, (True, wanted[1])), sums=sums_in))
    return TracedModel(kinds, prepared, boundary, result)


def _sum_dtypes(own: Tree, shared: Tree, dtype: Any, prepared: Prepared) -> list[Any]:
    return [sum_dtype(leaf.dtype, dtype) for leaf in jax.tree.leaves((own, prepared.types, shared))]
