"""How much of the text a run has read: what a step begins at does not follow from its number alone."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Self

from models.recipes import Recipe


@dataclasses.dataclass(frozen=True)
class Progress:
    """What a run has read and learnt from beyond what its recipe counts before a step.

    That is nothing until batches are skipped, or the run goes on in batches of another size.

    Attributes:
      recipe: of the run.
      sequences: how many more were read; fewer where this is negative.
      tokens: how many more were learnt from, likewise.
    """

    recipe: Recipe
    sequences: int = 0
    tokens: int = 0

    @classmethod
    def resumed(cls, recipe: Recipe, step: int, carried: Mapping[str, Any]) -> Self:
        """Go on before a step, from 0 on, with what the checkpoint carries.

        Earlier trainers left there how many batches were "skipped" alone: then sizes count as though they had always
        been today's.
        """
        counted = recipe.count_tokens(step)
        if "progress" not in carried:
            read = recipe.count_tokens(step + carried["skipped"])
            return cls(recipe, (read - counted) // recipe.sequence)
        saved = carried["progress"]
        read = -(-saved["sequences"] * saved["sequence"] // recipe.sequence)
        return cls(recipe, read - counted // recipe.sequence, saved["tokens"] - counted)

    def saved(self, step: int) -> dict[str, int]:
        """What ``resumed`` takes, for JSON: how much was read and learnt from before a step."""
        return {"sequences": self.read(step), "sequence": self.recipe.sequence, "tokens": self.learnt(step)}

    def read(self, step: int) -> int:
        """Sequences before a step's first, those of skipped batches too."""
        return self.recipe.count_tokens(step) // self.recipe.sequence + self.sequences

    def learnt(self, step: int) -> int:
        """Tokens that the parameters before a step come from."""
        return self.recipe.count_tokens(step) + self.tokens

    def back(self, step: int, to: int) -> Self:
        """Go back from before one step to before another, reading on where the first would have read."""
        return dataclasses.replace(self, sequences=self.sequences + self.read(step) - self.read(to))


def new_order(sequence: int, carried: Mapping[str, Any]) -> str | None:
    """What to tell where a run goes on in sequences of another length; None where it does not."""
    before = carried.get("progress", {}).get("sequence", sequence)
    if before == sequence:
        return None
    return (
        f"--sequence was {before} and is {sequence} now: the text is cut and ordered anew, so that some of it comes "
        "again before all of it has been read"
    )
