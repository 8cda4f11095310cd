"""PyTorch's side: the blocks as modules, the plain step, and torch.distributed.pipelining over gloo."""

import datetime
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import distributed as dist
from torch.distributed.pipelining import PipelineStage, schedules
from torch.nn import functional

from benchmarks.sides.case import Case, Weights

SCHEDULES = {
    "1F1B": schedules.Schedule1F1B,
    "ZBV": schedules.ScheduleZBVZeroBubble,
    "DualPipeV": schedules.ScheduleDualPipeV,
}
V_SHAPED = "ZBV", "DualPipeV"
Named = dict[str, np.ndarray]


def norm(x, scale):
    return x * torch.rsqrt(torch.mean(x * x, -1, keepdim=True) + 1e-6) * scale


def mixture(case: Case, layer: "Layer", x):
    """Experts' outputs for x [tokens, width], combined."""
    probabilities = torch.softmax(x @ layer.router, -1)
    gates, chosen = torch.topk(probabilities, case.top)
    one_hot = (chosen[..., None] == torch.arange(case.experts)).to(x.dtype).reshape(-1, case.experts)
    place = torch.sum((torch.cumsum(one_hot, 0) - 1) * one_hot, -1)  # [tokens * top], in the expert's queue
    seats = (place[:, None] == torch.arange(case.capacity)).to(x.dtype)
    # A token chooses an expert at most once, so the sum over its choices is still a mask.
    seated = (one_hot[:, :, None] * seats[:, None]).reshape(-1, case.top, case.experts * case.capacity)
    dispatch = torch.sum(seated, 1)
    combine = torch.einsum("tk,tks->ts", gates, seated)
    queues = (dispatch.T @ x).reshape(case.experts, case.capacity, -1)
    outputs = functional.silu(queues @ layer.up) @ layer.down
    return combine @ outputs.reshape(case.experts * case.capacity, -1)


class Layer(torch.nn.Module):
    """One block."""

    norm: torch.nn.Parameter
    up: torch.nn.Parameter
    down: torch.nn.Parameter
    router: torch.nn.Parameter

    def __init__(self, case: Case, weights: Named):
        super().__init__()
        self.case = case
        for name, value in weights.items():
            self.register_parameter(name, torch.nn.Parameter(torch.tensor(value)))

    def forward(self, x):
        """Compute the block for x [size, sequence, width]."""
        h = norm(x, self.norm)
        if self.case.block == "mlp":
            return x + functional.silu(h @ self.up) @ self.down
        return x + mixture(self.case, self, h.flatten(0, 1)).view_as(x)


def make_layers(case: Case, weights: Weights, numbers: range) -> torch.nn.Sequential:
    return torch.nn.Sequential(
        *(Layer(case, {name: w[layer] for name, w in weights.items()}) for layer in numbers)
    )


def plain(case: Case, weights: Weights) -> tuple[Callable[[], float], Callable[[], Named]]:
    """Gradient accumulation in one process: the step, and a function that returns its gradients."""
    model = make_layers(case, weights, range(case.layers))
    inputs, targets = map(torch.tensor, case.batch())

    def step():
        model.zero_grad()
        total = 0.0
        for x, target in zip(inputs, targets, strict=True):
            loss = functional.mse_loss(model(x), target) / case.microbatches
            loss.backward()
            total += float(loss.detach())
        return total

    return step, lambda: gradients({0: model})


def gradients(parts: dict[int, torch.nn.Sequential]) -> Named:
    """Gradients by leaf and number of layer; ``parts`` are by the number of their first layer."""
    found: Named = {}
    for first, part in parts.items():
        for number, layer in enumerate(part):
            for name, parameter in layer.named_parameters():
                # Every parameter takes part in the loss.
                assert parameter.grad is not None
                found[f"{name}.{first + number}"] = parameter.grad.numpy()
    return found


class Side:
    """A rank of PyTorch's pipelines."""

    def __init__(self, case: Case, rank: int, port: int, folder: Path):
        torch.set_num_threads(1)
        torch.set_num_interop_threads(1)
        self.case, self.rank, self.folder = case, rank, folder
        dist.init_process_group(
            "gloo",
            init_method=f"tcp://127.0.0.1:{port}",
            rank=rank,
            world_size=case.ranks,
            timeout=datetime.timedelta(seconds=300),
        )
        self.barrier = dist.barrier

    def program(self, name: str) -> tuple[Callable[[], float | None], Callable[[], Named]]:
        """The step of that name, which returns the loss on the rank that has it, and a function for its gradients."""
        weights = self.case.weights()
        return plain(self.case, weights) if name == "plain" else self._pipelined(name, weights)

    def _pipelined(self, name, weights):
        case, make = self.case, SCHEDULES[name]
        count = case.ranks * (2 if name in V_SHAPED else 1)
        each = case.layers // count
        numbers = (self.rank, count - 1 - self.rank) if name in V_SHAPED else (self.rank,)
        parts = {k: make_layers(case, weights, range(k * each, (k + 1) * each)) for k in numbers}
        stages = [PipelineStage(part, k, count, torch.device("cpu")) for k, part in parts.items()]
        schedule = make(
            stages if name in V_SHAPED else stages[0], case.microbatches, loss_fn=functional.mse_loss
        )
        if name in V_SHAPED and self.rank == 0:
            schedule._dump_csv(str(self.folder / f"{name}.csv"), format="compute_only")
        inputs, targets = (torch.tensor(a).flatten(0, 1) for a in case.batch())
        given = (inputs,) if 0 in parts else ()
        target = targets if count - 1 in parts else None

        def step():
            for part in parts.values():
                part.zero_grad()
            losses: list[torch.Tensor] = []
            schedule.step(*given, target=target, losses=losses, return_outputs=False)
            return float(torch.stack(losses).detach().mean()) if target is not None else None

        return step, lambda: gradients({k * each: part for k, part in parts.items()})
