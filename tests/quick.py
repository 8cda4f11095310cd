"""Flags under which XLA compiles in a third of the time: tests compile much and run little."""

import importlib.metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COMPILED = ROOT / "build" / "tests" / "compiled"
"""Programs that tests of this checkout compiled: the workers of a run share them, and so do later runs."""
COMPILED_BYTES = 2 * 2**30
"""Above this the next run starts with none."""
QUICK = "--xla_backend_optimization_level=0"
ALIKE: dict[str, bool] = {}
"""Compiler options for two programs whose sums are to be equal to the last bit: the same arithmetic in all fusions."""

# Later jaxlibs may not know these flags, and one that is not known ends the process.
if tuple(map(int, importlib.metadata.version("jaxlib").split(".")[:2])) < (0, 11):
    QUICK += " --xla_cpu_use_fusion_emitters=false"
    # One module of LLVM instead of 32: less to do in all, and no worker has a second core for it.
    QUICK += " --xla_cpu_parallel_codegen_split_count=1"
    ALIKE |= {"xla_cpu_use_fusion_emitters": True}
