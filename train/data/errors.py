"""Errors about data."""


class DataError(ValueError):
    """Data that cannot be trained on; says which and why."""
