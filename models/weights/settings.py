"""Files of settings beside a checkpoint's weights."""

import json
from pathlib import Path
from typing import Any

from models.weights.errors import WeightsError


def read_settings(file: Path) -> dict[str, Any]:
    """Read a file of JSON that holds an object.

    Raises:
      WeightsError: it is not there, or it holds something else.
    """
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise WeightsError(file.parent, [f"{file.name}: {error}"]) from None
    if not isinstance(found, dict):
        raise WeightsError(file.parent, [f"{file.name}: is {found!r:.40}, must be an object of settings"])
    return found
