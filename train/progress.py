"""How much text a run has read. The number of a step alone does not tell at which sequence its batch begins."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Self

from models.recipes import Recipe


@dataclasses.dataclass(frozen=True)
class Progress:
    """How much more a run has read and learnt from than its recipe counts before a step.

    Both differences are 0 until batches are skipped, or the run resumes with batches of another size.

    Attributes:
      recipe: the recipe of the run.
      extra_sequences: the number of additional sequences read; negative if fewer were read.
      extra_tokens: the number of additional tokens learnt from; negative if there were fewer.
    """

    recipe: Recipe
    extra_sequences: int = 0
    extra_tokens: int = 0

    @classmethod
    def resumed(cls, recipe: Recipe, step: int, carried: Mapping[str, Any]) -> Self:
        """The progress of a run that begins or resumes before ``step``, counted from 0, from what its checkpoint
        carries, if there is one."""
        if "progress" not in carried:
            return cls(recipe)
        saved, counted = carried["progress"], recipe.count_tokens(step)
        read = -(-saved["sequences"] * saved["sequence"] // recipe.sequence)
        return cls(recipe, read - counted // recipe.sequence, saved["tokens"] - counted)

    def to_json(self, step: int) -> dict[str, int]:
        """How much was read and learnt from before ``step``, as JSON values for ``resumed``."""
        return {
            "sequences": self.sequences_read(step),
            "sequence": self.recipe.sequence,
            "tokens": self.trained_tokens(step),
        }

    def sequences_read(self, step: int) -> int:
        """The number of sequences read before ``step``, including those of skipped batches."""
        return self.recipe.count_tokens(step) // self.recipe.sequence + self.extra_sequences

    def trained_tokens(self, step: int) -> int:
        """The number of tokens that the parameters have learnt from before ``step``."""
        return self.recipe.count_tokens(step) + self.extra_tokens

    def rewound(self, step: int, to: int) -> Self:
        """The progress after going back from before ``step`` to before ``to``. Reading continues where ``step`` would
        have begun to read."""
        return dataclasses.replace(
            self, extra_sequences=self.extra_sequences + self.sequences_read(step) - self.sequences_read(to)
        )


def reordering_warning(sequence: int, carried: Mapping[str, Any]) -> str | None:
    """The warning to print if a resumed run has sequences of another length; None if it does not."""
    before = carried.get("progress", {}).get("sequence", sequence)
    if before == sequence:
        return None
    return (
        f"--sequence was {before} and is {sequence} now: the text is cut and ordered anew, so that some of it comes "
        "again before all of it has been read"
    )
