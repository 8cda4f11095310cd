"""The steps of a run, and what may happen between two of them: an evaluation, a checkpoint, a fault, a signal."""

import signal
import time
from collections.abc import Mapping
from typing import Any

import jax
from rich.console import Console

from dualpipe_jax.present.numbers import how_many
from train.data import Batch, Prefetch
from train.errors import DivergedError, Stopped
from train.figures.metrics import Display, say
from train.figures.step import expert_load
from train.figures.trackers import Tracker
from train.processes.group import Processes
from train.processes.stop import Stop
from train.processes.stragglers import Stragglers
from train.processes.stragglers import describe as describe_stragglers
from train.progress import Progress, reordering_warning
from train.rebalance import make_balancer
from train.setup import Run
from train.state.checkpoint import Checkpoints
from train.state.layout import TrainState
from train.trouble import TroubleDetector, WarningSigns
from train.watch import Watch


def train(
    this: Run,
    state: TrainState,
    file: Tracker,
    console: Console,
    checkpoints: Checkpoints,
    watch: Watch,
    processes: Processes,
    carried: Mapping[str, Any],
) -> TrainState:
    """Run the remaining steps of a run and return its last state. Each step writes a line of metrics, the last one
    also a checkpoint.

    ``carried`` is what checkpoints keep in addition to the state: "before", the held-out loss at step "since";
    "skipped", the number of skipped batches; "progress", see ``Progress.to_json``; "trouble", see
    ``TroubleDetector.to_json``.

    Raises:
      CheckpointError, DivergedError, Stopped: see ``run``.
    """
    config, first = this.config, int(state.step)
    num_steps, waited, step = config.optimizer.steps, 0.0, first
    trouble, skipped = TroubleDetector(config.log.spike), carried["skipped"]
    progress = Progress.resumed(this.recipe, first, carried)
    if (text := reordering_warning(config.sequence, carried)) is not None:
        say(console, f"warning: {text}")
    numbers = this.layout.model.config
    warning_signs = WarningSigns(numbers.num_experts / numbers.top_k - 1, this.recipe.learning_rate)
    if "trouble" in carried:
        trouble.resume(carried["trouble"])
    stragglers = Stragglers(processes, config.launch.straggler_every)

    def draw(step: int) -> Batch:
        return this.batch(step, progress)

    balancer = make_balancer(this)
    if balancer is not None and first:
        state = balancer.resume(state, checkpoints.restored.get("balance"))
    display = Display(console, num_steps, config.log.every, first + 1)
    with display, Stop(processes.signals) as stop, Prefetch(draw, first, num_steps) as ahead:
        while step < num_steps:
            processes.heartbeat.step(step + 1, compiles=step == first or this.compiles(step))
            watch.begin(step)
            started = time.perf_counter()
            with stragglers.timing_host_work():
                batch = ahead.get(step)
            state, on_device = this.update(state, batch)
            metrics = jax.device_get(on_device)
            seconds = time.perf_counter() - started
            more = {"learning_rate": float(this.recipe.learning_rate(step)), "data_wait_s": ahead.wait}
            tokens = progress.trained_tokens(step + 1)
            record = watch.end(step, metrics, seconds, tokens, checkpoint_s=waited, **more)
            if skipped:
                record["skipped"] = skipped
            file.write(record)
            display.step(step + 1, record)
            if (slowest := stragglers.report(step + 1)) is not None:
                file.write(slowest)
                say(console, describe_stragglers(slowest))
            for warning in warning_signs.check(record):
                file.write({"step": step + 1, "event": warning})
                say(console, f"warning: {warning}")
            if processes.preempted():
                stop.note(signal.SIGTERM)
            last = step + 1 == num_steps
            due = last or bool(stop.signal) or checkpoints.due(step + 1)
            reason, due = processes.decide((trouble.reason(record), due))
            if reason is not None:
                processes.heartbeat.phase("going back")
                state = go_back(this, checkpoints, reason, trouble)
                back = int(state.step)
                if balancer is not None:
                    state = balancer.resume(state, checkpoints.restored.get("balance") if back else None)
                text = f"{reason}; back to step {back}, skipping the {how_many(step + 1 - back, 'batch', 'es')} since"
                file.write({"step": step + 1, "event": text})
                say(console, f"warning: {text}")
                progress = progress.rewound(step + 1, back)
                skipped, step, waited = skipped + step + 1 - back, back, 0.0
                ahead.restart(step)
                continue
            step, waited = step + 1, 0.0
            if balancer is not None:
                balancer.add(metrics["counts"])
                if balancer.due(step) and not last:
                    processes.heartbeat.phase("rebalancing")
                    state, moved = balancer.rebalance(state, step)
                    file.write(moved)
            if config.log.eval_every and step % config.log.eval_every == 0 and not last:
                processes.heartbeat.phase("evaluating")
                found = this.held_out(state.params)
                file.write({"step": step, **found})
                say(console, f"held-out loss at step {step}: {found['heldout_loss']:.3f} nats")
            if due:
                processes.heartbeat.phase(f"saving step {step}")
                own = None if balancer is None else balancer.to_json()
                kept = {
                    **carried,
                    "skipped": skipped,
                    "progress": progress.to_json(step),
                    "trouble": trouble.to_json(),
                }
                checkpoints.save(step, state, record, expert_load(metrics["counts"]).tolist(), own, kept)
                waited = checkpoints.blocked_seconds
            if stop.signal and not last:
                checkpoints.finish(step)
                text = (
                    f"{stop.reason}: saved at step {step}; --name {config.name} --resume goes on from there"
                )
                raise Stopped(text, code=128 + stop.signal)
        # Still inside ``Stop``: outside of it a signal would end the process, and with it the save.
        checkpoints.finish(num_steps)
    return state


def go_back(this: Run, checkpoints: Checkpoints, reason: str, trouble: TroubleDetector) -> TrainState:
    """The state of the latest checkpoint, or the initial state if there is none.

    Raises:
      DivergedError: --on-trouble is stop, or the run went back to this step ``train.trouble.PATIENCE`` times already.
    """
    if this.config.log.on_trouble == "stop":
        raise DivergedError(
            f"{reason}; lower --learning-rate, or --on-trouble skip goes back and skips its batches"
        )
    checkpoints.wait()
    state = checkpoints.restore()
    state = this.init() if state is None else state
    if not trouble.may_return(int(state.step)):
        raise DivergedError(
            f"{reason}; going back to step {int(state.step)} did not help; lower --learning-rate"
        )
    return state
