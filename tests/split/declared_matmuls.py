"""Matmuls that declare the two parts of their backward."""

import jax.numpy as jnp
from jax import lax

from dualpipe_jax.split import split_vjp


@split_vjp
def linear(x, w):
    """``x[..., D] @ w[D, F] -> [..., F]``."""
    return x @ w


def _linear_input(residuals, dy):
    _, w = residuals
    return lax.dot_general(dy, w, (((dy.ndim - 1,), (1,)), ((), ()))), dy


def _linear_weight(residuals, dy):
    x, _ = residuals
    rows = tuple(range(x.ndim - 1))
    return lax.dot_general(x, dy, ((rows, rows), ((), ())))


linear.defsplit(lambda x, w: (x @ w, (x, w)), _linear_input, _linear_weight)


@split_vjp
def grouped_matmul(x_ECD, w_EDF):
    """Each expert's tokens by its own matrix: ``[E, C, D], [E, D, F] -> [E, C, F]``."""
    return jnp.einsum("ecd,edf->ecf", x_ECD, w_EDF)


def _grouped_input(residuals, dy_ECF):
    _, w_EDF = residuals
    return jnp.einsum("ecf,edf->ecd", dy_ECF, w_EDF), dy_ECF


def _grouped_weight(residuals, dy_ECF):
    x_ECD, _ = residuals
    return jnp.einsum("ecd,ecf->edf", x_ECD, dy_ECF)


grouped_matmul.defsplit(lambda x, w: (grouped_matmul(x, w), (x, w)), _grouped_input, _grouped_weight)
