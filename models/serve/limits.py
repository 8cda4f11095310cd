"""How much a client may ask of a server."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class HttpLimits:
    """What the server puts up with; the engine's own limits are ``models.decode.Limits``.

    Attributes:
      max_bytes: of a request's body.
      max_choices: texts that one request may ask for, prompts times ``n``.
      header_seconds: for a request's headers to arrive.
      connections_per_address: that one address may hold at the same time.
      upload_seconds: for a request's body to arrive.
      answer_seconds: for an answer, the waiting included.

    Raises:
      ValueError: a number that is not positive.
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
