"""Experts over devices: DeepSeek's load balancer and ours, on the same loads.

DeepSeek's algorithm is written here from its description, as a plain loop over layers, items and packs, in
Python's own numbers. Rows are loads (of 58 layers x 256 experts) and layouts (slots, devices); columns are
max/mean over devices (averaged over layers), its proven lower bound, and CPU milliseconds of one core.
Further tables show what a placement gains from a few moves after loads have drifted, and for random cases of
all sizes how often ours is worse.

    OMP_NUM_THREADS=1 python benchmarks/balance.py [--cases 1000]
"""

import argparse
import time
from collections.abc import Callable, Sequence

import numpy as np

from dualpipe_jax.balance import Layout, Placement, balance, bound_of, outlook, rebalance_experts

LAYOUTS = ((288, 32), (320, 64), (288, 144), (288, 96), (256, 32), (288, 288))
LAYERS, EXPERTS = 58, 256


def pack(weights: Sequence[float], packs: int) -> list[list[int]]:
    """Put items into packs of equally many: the heaviest item first, each into the lightest pack that has room."""
    room = len(weights) // packs
    if room == 1:
        return [[item] for item in range(len(weights))]
    held: list[list[int]] = [[] for _ in range(packs)]
    filled = [0.0] * packs
    for item in sorted(range(len(weights)), key=lambda item: -weights[item]):
        lightest = min((p for p in range(packs) if len(held[p]) < room), key=filled.__getitem__)
        held[lightest].append(item)
        filled[lightest] += weights[item]
    return held


def replicate(weights: Sequence[float], copies: int) -> tuple[list[int], list[int]]:
    """The item of each copy, and the copies of each item: each further copy is of the item with the heaviest copies."""
    item, counts = list(range(len(weights))), [1] * len(weights)
    for _ in range(copies - len(weights)):
        heaviest = max(range(len(weights)), key=lambda at: weights[at] / counts[at])
        item.append(heaviest)
        counts[heaviest] += 1
    return item, counts


def deepseek(weight: np.ndarray, replicas: int, groups: int, nodes: int, gpus: int) -> list[list[list[int]]]:
    """The experts on each device of each layer, [layers][gpus][slots], by DeepSeek's algorithm."""
    if groups % nodes:
        groups = nodes = 1
    size = weight.shape[1] // groups
    placed = []
    for row in weight.tolist():
        of_group = [sum(row[group * size : (group + 1) * size]) for group in range(groups)]
        devices = []
        for held in pack(of_group, nodes):
            experts = [group * size + at for group in held for at in range(size)]
            weights = [row[expert] for expert in experts]
            item, counts = replicate(weights, replicas // nodes)
            shares = [weights[at] / counts[at] for at in item]
            devices += [[experts[item[copy]] for copy in own] for own in pack(shares, gpus // nodes)]
        placed.append(devices)
    return placed


def imbalance(weight: np.ndarray, placed: np.ndarray) -> np.ndarray:
    """Max/mean of the devices' loads, [layers]; ``placed`` is [layers, gpus, slots], and copies share a load evenly."""
    found = []
    for row, devices in zip(weight, placed, strict=True):
        share = row / np.maximum(np.bincount(devices.ravel(), minlength=len(row)), 1)
        loads = share[devices].sum(-1)
        found.append(loads.max() / loads.mean() if loads.mean() else 1.0)
    return np.array(found)


def doubles(placed: np.ndarray) -> np.ndarray:
    """Whether a layer has two copies of an expert on one device, [layers]."""
    ordered = np.sort(placed, -1)
    return (ordered[..., 1:] == ordered[..., :-1]).any((-1, -2))


def cpu_ms(work: Callable[[], object], runs: int = 3) -> float:
    times = []
    for _ in range(runs):
        began = time.process_time()
        work()
        times.append(time.process_time() - began)
    return 1e3 * min(times)


def loads_of(name: str, random: np.random.Generator) -> np.ndarray:
    if name == "uniform":
        return random.random((LAYERS, EXPERTS))
    if name == "zipf 1.0":
        return np.stack([random.permutation(1 / np.arange(1, EXPERTS + 1)) for _ in range(LAYERS)])
    return np.exp(random.normal(size=(LAYERS, EXPERTS)))


def table() -> None:
    print(
        "| loads | slots, devices | in order | DeepSeek's | its double copies | ours | bound | its CPU ms | ours |"
    )
    print("| --- | --- " + "| ---: " * 7 + "|")
    for name in ("uniform", "zipf 1.0", "lognormal"):
        loads = loads_of(name, np.random.default_rng(0))
        for replicas, devices in LAYOUTS:
            layout = Layout(devices, replicas // devices)
            theirs = np.array(deepseek(loads, replicas, 1, 1, devices))
            ours = balance(loads, layout)
            plain = Placement.in_order(LAYERS, EXPERTS, devices, layout.num_slots)
            figures = [
                f"{plain.imbalance(loads).mean():.2f}",
                f"{imbalance(loads, theirs).mean():.4f}",
                f"{doubles(theirs).mean():.0%} of layers",
                f"{imbalance(loads, ours.experts).mean():.4f}",
                f"{bound_of(loads, layout).mean():.4f}",
                f"{cpu_ms(lambda: deepseek(loads, replicas, 1, 1, devices)):.0f}",  # noqa: B023  called at once
                f"{cpu_ms(lambda: balance(loads, layout)):.0f}",  # noqa: B023
            ]
            print(f"| {name} | {replicas}, {devices} | {' | '.join(figures)} |", flush=True)
    vectorised = cpu_ms(lambda: rebalance_experts(loads, 288, 1, 1, 32))
    print(f"\nrebalance_experts, DeepSeek's result from arrays, 288 slots on 32 devices: {vectorised:.0f} ms")


def random_case(random: np.random.Generator, smallest: int) -> tuple[np.ndarray, Layout]:
    """Random loads and a layout: any number of devices and slots, flat or by groups, six kinds of loads."""
    while True:
        experts = int(
            random.choice([e for e in (4, 6, 8, 12, 16, 24, 32, 48, 64, 128, 256) if e >= smallest])
        )
        devices, slots = int(random.choice([2, 3, 4, 6, 8, 12, 16, 24, 32, 64])), int(random.integers(1, 10))
        if experts <= devices * slots and slots <= experts:
            break
    layers = int(random.integers(1, 4))
    size = layers, experts
    kind = random.integers(6)
    if kind == 0:
        loads = random.random(size)
    elif kind == 1:
        ranks = np.arange(1, experts + 1) ** random.uniform(0.3, 1.5)
        loads = np.stack([random.permutation(1 / ranks) for _ in range(layers)])
    elif kind == 2:
        loads = np.exp(random.uniform(0.1, 2) * random.normal(size=size))
    elif kind == 3:
        loads = random.integers(0, random.choice([3, 20, 1000]), size).astype(float)
    elif kind == 4:
        loads = random.multinomial(4096, random.dirichlet(np.full(experts, 0.3)), layers).astype(float)
    else:
        loads = np.ones(size)
    nodes = [n for n in (2, 4, 8) if devices % n == 0 and experts % n == 0 and slots <= experts // n]
    grouped = [(n, g) for n in nodes for g in (n, 2 * n, 4 * n) if experts % g == 0]
    if grouped and random.random() < 0.3:
        return loads, Layout(devices, slots, *grouped[random.integers(len(grouped))])
    return loads, Layout(devices, slots)


def cases(count: int, smallest: int) -> None:
    random = np.random.default_rng(1)
    worse, because, ratio, layers = 0, 0, [], 0
    for _ in range(count):
        loads, layout = random_case(random, smallest)
        groups, nodes = layout.num_groups or 1, layout.num_nodes
        theirs = np.array(deepseek(loads, layout.num_replicas, groups, nodes, layout.num_devices))
        before, after = imbalance(loads, theirs), imbalance(loads, balance(loads, layout).experts)
        lost = after > before * (1 + 1e-9)
        worse, because = worse + int(lost.sum()), because + int((lost & doubles(theirs)).sum())
        layers += len(loads)
        ratio.append(after.mean() / before.mean())
    print(
        f"\n{count} random cases of {smallest} experts or more, {layers} layers: worse than DeepSeek's in {worse} "
        f"layers, in {because} of which that has two copies of an expert on one device; max/mean on average "
        f"{1 - np.mean(ratio):.1%} lower"
    )


def moves() -> None:
    random = np.random.default_rng(2)
    layout, loads = Layout(32, 9), loads_of("lognormal", random)
    placed = balance(loads, layout)
    later = loads * np.exp(0.3 * random.normal(size=loads.shape))
    print(
        f"\n{LAYERS} layers on 32 devices of 9 slots; lognormal loads have drifted by factors of exp(0.3 N(0, 1))\n"
    )
    print("| at most | moved | max/mean | less for the busiest devices | CPU ms |")
    print("| ---: | ---: | ---: | ---: | ---: |")
    for limit in (0, 58, 290, 580, 1450, None):
        moved = balance(later, layout, placed, max_moves=limit)
        found = outlook(later, moved, placed, layout)
        spent = cpu_ms(lambda: balance(later, layout, placed, max_moves=limit), 1)  # noqa: B023  called at once
        cells = ("any" if limit is None else limit, found.moves.sum(), f"{found.after.mean():.4f}")
        print(f"| {' | '.join(map(str, cells))} | {found.gain:.1%} | {spent:.0f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--cases", type=int, default=1000, help="number of random cases; 0 for none")
    args = parser.parse_args()
    table()
    moves()
    if args.cases:
        cases(args.cases, 32)
        cases(args.cases, 4)


if __name__ == "__main__":
    main()
