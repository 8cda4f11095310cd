"""The error that lists everything that is wrong with a checkpoint."""

from collections.abc import Iterable


class WeightsError(ValueError):
    """The checkpoint is not a DeepSeek model, or the published format cannot hold the model.

    Attributes:
      where: the folder, or the other thing that is wrong.
      complaints: one text for each thing that is wrong.
    """

    def __init__(self, where: object, complaints: Iterable[str]):
        self.where = where
        self.complaints = tuple(complaints)
        super().__init__("\n  ".join((f"{where}:", *self.complaints)))
