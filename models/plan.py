"""Plans of the number of layers on each stage, balanced in time, and the place that a plan gives each layer."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from dualpipe_jax.arguments import typechecked
from models.config import Config


@dataclasses.dataclass(frozen=True)
class Costs:
    """The time of each part of a model, all in one unit; for the forward, or for forward and backward.

    Attributes:
      embed: time of the embedding.
      dense: time of a layer with a dense feed-forward.
      moe: time of a layer with experts.
      mtp: time of a module of multi-token prediction without its use of the head.
      head: time of the head and its loss, once; each module of multi-token prediction uses the head once more.
    """

    embed: float = 1.0
    dense: float = 1.0
    moe: float = 1.0
    mtp: float = 1.0
    head: float = 1.0


PAPER = Costs(head=0.5)
"""Costs as DeepSeek-V3 seems to count them: the embedding takes the time of one layer; a module of multi-token
prediction and the two uses of the head together take that of two layers."""


@runtime_checkable
class Scheduled(Protocol):
    """An object with a schedule's placement, which says which stages share a rank."""

    @property
    def placement(self) -> Any:
        """The placement; ``pipes`` has for each pipe the rank of each stage."""


@typechecked
def matmul_costs(config: Config, sequence: int = 4096) -> Costs:
    """Price each part by a token's matmuls in the forward, in FLOPs, with causal attention over ``sequence`` tokens."""
    head = config.qk_nope_dim + config.qk_rope_dim
    queries = config.q_lora_rank * (config.dim + config.num_heads * head)
    attention = queries or config.dim * config.num_heads * head
    attention += config.dim * (config.kv_lora_rank + config.qk_rope_dim)
    attention += config.kv_lora_rank * config.num_heads * (config.qk_nope_dim + config.v_head_dim)
    attention += config.num_heads * config.v_head_dim * config.dim
    attention += config.num_heads * (head + config.v_head_dim) * sequence // 2
    active = (config.top_k + config.num_shared_experts) * config.expert_hidden
    dense = 2 * (attention + 3 * config.dim * config.dense_hidden)
    moe = 2 * (attention + config.dim * (config.num_experts + 3 * active))
    return Costs(
        embed=0, dense=dense, moe=moe, mtp=moe + 4 * config.dim**2, head=2 * config.dim * config.vocab
    )


def stage_times(config: Config, plan: Sequence[int], costs: Costs) -> list[float]:
    """Return the time of each stage of a plan, in the unit of ``costs``."""
    times, layer = [], 0
    for share in plan:
        dense = max(0, min(config.num_dense_layers - layer, share))
        times.append(dense * costs.dense + (share - dense) * costs.moe)
        layer += share
    times[0] += costs.embed
    times[-1] += costs.head + config.num_mtp_layers * (costs.mtp + costs.head)
    return times


@typechecked
def layer_plan(config: Config, schedule: Scheduled | int, costs: Costs | None = None) -> tuple[int, ...]:
    """Divide all layers among stages, in model order, so that the busiest rank has as little work as possible.

    Every stage except the first and the last has at least one layer. If there are too few layers for that, some stages
    have none and hand on what they receive. Among the plans whose busiest rank is within one per cent of the best, the
    function prefers those whose deepest stage has the fewest layers (all stages get as many places for layers as the
    deepest one), then those with the fewest kinds of stages, then those with the less busy ranks. The time of the
    search doubles with each dense layer.

    Args:
      config: the model.
      schedule: a ``Schedule``, whose placement says which stages share a rank, or the number of stages, each with a
        rank of its own.
      costs: the time of each part; by default ``matmul_costs``.

    Returns:
      The number of layers of each stage, dense ones included. The first stage has the embedding in addition, the last
      one multi-token prediction and the head.

    Raises:
      ValueError: there are fewer layers than ranks, the two ends aside.

    >>> from models.config import v3
    >>> layer_plan(v3(num_mtp_layers=1), 16, PAPER)
    (3, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 2)
    """
    num_stages = len(schedule.placement.pipes[0]) if isinstance(schedule, Scheduled) else int(schedule)
    pipes = schedule.placement.pipes if isinstance(schedule, Scheduled) else (range(num_stages),)
    costs = costs or matmul_costs(config)
    ranks = [{pipe[stage] for pipe in pipes} for stage in range(num_stages)]
    # The same number for all stages on the same ranks.
    rank_group = np.array([ranks.index(here) for here in ranks])
    num_ranks = len(set().union(*ranks))
    if num_stages < 1 or config.num_layers < max(1, num_ranks - 2):
        raise ValueError(
            f"layer_plan: the schedule's {num_stages} stages on {num_ranks} ranks need a layer on each rank, the two "
            f"ends aside, and there are {config.num_layers}; from 1 to {max(1, config.num_layers + 2)} ranks are "
            "possible"
        )
    least = int(config.num_layers >= num_stages - 2)

    def rank_loads(times: Sequence[float]) -> np.ndarray:
        return np.bincount(rank_group, times, num_stages)

    def descending_loads(plan: tuple[int, ...]) -> tuple[float, ...]:
        times = stage_times(config, plan, costs)
        falling = [*sorted(rank_loads(times), reverse=True), *sorted(times, reverse=True)]
        return tuple(np.round(falling, 6 - int(np.log10(sum(times) + 1e-300))))

    def best_with_dense(dense: tuple[int, ...]) -> tuple[int, ...] | None:
        """Return the best plan with these dense layers, None if there are too few layers.

        Layers with experts are all alike, so each one goes to the stage whose rank has the least to do.
        """
        first = len(dense) - 1  # the first stage that may have experts: dense layers come before it
        shares = [*dense, *[least] * (num_stages - len(dense))]
        if len(dense) < num_stages:
            shares[-1] = 0
        if sum(shares) > config.num_layers:
            return None
        for _ in range(config.num_layers - sum(shares)):
            times = stage_times(config, shares, costs)
            busy = rank_loads(times)[rank_group]
            shares[min(range(first, num_stages), key=lambda stage: (busy[stage], times[stage]))] += 1
        return tuple(shares)

    plans = list(filter(None, map(best_with_dense, _dense_shares(config.num_dense_layers, num_stages))))
    plans += _alike_between_ends(config.num_layers, num_stages)
    busiest = {plan: rank_loads(stage_times(config, plan, costs)).max() for plan in plans}
    # Every stage has room for as many layers as the deepest one, and each kind of stage is compiled: both are worth
    # more than the time of a dense layer more or less.
    near_best = [plan for plan in plans if busiest[plan] <= 1.01 * min(busiest.values())]
    return min(
        near_best, key=lambda plan: (max(plan), len(set(_contents(config, plan))), *descending_loads(plan))
    )


@typechecked
def given_plan(config: Config, schedule: Scheduled, shares: Sequence[int]) -> tuple[int, ...]:
    """Return the given number of layers of each stage, dense ones included; ``layer_plan`` if none are given.

    Raises:
      ValueError: there is not one number for each of the schedule's stages, a number is negative, or they do not add up
        to the model's layers.
    """
    if not shares:
        return layer_plan(config, schedule)
    num_stages, wrong = schedule.placement.num_model_stages, []
    if len(shares) != num_stages:
        wrong.append(f"of {len(shares)} stages; there are {num_stages}, one number for each")
    if min(shares) < 0:
        wrong.append("none can have fewer than 0 layers")
    if sum(shares) != config.num_layers:
        wrong.append(f"{sum(shares)} layers; there are {config.num_layers}, dense ones included")
    if wrong:
        raise ValueError(f"{'; '.join(wrong)}. Leave them out for shares that are balanced")
    return tuple(shares)


def _alike_between_ends(num_layers: int, num_stages: int) -> Iterator[tuple[int, ...]]:
    """Yield all plans whose stages between the first and the last have the same number of layers."""
    between = max(0, num_stages - 2)
    for depth in range(1, num_layers + 1) if between else (0,):
        left = num_layers - between * depth
        if num_stages == 1:
            yield (num_layers,)
        elif left >= 0:
            yield from ((first, *[depth] * between, left - first) for first in range(left + 1))


def _dense_shares(num_dense: int, num_stages: int) -> Iterator[tuple[int, ...]]:
    """Yield each way to divide dense layers among the first stages, up to the last that has one: <= 2 ** num_dense."""
    for cuts in itertools.chain.from_iterable(
        itertools.combinations(range(num_dense), k) for k in range(min(num_stages, num_dense + 1))
    ):
        yield tuple(int(share) for share in np.diff([0, *cuts, num_dense]))


@dataclasses.dataclass(frozen=True)
class StageContent:
    """What a stage holds, and so what the function of its kind computes.

    Attributes:
      first: whether it has the embedding.
      dense: the numbers of the dense layers that it runs.
      num_moe: the number of its slots that hold layers with experts; these slots come first.
      last: whether it has the head and the modules of multi-token prediction, whose blocks take the next slots.
    """

    first: bool
    dense: range
    num_moe: int
    last: bool

    def name(self, like: "Sequence[StageContent]") -> str:
        """Name the stage's kind by its place, and by its layers if stages between the ends differ in them."""
        if self.first or self.last:
            return "only" if self.first and self.last else "first" if self.first else "last"
        if len({content for content in like if not (content.first or content.last)}) == 1:
            return "middle"
        dense = f"dense_{self.dense.start}_to_{self.dense.stop - 1}_" if self.dense else ""
        return f"middle_{dense}{self.num_moe}"


@dataclasses.dataclass(frozen=True, eq=False)
class Layout:
    """The place of each layer of a model.

    Attributes:
      plan: the number of layers of each stage, dense ones included.
      contents: what each stage holds.
      rows: int32 [P, slots], the row of the routers' figures that a stage's slot belongs to: layers with experts in
        model order, then modules of multi-token prediction; -1 for slots that a stage leaves empty.
    """

    plan: tuple[int, ...]
    contents: tuple[StageContent, ...]
    rows: np.ndarray

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(content.name(self.contents) for content in self.contents)

    @property
    def alike(self) -> dict[str, str]:
        """For each kind between the ends that has as many layers of both sorts as an earlier one: the earlier kind."""
        first: dict[tuple[int, int], str] = {}
        between = list(zip(self.kinds, self.contents, strict=True))[1:-1]
        likes = {kind: first.setdefault((len(c.dense), c.num_moe), kind) for kind, c in between}
        return {kind: like for kind, like in likes.items() if kind != like}

    def slot_of(self, row: int) -> tuple[int, int]:
        """Return the stage and slot of a layer with experts, or of a module of multi-token prediction, by its row."""
        stage, slot = np.argwhere(self.rows == row)[0]
        return int(stage), int(slot)


def lay_out(config: Config, plan: Sequence[int]) -> Layout:
    """Give each layer of a plan its place.

    Raises:
      ValueError: the numbers of layers do not add up to the model's or one is negative, or no layer has experts.
    """
    _check(config, plan)
    contents = _contents(config, plan)
    used = [content.num_moe + content.last * config.num_mtp_layers for content in contents]
    filled = np.arange(max(used)) < np.asarray(used)[:, None]
    rows = np.where(filled, np.cumsum(filled).reshape(filled.shape) - 1, -1).astype(np.int32)
    return Layout(tuple(plan), tuple(contents), rows)


def _contents(config: Config, plan: Sequence[int]) -> list[StageContent]:
    contents, layer = [], 0
    for stage, share in enumerate(plan):
        dense = range(min(layer, config.num_dense_layers), min(layer + share, config.num_dense_layers))
        contents.append(StageContent(stage == 0, dense, share - len(dense), stage == len(plan) - 1))
        layer += share
    return contents


def _check(config: Config, plan: Sequence[int]) -> None:
    wrong = []
    if config.num_moe_layers < 1:
        wrong.append(f"all {config.num_layers} layers are dense, at least one must have experts")
    if not plan or any(share < 0 for share in plan):
        wrong.append("it needs a stage at least, and none can have fewer than 0 layers")
    if sum(plan) != config.num_layers:
        wrong.append(f"its sum is {sum(plan)}, the layers are {config.num_layers}, dense ones included")
    if wrong:
        raise ValueError(
            f"deepseek: stages {tuple(plan)}: {'; '.join(wrong)}. See layer_plan(config, schedule) for one."
        )
