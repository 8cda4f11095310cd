"""How a run may end that was well begun. No JAX here: the command line names these before it is loaded."""


class DivergedError(RuntimeError):
    """The loss is no longer a number."""
