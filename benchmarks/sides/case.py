"""The computation that is timed: blocks, their weights and the batch, as NumPy arrays for either framework."""

import dataclasses
import json
import math

import numpy as np

BLOCKS = ("mlp", "moe")
Weights = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Case:
    """A stack of residual blocks with a mean squared error at the end, cut into stages over ranks.

    The block "mlp" is x + silu(norm(x) up) down. In "moe" each expert computes the same; each token goes to
    its `top` likeliest experts, weighted with their probabilities. An expert takes tokens in their order, up
    to its `capacity`. Written with one-hot masks and einsums, as in GShard (arXiv 2006.16668). All experts
    are on each rank.
    """

    block: str = "mlp"
    ranks: int = 2
    microbatches: int = 16
    layers: int = 8
    size: int = 2
    sequence: int = 64
    width: int = 256
    hidden: int = 1024
    experts: int = 8
    top: int = 2
    expert_hidden: int = 512
    capacity_factor: float = 1.25

    @property
    def tokens(self) -> int:
        """The number of tokens of a microbatch."""
        return self.size * self.sequence

    @property
    def capacity(self) -> int:
        """The most tokens of a microbatch that an expert takes."""
        return math.ceil(self.capacity_factor * self.tokens * self.top / self.experts)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of one layer's weights."""
        if self.block == "mlp":
            return {"norm": (self.width,), "up": (self.width, self.hidden), "down": (self.hidden, self.width)}
        up, down = (self.width, self.expert_hidden), (self.expert_hidden, self.width)
        router = (self.width, self.experts)
        return {
            "norm": (self.width,),
            "router": router,
            "up": (self.experts, *up),
            "down": (self.experts, *down),
        }

    def weights(self) -> Weights:
        """The weights, float32 leaves [layers, ...], the same in every process."""
        random = np.random.default_rng(0)

        def leaf(name: str, shape: tuple[int, ...]) -> np.ndarray:
            drawn = random.standard_normal((self.layers, *shape))
            return (1 + 0.1 * drawn if name == "norm" else drawn / math.sqrt(shape[-2])).astype(np.float32)

        return {name: leaf(name, shape) for name, shape in self.shapes().items()}

    def batch(self) -> tuple[np.ndarray, np.ndarray]:
        """Inputs and targets, float32 [microbatches, size, sequence, width]."""
        random = np.random.default_rng(1)
        shape = (2, self.microbatches, self.size, self.sequence, self.width)
        inputs, targets = random.standard_normal(shape).astype(np.float32)
        return inputs, targets

    def text(self) -> str:
        """The case as text, from which `from_text` makes it again in another process."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_text(cls, text: str) -> "Case":
        """The inverse of `text`."""
        return cls(**json.loads(text))
