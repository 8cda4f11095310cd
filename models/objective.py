"""The tokens that a batch trains on: masks, documents, and the tokens ahead that multi-token prediction needs.

A batch is a dict of arrays [B, S]: "inputs" and "targets" (the next tokens), and where they are needed

- "segment_ids": int, the document of each input; documents packed into one sequence do not see each other;
- "positions": int, the position of each input in its document; without it positions count along S, which works as well;
- "mask": bool, whether each target counts in the losses; without it all count;
- "valid": bool, whether each input is a token and not padding; without it all are. Padding counts in no loss and no
  load;
- "mtp_weight": float [B], the factor of the multi-token prediction losses, if it changes during training.

Shape suffixes: B batch, S sequence.
"""

from typing import Any

import jax.numpy as jnp
from jax import Array

Batch = dict[str, Any]


def inputs_ahead(batch: Batch, depth: int) -> Array:
    """Return the tokens ``depth`` places ahead, [B, S]; 0 beyond the sequence."""
    return _ahead(batch["inputs"], depth)


def targets_ahead(batch: Batch, depth: int = 0) -> tuple[Array, Array]:
    """Return the targets ``depth`` places ahead, [B, S], and whether each counts, bool [B, S].

    A target counts if it counts in the model's own loss, and if the tokens from here to there are of one document.
    """
    targets_BS, live_BS = _ahead(batch["targets"], depth), live_tokens(batch, depth)
    return targets_BS, live_BS & _ahead(_flags(batch, "mask") & _flags(batch, "valid"), depth)


def live_tokens(batch: Batch, depth: int = 0) -> Array:
    """Return whether each token is not padding and has a token of its document ``depth`` places ahead, bool [B, S]."""
    here = _flags(batch, "valid")
    there = _ahead(here, depth)
    if "segment_ids" in batch:
        segments = batch["segment_ids"]
        there = there & (_ahead(segments, depth) == segments)
    return here & there


def num_counted(batch: Batch, depth: int = 0) -> Array:
    """Return the number of targets that count, float32 []."""
    return jnp.sum(targets_ahead(batch, depth)[1], dtype=jnp.float32)


def masked_mean(values_BS: Array, counted_BS: Array) -> Array:
    """Return the mean of the values that count; 0 if none counts."""
    total = jnp.sum(jnp.where(counted_BS, values_BS, 0))
    return total / jnp.maximum(jnp.sum(counted_BS, dtype=values_BS.dtype), 1)


def _flags(batch: Batch, name: str) -> Array:
    return batch[name].astype(bool) if name in batch else jnp.ones(batch["inputs"].shape, bool)


def _ahead(values_BS: Array, depth: int) -> Array:
    """Return the values ``depth`` places ahead, [B, S]; zeros beyond the sequence."""
    return jnp.pad(values_BS[:, depth:], ((0, 0), (0, min(depth, values_BS.shape[1]))))
