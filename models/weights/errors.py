"""What is wrong with a checkpoint, all of it at once."""

from collections.abc import Iterable


class WeightsError(ValueError):
    """A checkpoint that is no DeepSeek model, or a model that the published format cannot hold.

    Attributes:
      where: the folder, or what else is wrong.
      complaints: each of them.
    """

    def __init__(self, where: object, complaints: Iterable[str]):
        self.where = where
        self.complaints = tuple(complaints)
        super().__init__("\n  ".join((f"{where}:", *self.complaints)))
