"""One bench for two uses: on a GPU functions are compiled, run and timed; for a GPU that is not here only compiled."""

import collections
import gzip
import json
import re
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dualpipe_jax import inspect
from dualpipe_jax.inspect.gpus import GPUS, gpu_generation
from dualpipe_jax.inspect.roofline import traffic
from dualpipe_jax.inspect.target import Target

TRIALS = 5


class OutOfTime(Exception):
    """Raised when the time that was given is over."""


class Bench:
    """Compiles, runs and times functions, and keeps a record of each.

    Attributes:
      records: the results, a dict for each function or fact, each printed as a line of JSON as soon as it is
        known.
      compiles_only: whether functions are only compiled, because there is no GPU; arrays are shapes then.
      gpu: the data of the device: its peak, and the clock for predictions in cycles.
    """

    def __init__(self, target: str | None, minutes: float, texts: Path | None = None):
        self.records: list[dict[str, Any]] = []
        self.compiles_only = target is not None
        self.part = ""
        self._texts = texts
        self._end = time.monotonic() + 60 * minutes
        device = Target.parse(target).devices()[0] if target is not None else jax.devices("gpu")[0]
        self.device = device
        self._here = jax.sharding.SingleDeviceSharding(device)
        generation = gpu_generation(device.device_kind)
        if generation is None:
            raise ValueError(f"{device.device_kind}: nothing is known of it; there are {', '.join(GPUS)}")
        self.gpu = GPUS[generation]
        self._rates = inspect.gpu_rates(generation)

    def device_context(self) -> AbstractContextManager[Any]:
        """The context in which kernels of Pallas' Triton are lowered.

        Without a GPU, Triton asks the mesh of the context which GPU it compiles for. An engine's step has a mesh of
        its own, and must not be lowered in this context.
        """
        if not self.compiles_only:
            return nullcontext()
        mesh = jax.sharding.Mesh(np.array([self.device]), ("device",))
        return jax.sharding.use_abstract_mesh(mesh.abstract_mesh)

    # ------------------------------------------------------------------------------ arrays

    def normal(self, seed: int, *shape: int, dtype: Any = jnp.bfloat16, scale: float = 0.125) -> Any:
        """Random numbers, not constants: a GPU multiplies constants a tenth faster, because they take less power."""

        def draw() -> jax.Array:
            return (scale * jax.random.normal(jax.random.key(seed), shape, jnp.float32)).astype(dtype)

        return self.made(draw)

    def given(self, values: Any) -> Any:
        """Values of the host, put on the device."""
        return self.made(lambda: jax.tree.map(jnp.asarray, values))

    def made(self, make: Callable[..., Any], *args: Any) -> Any:
        """The results of a function, neither timed nor recorded."""
        if self.compiles_only:
            return jax.tree.map(self._abstract, jax.eval_shape(make, *args))
        return jax.block_until_ready(jax.jit(make)(*args))

    def _abstract(self, leaf: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=self._here)

    # ------------------------------------------------------------------------------ records

    def say(self, name: str, **facts: Any) -> None:
        """Record facts under a name, and print the record."""
        record = {"part": self.part, "name": name, **facts}
        self.records.append(record)
        print(json.dumps(record), flush=True)

    def time(
        self,
        name: str,
        function: Callable[..., Any],
        *args: Any,
        flops: float = 0.0,
        traffic: float = 0.0,
        predict: bool | Callable[..., float] = False,
        options: dict[str, Any] | None = None,
        seconds: float = 0.12,
        sums: Any = None,
        **facts: Any,
    ) -> Any:
        """Compile and time a function.

        Args:
          name: the name of the record.
          function: the function of ``args``.
          args: the arguments, arrays as this bench makes them.
          flops: the operations that the function is for, from which TFLOP/s and the share of the peak are
            computed.
          traffic: the bytes that it must read and write, from which TB/s are computed.
          predict: whether to record the roofline's time of the compiled program; or a function of the report
            and the module that returns its cycles, for a program with loops whose trips only its table gives.
          options: the options of the compiler; None for the recommended ones.
          seconds: the duration of one trial, of which there are five; the median is recorded.
          sums: arrays that the function takes after ``args`` and returns, changed, after all other results;
            the new ones are written to the memory of the old, as in a step.
          facts: further facts to record.

        Returns:
          The results of the function without sums; if it was only compiled, their shapes.

        Raises:
          OutOfTime: the time that was given is over.
        """
        if time.monotonic() > self._end:
            raise OutOfTime
        started = time.perf_counter()
        given = args if sums is None else (*args, sums)
        donated = () if sums is None else (len(args),)
        lowered = jax.jit(function, donate_argnums=donated).lower(*given)
        chosen: dict[str, Any] = options or inspect.recommended_compiler_options("gpu")
        compiled = lowered.compile(chosen)
        facts |= {"compile_s": round(time.perf_counter() - started, 2), **_memory(compiled)}
        if self._texts is not None and predict:
            self._texts.mkdir(parents=True, exist_ok=True)
            packed = gzip.compress(_text(compiled).encode(), mtime=0)
            (self._texts / f"{self.part}.{name.replace(' ', '_')}.hlo.gz").write_bytes(packed)
        if predict:
            facts |= self._predicted(compiled, predict)
        if self.compiles_only:
            facts |= {"calls": _calls(_text(compiled)), "bytes_outside_loops": _bytes(compiled)}
            text = lowered.as_text()
            # The compiler expands a ragged_dot into products of all rows with each group's matrix, and the
            # compiled text does not show it.
            facts["dense_ragged"] = text.count('"chlo.ragged_dot"')
            self.say(name, **facts, unordered_scatters=unordered_scatters(text), flops=flops)
            out = jax.tree.map(self._abstract, jax.eval_shape(function, *given))
            return out if sums is None else out[:-1]
        if sums is not None:
            sums = jax.tree.map(jnp.copy, sums)  # so that the caller's arrays are not donated

        def run() -> Any:
            nonlocal sums
            if sums is None:
                return compiled(*args)
            out = compiled(*args, sums)
            sums = out[-1]
            return out  # with the sums, so that a function that returns nothing else is waited for, too

        out = jax.block_until_ready(run())
        if sums is not None:
            out = out[:-1]
        took, spread = _timed(run, seconds)
        facts = {"ms": took * 1e3, "spread": spread} | facts
        if flops:
            facts |= {"tflops": flops / took / 1e12, "mfu": flops / took / self.gpu.flops}
        if traffic:
            facts["tb_per_s"] = traffic / took / 1e12
        if "predicted_ms" in facts:
            facts["predicted_over_measured"] = facts["predicted_ms"] / facts["ms"]
        self.say(name, **{key: _rounded(value) for key, value in facts.items()})
        return out

    def _predicted(self, compiled: Any, predict: bool | Callable[..., float]) -> dict[str, Any]:
        module = inspect.read(compiled)
        report = inspect.overlap(module, rates=self._rates)
        cycles = predict(report, module) if callable(predict) else report.computations[module.entry].cycles
        return {"predicted_ms": cycles / self.gpu.clock * 1e3}

    @contextmanager
    def going_on(self, part: str) -> Iterator[None]:
        """The context of one part of the bench: an error in it is recorded, and the next part runs."""
        self.part = part
        self.say("begins")
        started = time.monotonic()
        try:
            yield
        except OutOfTime:
            self.say("not done", reason="the minutes that were given are over")
        except Exception as error:
            words = str(error).strip().splitlines() or [""]
            self.say("failed", reason=f"{type(error).__name__}: {' '.join(words)[:600]}")
        self.say("took", seconds=round(time.monotonic() - started, 1))


def unordered_scatters(text: str) -> int:
    """The number of scatters of floats in a lowered program's text whose updates may hit the same element; a
    GPU then applies these updates in any order."""
    scatters = re.findall(r'"stablehlo\.scatter".*?\}\) : [^\n]*', text, re.DOTALL)
    floats = [one for one in scatters if re.search(r"-> tensor<(?:\d+x)*(?:f|bf)\d+>$", one)]
    return sum("unique_indices = true" not in one for one in floats)


def error(found: Any, wanted: Any) -> float:
    """The norm of the difference over the norm of ``wanted``, in float64; NaN in ``found`` gives NaN."""
    found, wanted = (np.asarray(jax.device_get(a), np.float64) for a in (found, wanted))
    return float(np.linalg.norm((found - wanted).ravel())) / max(float(np.linalg.norm(wanted.ravel())), 1e-30)


def _text(compiled: jax.stages.Compiled) -> str:
    text = compiled.as_text()
    # Some runtimes have no text of their programs; XLA's for GPUs does.
    assert text is not None
    return text


def _timed(run: Callable[[], Any], seconds: float) -> tuple[float, float]:
    """The median seconds of a run over trials of many runs in a row, and the slowest trial over the fastest."""
    started = time.perf_counter()
    jax.block_until_ready(run())
    number = max(1, min(200, round(seconds / max(time.perf_counter() - started, 1e-6))))
    trials = []
    for _ in range(TRIALS):
        started = time.perf_counter()
        for _ in range(number):
            out = run()
        jax.block_until_ready(out)
        trials.append((time.perf_counter() - started) / number)
    return statistics.median(trials), max(trials) / min(trials)


def _memory(compiled: Any) -> dict[str, float]:
    return {"temp_gib": round(compiled.memory_analysis().temp_size_in_bytes / 2**30, 3)}


STILL = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call")
"""Instructions that move no bytes themselves."""
_CALL = re.compile(r'custom_call_target="([^"]+)"')


def _calls(text: str) -> dict[str, int]:
    """The number of calls of each kernel in a program's text."""
    return dict(collections.Counter(_CALL.findall(text)))


def _bytes(compiled: Any) -> int:
    """The bytes that the program reads and writes outside its loops."""
    module = inspect.read(compiled)
    entry = module.computations[module.entry]
    moving = (i for i in entry if i.opcode not in STILL)
    return sum(traffic(module, entry, instruction) for instruction in moving)


def _rounded(value: Any) -> Any:
    return float(f"{value:.5g}") if isinstance(value, float) else value
