"""Which layers stand on which stage: plans balanced in time, and the places that a plan gives each layer."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from dualpipe_jax.arguments import typechecked
from models.config import Config


@dataclasses.dataclass(frozen=True)
class Costs:
    """What the parts of a model take, in one unit of time; forward, or forward and backward.

    Attributes:
      embed: looking tokens up.
      dense: a layer with a dense feed-forward.
      moe: a layer with experts.
      mtp: a module of multi-token prediction without its use of the head.
      head: the head and its loss, once; each module of multi-token prediction uses it once more.
    """

    embed: float = 1.0
    dense: float = 1.0
    moe: float = 1.0
    mtp: float = 1.0
    head: float = 1.0


PAPER = Costs(head=0.5)
"""Costs as DeepSeek-V3 seems to count them: the embedding a layer's time, a module and both heads two."""


@runtime_checkable
class Scheduled(Protocol):
    """What has a schedule's placement, which says which stages share a rank."""

    @property
    def placement(self) -> Any:
        """Pipes of stages on ranks."""


@typechecked
def matmul_costs(config: Config, sequence: int = 4096) -> Costs:
    """Price parts by the matmuls that a token needs in the forward, in FLOPs; causal attention over ``sequence``."""
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
    """Share all layers out over stages, in model order, so that the busiest rank is as little busy as can be.

    Every stage but the two ends has a layer at least. With fewer layers than that, some stages have none and hand on
    what they are given. Of plans whose busiest ranks are within one per cent of the best, the one with the shallowest
    deepest stage is taken, for all stages have as many places for layers; of these the one with the fewest kinds of
    stages, then with the less busy ranks. The time that this takes doubles with each dense layer.

    Args:
      config: the model.
      schedule: a ``Schedule``, whose placement says which stages share a rank, or the number of stages, each with a
        rank of its own.
      costs: what the parts take; by default ``matmul_costs``.

    Returns:
      How many layers, dense ones included, each stage has; the embedding comes on top of the first, multi-token
      prediction and the head of the last.

    Raises:
      ValueError: there are fewer layers than ranks between the ends.

    >>> from models.config import v3
    >>> layer_plan(v3(num_mtp_layers=1), 16, PAPER)
    (3, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 2)
    """
    num_stages = len(schedule.placement.pipes[0]) if isinstance(schedule, Scheduled) else int(schedule)
    pipes = schedule.placement.pipes if isinstance(schedule, Scheduled) else (range(num_stages),)
    costs = costs or matmul_costs(config)
    ranks = [{pipe[stage] for pipe in pipes} for stage in range(num_stages)]
    home = np.array([ranks.index(here) for here in ranks])  # one for all stages of the same ranks
    num_ranks = len(set().union(*ranks))
    if num_stages < 1 or config.num_layers < max(1, num_ranks - 2):
        raise ValueError(
            f"layer_plan: the schedule's {num_stages} stages on {num_ranks} ranks need a layer on each rank, the two "
            f"ends aside, and there are {config.num_layers}; from 1 to {max(1, config.num_layers + 2)} ranks are "
            "possible"
        )
    least = int(config.num_layers >= num_stages - 2)

    def load(times: Sequence[float]) -> np.ndarray:
        return np.bincount(home, times, num_stages)

    def badness(plan: tuple[int, ...]) -> tuple[float, ...]:
        times = stage_times(config, plan, costs)
        falling = [*sorted(load(times), reverse=True), *sorted(times, reverse=True)]
        return tuple(np.round(falling, 6 - int(np.log10(sum(times) + 1e-300))))

    def filled(dense: tuple[int, ...]) -> tuple[int, ...] | None:
        """The best plan with dense layers so: those with experts are alike, so each goes where least is to do."""
        first = len(dense) - 1  # the first stage that may have experts: dense layers come before
        shares = [*dense, *[least] * (num_stages - len(dense))]
        if len(dense) < num_stages:
            shares[-1] = 0
        if sum(shares) > config.num_layers:
            return None
        for _ in range(config.num_layers - sum(shares)):
            times = stage_times(config, shares, costs)
            busy = load(times)[home]
            shares[min(range(first, num_stages), key=lambda stage: (busy[stage], times[stage]))] += 1
        return tuple(shares)

    plans = list(filter(None, map(filled, _dense_shares(config.num_dense_layers, num_stages))))
    plans += _alike_between_ends(config.num_layers, num_stages)
    busiest = {plan: load(stage_times(config, plan, costs)).max() for plan in plans}
    # Every stage has room for as many layers as the deepest one, and each kind of stage is compiled: both are worth
    # more than the time of a dense layer more or less.
    near = [plan for plan in plans if busiest[plan] <= 1.01 * min(busiest.values())]
    return min(near, key=lambda plan: (max(plan), len(set(_contents(config, plan))), *badness(plan)))


@typechecked
def given_plan(config: Config, schedule: Scheduled, shares: Sequence[int]) -> tuple[int, ...]:
    """Layers of each stage as they are given, dense ones included; ``layer_plan`` where nothing is.

    Raises:
      ValueError: they are not of the schedule's stages, or do not add up to the model's layers.
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
    """All plans whose stages between the ends are equally deep."""
    between = max(0, num_stages - 2)
    for depth in range(1, num_layers + 1) if between else (0,):
        left = num_layers - between * depth
        if num_stages == 1:
            yield (num_layers,)
        elif left >= 0:
            yield from ((first, *[depth] * between, left - first) for first in range(left + 1))


def _dense_shares(num_dense: int, num_stages: int) -> Iterator[tuple[int, ...]]:
    """Each way in which dense layers can lie on the first stages, up to the last stage that has one: 2 ** num_dense."""
    for cuts in itertools.chain.from_iterable(
        itertools.combinations(range(num_dense), k) for k in range(min(num_stages, num_dense + 1))
    ):
        yield tuple(int(share) for share in np.diff([0, *cuts, num_dense]))


@dataclasses.dataclass(frozen=True)
class Content:
    """What a stage holds, and so what its kind runs.

    Attributes:
      first: whether it looks tokens up.
      dense: which dense layers it runs.
      num_moe: how many of its slots hold layers with experts; they come first.
      last: whether it has the head, and the modules of multi-token prediction, whose blocks take the next slots.
    """

    first: bool
    dense: range
    num_moe: int
    last: bool

    def name(self, like: "Sequence[Content]") -> str:
        """Name it by its place, and by its layers where those of the same place differ."""
        if self.first or self.last:
            return "only" if self.first and self.last else "first" if self.first else "last"
        if len({content for content in like if not (content.first or content.last)}) == 1:
            return "middle"
        dense = f"dense_{self.dense.start}_to_{self.dense.stop - 1}_" if self.dense else ""
        return f"middle_{dense}{self.num_moe}"


@dataclasses.dataclass(frozen=True, eq=False)
class Layout:
    """Where each layer of a model stands.

    Attributes:
      plan: layers of each stage, dense ones included.
      contents: what each stage holds.
      rows: int32 [P, slots], which row of the routers' figures a stage's slot belongs to: layers with experts in
        model order, then modules of multi-token prediction; -1 where a stage has fewer than the most.
    """

    plan: tuple[int, ...]
    contents: tuple[Content, ...]
    rows: np.ndarray

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(content.name(self.contents) for content in self.contents)

    @property
    def alike(self) -> dict[str, str]:
        """Kinds between the ends with as many layers of each sort as an earlier one, of which each names that one."""
        first: dict[tuple[int, int], str] = {}
        between = list(zip(self.kinds, self.contents, strict=True))[1:-1]
        likes = {kind: first.setdefault((len(c.dense), c.num_moe), kind) for kind, c in between}
        return {kind: like for kind, like in likes.items() if kind != like}

    def slot_of(self, row: int) -> tuple[int, int]:
        """Return the stage and slot of a layer with experts, or of a module of multi-token prediction, by its row."""
        stage, slot = np.argwhere(self.rows == row)[0]
        return int(stage), int(slot)


def lay_out(config: Config, plan: Sequence[int]) -> Layout:
    """Give each layer of a plan its place; a ValueError if shares do not add up, or no layer has experts."""
    _check(config, plan)
    contents = _contents(config, plan)
    used = [content.num_moe + content.last * config.num_mtp_layers for content in contents]
    filled = np.arange(max(used)) < np.asarray(used)[:, None]
    rows = np.where(filled, np.cumsum(filled).reshape(filled.shape) - 1, -1).astype(np.int32)
    return Layout(tuple(plan), tuple(contents), rows)


def _contents(config: Config, plan: Sequence[int]) -> list[Content]:
    contents, layer = [], 0
    for stage, share in enumerate(plan):
        dense = range(min(layer, config.num_dense_layers), min(layer + share, config.num_dense_layers))
        contents.append(Content(stage == 0, dense, share - len(dense), stage == len(plan) - 1))
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
