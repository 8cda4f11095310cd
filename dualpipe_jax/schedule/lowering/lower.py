"""Lower a schedule to the integer arrays that the engine's scan reads."""

import dataclasses

import numpy as np

from dualpipe_jax.arguments import typechecked
from dualpipe_jax.schedule.costs import CostModel
from dualpipe_jax.schedule.ir import Op, Schedule
from dualpipe_jax.schedule.lowering.flat import Flat, channels, flatten
from dualpipe_jax.schedule.lowering.lives import Values
from dualpipe_jax.schedule.lowering.table import Keeps, TickTable
from dualpipe_jax.schedule.lowering.ticks import place


@typechecked
def lower(schedule: Schedule, costs: CostModel | None = None, keeps: Keeps | None = None) -> TickTable:
    """Place a schedule's slots on ticks and its values in slots.

    Of several placements on ticks, the one that ends soonest under ``costs`` is taken; none changes the order
    in which a rank works. Raises ValueError when the ranks of the schedule wait for each other.

    >>> from dualpipe_jax.schedule import lower, zb_h1
    >>> table = lower(zb_h1(2, 2))
    >>> table.num_ticks, [unit.op for unit in table.units]
    (9, ['F', 'I', 'W'])
    >>> table.column("unit").T.tolist()  # what each rank does at each tick: the number of a unit, or -1
    [[0, 0, -1, -1, -1, 1, 2, 1, 2], [-1, -1, 0, 1, 0, 1, 2, 2, -1]]

    Arguments:
      schedule: any schedule that ``validate`` accepts.
      costs: the costs of a stage, by which slots are placed on ticks; all 1, a pair 3, when left out.
      keeps: the values that stages keep; None: all stages are of one kind, which keeps its input until its W.
    """
    flat = flatten(schedule)
    keeps = keeps or Keeps.alike(schedule.placement.num_model_stages)
    return tabulate(flat, place(flat, costs or CostModel()), keeps)


def forward_only(schedule: Schedule) -> Schedule:
    """The schedule with only its forwards, in the same order on each rank."""
    orders = tuple(
        tuple((action,) for slot in order for action in slot if action.op is Op.F)
        for order in schedule.orders
    )
    return dataclasses.replace(schedule, name=f"{schedule.name}_forward", orders=orders)


def tabulate(flat: Flat, ticks: np.ndarray, keeps: Keeps) -> TickTable:
    """The table of a placement: ``ticks`` holds the tick of each slot of ``flat``, one slot per rank and tick."""
    schedule, permutes, values = flat.schedule, channels(flat.schedule), Values(flat, ticks, keeps)
    filled = [name for name, lives in keeps.pools.items() if set(lives.values()) != {"IW"}]
    slot_of, num_slots = values.slots()
    columns = (
        *("unit", "F_microbatch", "F_stage", "F_x", "F_y", *(f"F_{pool}" for pool in filled)),
        *("G_microbatch", "G_stage", "G_x", "G_dy", "G_dx", *(f"G_{pool}" for pool in keeps.pools)),
        *(f"arrive{k}" for k in range(len(permutes))),
    )
    array = np.zeros((int(ticks.max(initial=-1)) + 1, schedule.num_ranks, len(columns)), np.int32)
    number = {name: k for k, name in enumerate(columns)}

    def put(name: str, slots, entries):
        array[ticks[slots], flat.rank[slots], number[name]] = entries

    units, unit_of = values.units()
    array[:, :, number["unit"]] = -1
    put("unit", np.arange(flat.num_slots), unit_of)
    works = [
        ("F", flat.f_slot, filled),
        ("G", flat.g_slot, [*keeps.pools]),
        ("G", flat.w_slot, [*keeps.pools]),
    ]
    for letter, slots, pools in works:
        mine = np.flatnonzero(slots >= 0)
        at = slots[mine]
        put(f"{letter}_microbatch", at, values.microbatch[mine])
        put(f"{letter}_stage", at, values.model_stage[mine])
        for pool in ("x", *pools):
            put(f"{letter}_{pool}", at, slot_of[pool][mine])
        if letter == "G":
            put("G_dy", at, slot_of["dy"][mine])

    hands_over = set()
    for name, pool in (
        ("F_y", "x"),
        ("G_dx", "dy"),
        *((f"arrive{k}", c.pool) for k, c in enumerate(permutes)),
    ):
        array[:, :, number[name]] = num_slots[pool] - 1
    for payload, pool, column, source, at in (
        ("y", "x", "F_y", flat.f_source, flat.f_slot),
        ("dx", "dy", "G_dx", flat.g_source, flat.g_slot),
    ):
        taken = np.flatnonzero((source >= 0) & (at >= 0))
        giver, slots = at[source[taken]], slot_of[pool][taken]
        here = values.rank[taken] == flat.rank[giver]
        put(column, giver[here], slots[here])
        hands_over |= {pool} if here.any() else set()
        for k, channel in enumerate(permutes):
            if channel.payload == payload:
                shift = (channel.pairs[0][1] - channel.pairs[0][0]) % schedule.num_ranks
                mine = ~here & ((values.rank[taken] - flat.rank[giver]) % schedule.num_ranks == shift)
                array[ticks[giver[mine]] + 1, values.rank[taken[mine]], number[f"arrive{k}"]] = slots[mine]
    every = ((True,) * len(permutes),)
    table = TickTable(
        schedule, units, columns, array, permutes, every, num_slots, frozenset(hands_over), keeps
    )
    awaited = {*zip(*(brings.tolist() for brings in table.brings(array)), strict=True), *every}
    return dataclasses.replace(table, together=tuple(sorted(awaited)))
