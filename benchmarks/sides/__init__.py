"""The same blocks in PyTorch and in JAX, pipelined by each side's schedules: what `peers.py` times."""
