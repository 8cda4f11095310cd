"""What ``scripts/bench soak`` and ``replicas`` share: servers in processes of their own, and clients of them."""
