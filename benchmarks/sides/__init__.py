"""The two sides that `peers.py` times: the same blocks in PyTorch and in JAX, pipelined by each side's schedules."""
