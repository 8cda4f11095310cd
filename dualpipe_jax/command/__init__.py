"""The `dualpipe` command: one module a subcommand, each a frozen dataclass of its options with a ``run``.

To add one, write such a dataclass in a module called as the subcommand, and name that in ``COMMANDS`` of ``__main__``.
Modules here import what starts fast (the schedules, tyro, rich in a terminal); what does not (matplotlib, scipy, JAX)
is imported in the function that needs it.
"""
