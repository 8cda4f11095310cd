"""Errors about data."""


class DataError(ValueError):
    """Data that cannot be trained on. The message says which and why."""
