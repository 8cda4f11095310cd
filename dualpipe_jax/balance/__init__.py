"""Which device holds which experts: DeepSeek's load balancer, and a better one, with Python and NumPy alone."""

from dualpipe_jax.balance.eplb import rebalance_experts
from dualpipe_jax.balance.outlook import Outlook, bound_of, is_due, outlook, worst_imbalance
from dualpipe_jax.balance.picture import plot
from dualpipe_jax.balance.placement import Layout, Placement
from dualpipe_jax.balance.solve import balance
from dualpipe_jax.balance.tracker import LoadTracker

__all__ = [
    "Layout",
    "LoadTracker",
    "Outlook",
    "Placement",
    "balance",
    "bound_of",
    "is_due",
    "outlook",
    "plot",
    "rebalance_experts",
    "worst_imbalance",
]
