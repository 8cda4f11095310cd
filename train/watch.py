"""What is measured while a run trains: the figures in each step's line of the metrics, and the profiled steps."""

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from dualpipe_jax.inspect import read
from dualpipe_jax.profile import ProfileError, Profiler, measure, write_profile
from dualpipe_jax.profile.capture import read_events
from models.recipes import Recipe
from train.config import TrainConfig, replaced
from train.figures.folder import reporting_write_errors
from train.figures.rates import Rates, find_peak, memory_gib
from train.figures.step import step_record
from train.model import count_parameters, model_flops
from train.report.folder import environment
from train.setup import Run
from train.state.layout import TrainState

PROFILE = "profile"
"""Name of the folder, within a run's folder, for the profile."""


class Watch:
    """Measures a run's steps from step ``first`` on, counted from 0."""

    def __init__(
        self,
        config: TrainConfig,
        recipe: Recipe,
        rates: Rates,
        devices: Sequence[Any],
        folder: Path,
        first: int,
    ):
        self.rates, self._config, self._recipe, self._devices = rates, config, recipe, devices
        left = config.optimizer.steps - first
        # The first step compiles, and some more steps warm up if there are enough.
        skip = max(1, min(3, left - config.log.profile))
        self._profiler = Profiler(folder / PROFILE, min(config.log.profile, left - 1), skip)

    def begin(self, step: int) -> None:
        self._profiler.before(step)

    def end(
        self, step: int, metrics: Mapping[str, Any], seconds: float, tokens: int, **more: float
    ) -> dict[str, Any]:
        """End a step and return its record for the metrics.

        Args:
          step: the number of the step, from 0; in the record from 1.
          metrics: the metrics of the step, fetched from the devices.
          seconds: the seconds that the step took. The record's "time" is its end, in seconds since 1970.
          tokens: the number of tokens that the run has learnt from so far.
          more: further numbers for the record.
        """
        self._profiler.after()
        every, num_steps = self._config.log.load_every, self._config.optimizer.steps
        return {
            "step": step + 1,
            "tokens": tokens,
            "time": round(time.time(), 3),
            **step_record(
                metrics,
                with_load=step % every == 0 or step + 1 == num_steps,
                num_devices=self._config.step.ep,
            ),
            "step_s": seconds,
            **more,
            **self.rates.of(seconds, self._recipe.batch_size(step) * self._recipe.sequence),
            **memory_gib(self._devices),
        }

    def close(self) -> None:
        """End a profile that was not finished."""
        self._profiler.close()


def watch_run(this: Run, folder: Path, first: int, leads: bool = True) -> Watch:
    """The ``Watch`` of a run. Writes environment.json, which tells where the run runs, into its folder.

    Of several processes only the one that ``leads`` writes, and profiles its own devices.
    """
    config, devices = this.config, used_devices(this.config)
    numbers = this.layout.model.config
    _, active = count_parameters(numbers)
    peak = find_peak(devices, config.log.peak_tflops, config.log.measure_peak)
    rates = Rates(model_flops(numbers, active, config.sequence), peak)
    if leads:
        found = environment(devices) | {"peak": "" if peak is None else peak.source}
        with reporting_write_errors(folder):
            (folder / "environment.json").write_text(json.dumps(found, indent=2) + "\n")
    else:
        config = replaced(config, ("log", "profile"), 0)
    own = [device for device in devices if device.process_index == jax.process_index()]
    return Watch(config, this.recipe, rates, own, folder, first)


def used_devices(config: TrainConfig) -> list[Any]:
    return jax.devices()[: config.step.num_devices]


def read_profile(this: Run, state: TrainState, folder: Path, leads: bool = True) -> str:
    """Measure the profiled steps and write the results into the run's folder. Returns the text to print.

    Of several processes only the one that ``leads`` measures; all compile, because their compilers may have to agree.
    """
    update: Any = this.update
    # This program was compiled before, and is found again.
    program = update.lower(state, this.batch(0)).compile()
    if not leads:
        return ""
    devices = [
        [device.id for device in rank]
        for rank in np.swapaxes(this.layout.mesh.devices, 0, 1).reshape(this.config.step.pp, -1)
    ]
    try:
        measured = measure(read_events(folder / PROFILE), read(program), this.schedule, devices)
    except (ProfileError, FileNotFoundError) as error:
        return f"profile         {folder / PROFILE}: no timeline: {error}"
    return write_profile(measured, folder / PROFILE, used_devices(this.config))
