"""Files of settings in the folder of a checkpoint."""

import json
from pathlib import Path
from typing import Any

from models.weights.errors import WeightsError


def read_settings(file: Path) -> dict[str, Any]:
    """Read a JSON file that holds an object.

    Raises:
      WeightsError: the file cannot be read, is not JSON, or does not hold an object.
    """
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise WeightsError(file.parent, [f"{file.name}: {error}"]) from None
    if not isinstance(found, dict):
        raise WeightsError(file.parent, [f"{file.name}: is {found!r:.40}, must be an object of settings"])
    return found
