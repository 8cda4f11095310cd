"""The XLA option that says which matrix products YNNPACK computes on a CPU."""

YNNPACK = "xla_cpu_experimental_ynn_fusion_type"
"""The option's name. The empty text as its value turns YNNPACK off. Not every version of XLA knows the option."""
