"""Placement of experts on devices by load: DeepSeek's load balancer, and a better one. Needs only Python and NumPy."""

from dualpipe_jax.balance.eplb import rebalance_experts
from dualpipe_jax.balance.outlook import Outlook, bound_of, is_due, outlook
from dualpipe_jax.balance.picture import plot
from dualpipe_jax.balance.placement import Layout, Placement
from dualpipe_jax.balance.solve import balance
from dualpipe_jax.balance.tracker import LoadTracker
from dualpipe_jax.balance.traffic import Copies, count_traffic, random_traffic

__all__ = [
    "Copies",
    "Layout",
    "LoadTracker",
    "Outlook",
    "Placement",
    "balance",
    "bound_of",
    "count_traffic",
    "is_due",
    "outlook",
    "plot",
    "random_traffic",
    "rebalance_experts",
]
