"""A layer of experts, as dispatch does it and as plain arithmetic does."""

import jax.numpy as jnp

from dualpipe_jax.parallel import combine, combine_product, dispatch, expert_matmul


def layer(x, w_in, w_out, weights, topk, make):
    handle = make(topk)
    hidden = jnp.tanh(expert_matmul(dispatch(x, handle), w_in, handle))
    return combine(expert_matmul(hidden, w_out, handle), weights, handle)


def fused_layer(x, w_in, w_out, weights, topk, make, matmul=expert_matmul):
    """The same, with the last product and its combining as one."""
    handle = make(topk)
    hidden = jnp.tanh(matmul(dispatch(x, handle), w_in, handle))
    return combine_product(hidden, w_out, weights, handle, matmul=matmul)


def layer_by_copies(x, w_in, w_out, weights, topk):
    """Every token with its own copy of its experts' matrices."""
    hidden = jnp.tanh(jnp.einsum("td,tkdf->tkf", x, jnp.asarray(w_in)[topk]))
    return jnp.einsum("tk,tkf,tkfd->td", weights, hidden, jnp.asarray(w_out)[topk])
