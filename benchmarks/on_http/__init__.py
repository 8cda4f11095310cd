"""The common parts of ``scripts/bench soak`` and ``replicas``: servers in processes of their own, and their clients."""
