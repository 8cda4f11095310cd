"""Test what works on this machine's devices, and how fast they are. Run it first on a real machine.

``dualpipe probe`` starts ``python -m dualpipe_jax.probe`` in a process of its own, because an experiment may hang.
"""
