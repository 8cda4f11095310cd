"""Runs of the trainer and their records, for ``scripts/bench fp8``, ``rebalance`` and ``learning_rates``."""
