"""Which of a step's guards XLA puts into command buffers (CUDA graphs), compiled for H100s that are not here.

The step is the probe's: every unit of DualPipe, tiny, with guards as loops and as branches, with experts on
two devices and on one. Everything in a command buffer is launched by one call, and a loop or a conditional in
it does not need the host. XLA's compiled text does not show command buffers; the sequence of thunks that it
dumps does. Nothing is run.

    scripts/bench command_buffers            # in an environment with the extra `cuda`; four minutes
"""

import argparse
import collections
import os
import re
import tempfile
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import jax

from dualpipe_jax import inspect, make_mesh
from dualpipe_jax.engine.guard import Divergence
from dualpipe_jax.inspect.target import MissingCompiler, Target
from dualpipe_jax.probe import units
from dualpipe_jax.probe.place import Place

USUAL = "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION"
OPTIONS = {
    "as it is": {},
    "+WHILE,+CONDITIONAL": {"xla_gpu_enable_command_buffer": f"{USUAL},WHILE,CONDITIONAL"},
}
GUARDS: dict[Divergence, str] = {"loop": "kWhile", "switch": "kConditional"}
_THUNK = re.compile(r"( *)\d+: (k\w+)")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default="h100:1x4", help="four GPUs to compile for")
    options = parser.parse_args()
    try:
        devices = Target.parse(options.target).devices()
    except (MissingCompiler, ValueError) as error:
        parser.error(str(error))
    print(
        "| ranks x devices of experts, guards, buffers | guards inside | outside | kernels inside | outside |"
    )
    print("| --- | ---: | ---: | ---: | ---: |", flush=True)
    for pp, ep in ((4, 1), (2, 2)):
        place = Place(make_mesh(pp, ep, devices=devices), options={}, is_small=False)
        for form, guard in GUARDS.items():
            for name, more in OPTIONS.items():
                inside, outside = thunks(lowered(place, form), more)
                # Of the loops two are no guards: the scan over ticks, and one more.
                counts = inside[guard], outside[guard], inside["kCustomKernel"], outside["kCustomKernel"]
                print(f"| {pp} x {ep}, {form}, {name} | {' | '.join(map(str, counts))} |", flush=True)


def lowered(place: Place, form: Divergence):
    pipeline, *given = units.tiny_pipeline(place, form, 256, 64)
    given = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), given)
    step: Any = pipeline.value_and_grad
    return step.lower(*given)


def thunks(lowered, more: dict[str, str]) -> tuple[collections.Counter, collections.Counter]:
    """The number of thunks of each kind inside command buffers, and outside of them."""
    with tempfile.TemporaryDirectory() as folder:
        dump = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
        lowered.compile(inspect.recommended_compiler_options("gpu") | dump | more)
        (text,) = Path(folder).glob("*thunk_sequence_after_thunk_passes.txt")
        lines = text.read_text().splitlines()
    inside: collections.Counter[str] = collections.Counter()
    outside: collections.Counter[str] = collections.Counter()
    buffer = None  # the indentation of the command buffer around the line
    for found in filter(None, map(_THUNK.match, lines)):
        depth, kind = len(found[1]), found[2]
        if buffer is not None and depth <= buffer:
            buffer = None
        if buffer is None and kind == "kCommandBuffer":
            buffer = depth
        else:
            (outside if buffer is None else inside)[kind] += 1
    return inside, outside


if __name__ == "__main__":
    main()
