"""A user's program: small blocks over pp, without experts."""

import jax
import jax.numpy as jnp
import optax

from dualpipe_jax import Out, StagedModel
from dualpipe_jax.pods import Program, optimized_by

RATE = 0.1


def blocks(setting, dim=4, hidden=8, learns=1, deep=0):
    """``deep``: how many stages behind the first are of a kind of their own, which runs its block twice."""
    stages, plan = setting.schedule.placement.num_model_stages, setting.plan

    def run(own, x):
        return x + jnp.tanh(x @ own["up"].astype(x.dtype)) @ own["down"]

    def first(own, shared, x, at):
        return Out(run(own, at.batch["x"] + shared["bias"]))

    def middle(own, shared, x, at):
        return Out(run(own, x))

    def twice(own, shared, x, at):
        return Out(run(own, run(own, x)))

    def last(own, shared, x, at):
        return Out(losses={"square": jnp.mean((run(own, x) - at.batch["y"]) ** 2)})

    def shape(*dims):
        return jax.ShapeDtypeStruct(dims, jnp.float32)

    kinds = {"first": first, "middle": middle, "last": last}
    between = ["middle"] * (stages - 2)
    if deep:
        kinds = {"first": first, "middle_2": twice, "middle_1": middle, "last": last}
        between = ["middle_2"] * deep + ["middle_1"] * (stages - 2 - deep)
    tokens = shape(plan.num_microbatches, plan.batch, dim)
    return Program(
        StagedModel(kinds, ("first", *between, "last")),
        {
            "stages": {"up": shape(stages, dim, hidden), "down": shape(stages, hidden, dim)},
            "shared": {"bias": shape(dim)},
        },
        {"x": tokens, "y": tokens},
        tokens=plan.num_microbatches * plan.batch,
        flops=12.0 * dim * hidden * stages,
        update=optimized_by(optax.adam(RATE)) if learns else None,
    )


def forgets(setting):
    """Returns nothing."""


def fails(setting):
    raise TypeError("a mistake inside")


NUMBER = 3
