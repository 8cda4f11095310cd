"""The peak memory of each device and of the host while an engine reads a model's weights.

A model of random numbers is written, in Hugging Face's layout and as our own files, and read by processes of
their own: onto one device; onto several, each of which reads its part; and onto several from params that are
whole on the first of them, which is needed where nothing is lazy. A device's bytes are those of JAX's arrays,
counted before and after every tensor that is read and every array that is made; on a GPU or TPU also those
that its allocator reports. Virtual CPU devices have their arrays in the host's memory, and share one copy of
an array that all of them have.

    scripts/bench reading_weights
    scripts/bench reading_weights --gb 1 --devices 8
"""

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

GB = 1e9
ROWS = {
    "one device": ("huggingface", "one"),
    "several, as they are read": ("huggingface", "lazy"),
    "several, our own files": ("orbax", "lazy"),
    "several, whole on one first": ("huggingface", "whole"),
}


def model_of(nbytes: float) -> Any:
    """A configuration whose weights in bfloat16 take about ``nbytes`` bytes, nine tenths of them experts."""
    import jax.numpy as jnp

    from models import small

    experts, layers = 64, 9
    hidden = round(0.45 * nbytes / (3 * experts * 512 * (layers - 1)) / 16) * 16
    return small(dim=512, num_experts=experts, expert_hidden=hidden, compute_dtype=jnp.bfloat16)


def publish(folder: Path, nbytes: float) -> None:
    """Write the model in Hugging Face's layout, layer by layer, so that only one layer is in memory."""
    from models.plan import lay_out
    from models.weights.config_json import to_json
    from models.weights.names import entries

    config, rng = model_of(nbytes), np.random.default_rng(0)
    folder.mkdir()
    files: dict[str, dict[str, np.ndarray]] = {}
    for entry in entries(config, lay_out(config, [config.num_layers])):
        file = ".".join(entry.name.split(".")[1:3]) if ".layers." in entry.name else "ends"
        if file not in files and files:
            _write(folder, *files.popitem())
        dtype = np.float32 if entry.name.endswith("bias") else ml_dtypes.bfloat16
        numbers = 0.02 * rng.standard_normal(entry.shape, np.float32)
        files.setdefault(file, {})[entry.name] = numbers.astype(dtype)
    _write(folder, *files.popitem())
    (folder / "config.json").write_text(json.dumps(to_json(config, "bfloat16")))


def _write(folder: Path, name: str, tensors: dict[str, np.ndarray]) -> None:
    save_file(tensors, folder / f"{name}-{next(iter(tensors))}.safetensors")


def convert(source: Path, target: Path) -> None:
    from models.weights.converting import Options
    from models.weights.converting import convert as run

    run(Options(source, target, to="orbax"))


def measure(folder: Path, how: str, num_devices: int) -> None:
    """Read the weights into an engine, and print the memory that was used, as JSON."""
    import jax

    from dualpipe_jax.parallel import make_mesh
    from models import Dispatch, weights
    from models.decode import Engine, Limits, decoder
    from models.weights import native
    from models.weights.files import Reader

    mesh = None if how == "one" else make_mesh(1, num_devices, jax.devices()[:num_devices])
    peaks = dict.fromkeys(jax.devices()[: 1 if mesh is None else num_devices], 0)

    def look() -> dict[Any, int]:
        held = dict.fromkeys(peaks, 0)
        for array in jax.live_arrays():
            for device in array.sharding.device_set:
                held[device] += math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize
        for device in peaks:
            peaks[device] = max(peaks[device], held[device])
        return held

    def watched(function: Callable[..., Any]) -> Callable[..., Any]:
        def watch(*given: Any, **named: Any) -> Any:
            look()
            found = function(*given, **named)
            look()
            return found

        return watch

    base, began = resident(), time.process_time()
    Reader.read_into = watched(Reader.read_into)  # type: ignore[method-assign]
    jax.make_array_from_callback = watched(jax.make_array_from_callback)
    if how == "whole":
        config, params = weights.load(folder)
    elif (folder / "config.json").is_file():
        config, params = weights.open_lazily(folder)
    else:
        config, params, _ = native.open_lazily(folder)
    model = decoder(config, dispatch=Dispatch(axis_name="ep") if mesh else Dispatch())
    limits = Limits(max_requests=num_devices, max_positions=64)
    engine = Engine(model, params, limits, mesh=mesh)
    del params
    kept = look()
    stats = [device.memory_stats() for device in peaks]
    found = {
        "whole": sum(leaf.nbytes for leaf in jax.tree.leaves(engine._weights)),
        "kept": max(kept.values()),
        "peak": max(peaks.values()),
        "allocated": max(stat["peak_bytes_in_use"] for stat in stats) if all(stats) else None,
        "host": resident("VmHWM") - base,
        "seconds": time.process_time() - began,
    }
    print(json.dumps(found))


def resident(what: str = "VmRSS") -> int:
    """The bytes of this process in memory, now (VmRSS) or at the peak (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(what)).split()[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gb", type=float, default=0.6, help="gigabytes of the model's weights in bfloat16")
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument(
        "--folder", type=Path, help="folder in which a temporary folder for the model is made"
    )
    parser.add_argument("--child", nargs=2, metavar=("WHAT", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        what, folder = options.child[0], Path(options.child[1])
        if what == "publish":
            publish(folder / "huggingface", options.gb * GB)
        elif what == "convert":
            convert(folder / "huggingface", folder / "orbax")
        else:
            measure(folder / ROWS[what][0], ROWS[what][1], options.devices)
        return
    folder = Path(tempfile.mkdtemp(prefix="reading_weights-", dir=options.folder))
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={options.devices}"
    environ = os.environ | {"XLA_FLAGS": flags}

    def child(what: str) -> str:
        sizes = ["--gb", str(options.gb), "--devices", str(options.devices)]
        command = [sys.executable, __file__, *sizes, "--child", what, str(folder)]
        return subprocess.run(command, env=environ, check=True, stdout=subprocess.PIPE, text=True).stdout

    try:
        child("publish")
        child("convert")
        print(f"GB                           {'weights':>8}{'part':>8}{'peak':>8}{'host':>8}  CPU seconds")
        for name in ROWS:
            found = json.loads(child(name).splitlines()[-1])
            sizes = "".join(f"{found[key] / GB:8.3f}" for key in ("whole", "kept", "peak", "host"))
            more = f"  allocator {found['allocated'] / GB:.3f}" if found["allocated"] else ""
            print(f"{name:28} {sizes}{found['seconds']:10.1f}{more}")
    finally:
        shutil.rmtree(folder)
    print(
        "weights: of the model as it is served. part: what a device holds in the end, its cache too. peak: the most"
    )
    print(
        "that a device held while weights were read. host: the most that the process had, beyond its start."
    )


if __name__ == "__main__":
    main()
