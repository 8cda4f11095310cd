"""Named sets of options for --preset, in the form of a file. Files and flags win over them."""

from collections.abc import Mapping
from typing import Any

PRESETS: Mapping[str, Mapping[str, Any]] = {
    # Runs everything within a minute on two cores.
    "quick": {
        "model": {"name": "tiny", "layers": 2},
        "step": {"pp": 2, "ep": 1, "microbatches": 4, "microbatch_size": 2, "sequence": 32},
        "data": {"eval_sequences": 16},
        "optimizer": {"steps": 20, "warmup": 2},
    },
    # Twenty million parameters, hours on a laptop.
    "small": {
        "model": {"name": "small"},
        "step": {"microbatches": 16, "microbatch_size": 8, "sequence": 256},
        "optimizer": {"steps": 5000, "warmup": 200},
    },
}
"""Name -> sections of options; the rest are the defaults of ``TrainConfig``."""
