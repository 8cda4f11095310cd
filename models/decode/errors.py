"""What is wrong with a request; nobody else's fails with it."""


class RequestError(ValueError):
    """A request that cannot be served: says what was given, what is needed and what to do."""
