"""The `dualpipe` command. Each subcommand has a module with a frozen dataclass of its options, which has a ``run``.

To add one, write such a dataclass in a module with the subcommand's name, and list that in ``COMMANDS`` of
``__main__``. Modules here import what starts fast (the schedules, tyro, rich in a terminal); what starts slowly
(matplotlib, scipy, JAX) is imported in the function that needs it.
"""
