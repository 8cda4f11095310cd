"""How much a client may ask of a server."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class HttpLimits:
    """The limits of the server for a client; the engine's own limits are ``models.decode.Limits``.

    Attributes:
      max_bytes: the most bytes of a request's body.
      max_choices: the most texts that one request may ask for, prompts times ``n``.
      header_seconds: the seconds within which a request's headers must arrive.
      connections_per_address: the most connections that one address may hold at the same time.
      upload_seconds: the seconds within which a request's body must arrive.
      answer_seconds: the seconds that an answer may take, including the time in the queue.

    Raises:
      ValueError: a number is not positive.
    """

    max_bytes: int = 1 << 20
    max_choices: int = 16
    header_seconds: float = 10
    connections_per_address: int = 128
    upload_seconds: float = 10
    answer_seconds: float = 600

    def __post_init__(self) -> None:
        wrong = [f"{name} is {n}" for name, n in vars(self).items() if not n > 0]
        if wrong:
            raise ValueError(f"HttpLimits: {', '.join(wrong)}; must be positive.")
