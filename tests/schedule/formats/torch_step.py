"""Run by test_torch_csv.py: PyTorch's pipeline runtime plays schedules over gloo, a process for each rank."""

import datetime
import json
import multiprocessing
import multiprocessing.connection
import pathlib
import sys

import torch
from torch import distributed as dist
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

WIDTH, BATCH = 5, 24


def make_stage(stage):
    """The same weights in every process: a stage's seed is its number."""
    generator = torch.Generator().manual_seed(stage)
    layer = torch.nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.5, generator=generator)
    return torch.nn.Sequential(layer, torch.nn.Tanh())


def make_batch():
    generator = torch.Generator().manual_seed(100)
    return torch.randn(2, BATCH, WIDTH, dtype=torch.float64, generator=generator)


def run_step(csv, rank_of, num_microbatches, rank):
    """One step of the schedule in a file; returns what this rank has of losses and gradients."""
    modules = {stage: make_stage(stage) for stage, owner in enumerate(rank_of) if owner == rank}
    stages = [
        PipelineStage(module, stage, len(rank_of), torch.device("cpu")) for stage, module in modules.items()
    ]
    runtime = _PipelineScheduleRuntime(stages, num_microbatches, loss_fn=torch.nn.functional.mse_loss)
    runtime._load_csv(str(csv))
    x, target = make_batch()
    losses = []
    runtime.step(
        *([x] if 0 in modules else []), target=target if len(rank_of) - 1 in modules else None, losses=losses
    )
    played = [str(action) for action in runtime.pipeline_order_with_comms[rank] if action.is_compute_op]
    gradients = {
        (stage, name): parameter.grad
        for stage, module in modules.items()
        for name, parameter in module.named_parameters()
    }
    return {"losses": losses, "gradients": gradients, "played": played}


def run_rank(directory, rank, num_ranks):
    """Every schedule of the directory, one after the other."""
    dist.init_process_group(
        "gloo",
        init_method=f"file://{directory}/store",
        rank=rank,
        world_size=num_ranks,
        timeout=datetime.timedelta(seconds=60),
    )
    for name, (rank_of, num_microbatches) in json.loads((directory / "schedules.json").read_text()).items():
        outcome = run_step(directory / f"{name}.csv", rank_of, num_microbatches, rank)
        torch.save(outcome, directory / f"{name}.rank{rank}.pt")
    dist.destroy_process_group()


def main(directory, num_ranks):
    """Fork: importing PyTorch takes longer than all the rest. No rank outlives the first that fails."""
    fork = multiprocessing.get_context("fork")
    ranks = [
        fork.Process(target=run_rank, args=(directory, rank, num_ranks), daemon=True)
        for rank in range(num_ranks)
    ]
    for rank in ranks:
        rank.start()
    waiting = {rank.sentinel: rank for rank in ranks}
    while waiting:
        for sentinel in multiprocessing.connection.wait(waiting):
            ended = waiting.pop(sentinel)
            ended.join()  # the sentinel may tell a moment before the exit code is there
            if ended.exitcode:
                sys.exit(1)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(pathlib.Path(sys.argv[1]), int(sys.argv[2]))
