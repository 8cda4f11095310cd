"""The common part of ``scripts/bench fp8``, ``rebalance`` and ``learning_rates``: runs of the trainer, and their records."""
