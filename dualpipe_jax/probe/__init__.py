"""What works on the devices at hand, and how fast they are: to be run first on a real machine.

``dualpipe probe`` starts ``python -m dualpipe_jax.probe`` in a process of its own, for what is tried may hang.
"""
