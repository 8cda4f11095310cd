"""Experts that move between steps: states in every placement, the update of copies, and whole runs."""

import io
import json
import shutil
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from rich.console import Console

from dualpipe_jax.balance import Layout as Slots
from dualpipe_jax.balance import LoadTracker, Placement, balance
from dualpipe_jax.engine import PlacedStages, Report
from dualpipe_jax.parallel import make_mesh
from dualpipe_jax.schedule import dualpipe, dualpipe_v, one_f_one_b
from models.placement import map_experts
from tests.parallel.test_placement import tables
from tests.train.state.test_checkpoint import NUMBERS, make_layout, random_flat
from tests.train.state.test_state import check_lies
from tests.train.test_step import adamw_by_hand
from train import setup
from train.checks import check
from train.config import ConfigError, configure
from train.figures.folder import CHECKPOINTS
from train.figures.step import device_load, step_record
from train.processes.group import Processes
from train.rebalance import Balancer
from train.run import run as whole_run
from train.state.layout import init_state
from train.state.placement import num_nodes, placed_layout, slots_per_device
from train.step import make_optimizer, make_update

E = NUMBERS.num_experts
LAYERS = NUMBERS.num_layers


def random_placement(num_devices, num_slots, seed):
    return Placement(tables(LAYERS, E, num_devices, num_slots, seed=seed), E)


def assert_lies(state, layout, placement, flat):
    """Weights and moments of every slot are those of the expert that is said to lie there."""
    checked = 0
    for name in ("params", "mu", "nu"):
        tree = state.params if name == "params" else optax.tree.get(state.opt_state, name)
        rows = layout.model.layout.rows
        for row in range(LAYERS):
            stage, slot = layout.model.layout.slot_of(row)
            assert rows[stage, slot] == row
            rank, local = next(
                (rank, local)
                for rank, held in enumerate(layout.schedule.placement.stages_on)
                for local, s in enumerate(held)
                if layout.schedule.placement.model_stage(s) == stage
            )
            if local >= len(tree["stages"].local):
                rank, local = layout.schedule.placement.num_ranks - 1 - rank, 0
            experts = tree["stages"].local[local]["layers"][slot]["mlp"]["experts"]
            for leaf in experts:
                wanted = flat[f"{name}/stages/layers/mlp/experts/{leaf}"][row]
                found = np.asarray(experts[leaf])[rank]
                np.testing.assert_array_equal(found, wanted[placement.experts[row].reshape(-1)], err_msg=leaf)
                checked += 1
    assert checked == 3 * LAYERS * 2


@pytest.mark.parametrize(
    ("recipe", "pp", "ep", "slots", "how"),
    [
        (one_f_one_b, 1, 2, 3, {"dp": 2, "shard": "parameters"}),
        pytest.param(dualpipe_v, 1, 4, 2, {}, marks=pytest.mark.slow),
        pytest.param(dualpipe, 2, 2, 4, {}, marks=pytest.mark.slow),
    ],
)
def test_weights_and_moments_lie_where_a_placement_says(recipe, pp, ep, slots, how):
    layout = placed_layout(make_layout(recipe, pp, ep, **how), slots, near=True)
    flat = random_flat(layout)
    state = layout.from_canonical(flat)
    assert layout.placement_of(state) == layout.initial_placement
    assert_lies(state, layout, layout.initial_placement, flat)
    for seed in (0, 1):
        placement = random_placement(ep, slots, seed)
        state = layout.rebalanced(state, placement)
        assert layout.placement_of(state) == placement
        assert_lies(state, layout, placement, flat)
        check_lies(state, layout.abstract)
    saved = layout.to_canonical(state)
    assert saved.keys() == flat.keys() == layout.in_order.canonical.keys()
    jax.tree.map(np.testing.assert_array_equal, saved, flat)
    plain = layout.plain(state)
    assert jax.tree.structure(plain) == jax.tree.structure(layout.in_order.abstract)


def test_copies_move_as_one_expert_that_has_all_their_gradients():
    """Two layers of four experts on two devices of three slots; AdamW by hand on each expert once.

    Of two replicas each has a half of every copy.
    """
    mesh, rng = make_mesh(1, 2, dp=2), np.random.default_rng(0)
    held = tables(2, E, 2, 3, seed=4)
    value = rng.normal(size=(2, E, 3, 2)).astype(np.float32)
    gradient = rng.normal(size=(2, 6, 3, 2)).astype(np.float32) * 4
    logical = np.zeros_like(value)
    for layer in range(2):
        np.add.at(logical[layer], held[layer].reshape(-1), gradient[layer])

    def tree(per_layer, shared):
        slots = [{"mlp": {"experts": {"w": w[None]}}} for w in per_layer]
        routing = {"bias": np.zeros((1, 2, E), np.float32), "row": np.arange(2, dtype=np.int32)[None]}
        return {"stages": {"layers": slots, "routing": routing}, "shared": {"a": shared}}

    def placed(params):
        tables = {"held": held[None].astype(np.int32), "copies": np.zeros((1, 2, 2, E, 2), np.int32)}
        stages = params["stages"] | {"routing": params["stages"]["routing"] | tables}
        return params | {"stages": PlacedStages((stages,), ((0,),))}

    def lie(path, leaf):
        cut = PartitionSpec("pp", "ep", None, "dp")
        over = cut if "experts" in jax.tree_util.keystr(path) else PartitionSpec()
        return jax.device_put(leaf, NamedSharding(mesh, over))

    shared, slope = rng.normal(size=(5,)).astype(np.float32), rng.normal(size=(5,)).astype(np.float32)
    spread = [value[layer][held[layer].reshape(-1)] for layer in range(2)]
    params = jax.tree_util.tree_map_with_path(lie, placed(tree(spread, shared)))

    def value_and_grad(params, batch):
        del batch
        grads = placed(tree(jnp.asarray(gradient), jnp.asarray(slope)))
        metrics = {"counts": jnp.asarray([[3, 1, 1, 3]] * 2, jnp.int32), "dropped": jnp.int32(0)}
        metrics |= {"devices": jnp.ones((2, 2), jnp.int32)}
        return (jnp.float32(0), Report({"lm": jnp.float32(0)}, metrics, jnp.int32(0))), grads

    optimizer = make_optimizer(0.1, clip=1.0, weight_decay=0.1)
    state = init_state(params, optimizer)
    update = make_update(value_and_grad, optimizer, 0.5, state)
    grads = {"experts": logical, "a": slope}
    plain = adamw_by_hand({"experts": value, "a": shared}, lambda now: grads, [0.1] * 3)
    norms = np.linalg.norm(logical), np.linalg.norm(slope)
    for _ in range(3):
        state, metrics = update(state, {})
        np.testing.assert_allclose(metrics["grad_norm"], np.hypot(*norms), rtol=1e-6)
        np.testing.assert_allclose(metrics["grad_norms"]["experts"], norms[0], rtol=1e-6)
    for layer in range(2):
        found = np.asarray(state.params["stages"].local[0]["layers"][layer]["mlp"]["experts"]["w"])[0]
        where = held[layer].reshape(-1)
        np.testing.assert_allclose(found, plain["experts"][layer][where], rtol=1e-5, atol=1e-6)
        for expert in range(E):
            copies = found[where == expert]
            assert all(np.array_equal(copy, copies[0]) for copy in copies)
    np.testing.assert_allclose(state.params["shared"]["a"], plain["a"], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(metrics["devices"], 1)
    bias = state.params["stages"].local[0]["routing"]["bias"]
    np.testing.assert_allclose(bias[0], 1.5 * np.array([[-1, 1, 1, -1]] * 2))


class FakeLayout:
    """Tells what it was asked to do."""

    num_layers, num_experts, num_devices, num_slots = 2, 4, 2, 3

    def __init__(self):
        self.initial_placement, self.asked = Placement.in_order(2, 4, 2, 3), []

    def rebalanced(self, state, placement):
        self.asked.append(placement)
        return [*state, "moved"]


COUNTS = np.array([[80, 10, 5, 5], [5, 80, 10, 5]], np.int32)


def test_experts_go_where_balance_puts_them():
    layout = FakeLayout()
    balancer = Balancer(layout, 4)
    assert [step for step in range(1, 9) if balancer.due(step)] == [4, 8]
    for _ in range(4):
        balancer.add(COUNTS)
    state, told = balancer.rebalance([], 4)
    tracker = LoadTracker.start(2, 4, half_life=2)
    for _ in range(4):
        tracker = tracker.add(COUNTS)
    wanted = balance(tracker.loads, Slots(2, 3), layout.initial_placement)
    assert state == ["moved"] and layout.asked == [wanted] and wanted != layout.initial_placement
    assert told["step"] == 4 and told["experts_moved"] == wanted.moves_from(layout.initial_placement).sum()
    assert told["device_load_before"] == pytest.approx(layout.initial_placement.imbalance(COUNTS).mean())
    assert told["device_load_after"] == pytest.approx(wanted.imbalance(COUNTS).mean())
    assert told["device_load_bound"] <= told["device_load_after"] < told["device_load_before"]
    assert told["event"].startswith("experts rebalanced: max/mean 1.")
    state, told = balancer.rebalance([], 8)
    assert state == [] and len(layout.asked) == 1 and told["experts_moved"] == 0


def test_a_resumed_run_has_its_placement_and_its_loads():
    first, second = FakeLayout(), FakeLayout()
    balancer, other = Balancer(first, 4), Balancer(second, 4)
    balancer.add(COUNTS)
    balancer.rebalance([], 4)
    saved = json.loads(json.dumps(balancer.to_json()))
    assert other.resume([], saved) == ["moved"] and second.asked == first.asked
    for one in (balancer, other):
        one.add(COUNTS[:, ::-1])
    assert other.to_json() == balancer.to_json()
    assert other.resume([], None) == [] and other.to_json() == Balancer(FakeLayout(), 4).to_json()
    # With another --rebalance-every steps weigh by today's half-life: after one step the earlier one is a half.
    other = Balancer(FakeLayout(), 2)
    other.resume([], saved)
    other.add(COUNTS[:, ::-1])
    loads = other.to_json()["loads"]
    np.testing.assert_allclose(loads["sums"], 0.5 * COUNTS + COUNTS[:, ::-1])
    assert (loads["half_life"], loads["weight"]) == (1, 1.5)
    # On other devices it is placed by the loads that were saved.
    balancer, layout = Balancer(FakeLayout(), 4), FakeLayout()
    balancer.add(COUNTS)
    layout.num_devices, layout.num_slots, layout.initial_placement = 4, 2, Placement.in_order(2, 4, 4, 2)
    assert Balancer(layout, 4).resume([], balancer.to_json()) == ["moved"]
    (placement,) = layout.asked
    assert placement.imbalance(COUNTS).max() < layout.initial_placement.imbalance(COUNTS).max()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"rebalance_every": 0}, "--rebalance-every 0: must be at least 1"),
        ({"redundant_experts": -1}, "--redundant-experts -1: must not be negative"),
        ({"rebalance_every": 5, "ep": 1}, "--rebalance-every 5: with --ep 1 one device has all experts of a layer; "
         "give --ep 2 or more, or --rebalance-every None"),
        ({"redundant_experts": 2, "ep": 1}, "--redundant-experts 2: .* give --ep 2 or more, or --redundant-experts 0"),
        ({"redundant_experts": 3, "ep": 4}, "3: with 8 experts makes 11, which --ep 4 devices cannot hold equally many "
         "of; try 0 or 4"),
        ({"redundant_experts": 25, "ep": 4}, "25: must be at most 24, with which each of the 4 devices has all 8"),
    ],
)  # fmt: skip
def test_options_that_do_not_fit_are_refused(options, told):
    config = configure(**options)
    with pytest.raises(ConfigError, match=told):
        check(config)
        slots_per_device(config, 8)


def test_slots_of_a_device():
    assert slots_per_device(configure(ep=4), 8) is None
    assert slots_per_device(configure(ep=4, rebalance_every=10), 8) == 2
    assert slots_per_device(configure(ep=4, redundant_experts=4), 8) == 3


def test_tokens_stay_near_or_are_spread_where_room_is_bounded(tmp_path):
    (tmp_path / "text.txt").write_text("a line\n" * 200)
    for options, near in (({}, True), ({"dispatch": "capacity"}, False)):
        asked = {"pp": 1, "schedule": "gpipe", "microbatches": 1, "sequence": 8, "redundant_experts": 2}
        run = setup.prepare(configure(data=(tmp_path / "text.txt",), eval_sequences=2, **asked, **options))
        assert run.layout.near is near and run.layout.num_slots == 5


def test_device_load_is_said_of_every_run_over_devices():
    counts = np.array([[6, 2, 1, 1], [0, 0, 0, 0], [1, 3, 4, 2]])
    record = step_record({"counts": counts}, with_load=False, num_devices=2)
    assert record["device_load"] == pytest.approx((8 / 5 + 6 / 5) / 2)
    devices = np.array([[5, 5], [0, 0], [10, 0]])
    record = step_record({"counts": counts, "devices": devices}, with_load=False, num_devices=2)
    assert record["device_load"] == pytest.approx((1 + 10 / 5) / 2) and "devices" not in record
    assert "device_load" not in step_record({"counts": counts}, with_load=False)
    assert device_load(np.zeros((0, 2))) == 1


def test_nodes_are_processes_with_equal_shares_in_a_row():
    def nodes(*processes):
        devices = [types.SimpleNamespace(process_index=process) for process in processes]
        grid = np.array(devices, object).reshape(1, 1, -1)
        return num_nodes(types.SimpleNamespace(devices=grid, shape={"ep": grid.size}))

    assert nodes(0, 0, 0, 0) == 1 and nodes(3, 3, 1, 1) == 2 and nodes(0, 1, 0, 1) == nodes(0, 0, 0, 1) == 1
    assert num_nodes(make_mesh(2, 4)) == 1


def test_every_leaf_of_experts_is_found_and_no_other():
    seen = []

    def note(leaf, routing):
        seen.extend(routing["name"].tolist())
        return leaf

    stage = {"layers": [{"mlp": {"experts": {"w": 1}, "gate": 2}}, {"mlp": {"experts": {"w": 1}}}]}
    names = ({"name": np.array([[stage + "0", stage + "1"]])} for stage in "ab")
    params = {"stages": PlacedStages(tuple(stage | {"routing": name} for name in names), ((0,), (1,)))}
    map_experts(note, {"mu": params, "nu": params, "experts": 3}, params)
    assert sorted(seen) == sorted(2 * ["a0", "a1", "b0", "b1"])


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Whole runs by their options' name: a plain one, one that moves and copies experts, and that one resumed."""
    folder = tmp_path_factory.mktemp("runs")
    text = folder / "text.txt"
    text.write_text("\n".join(f"line {number} of the text, {number**2}" for number in range(500)))
    base = configure(
        pp=1, ep=2, schedule="one_f_one_b", microbatches=2, microbatch_size=4, sequence=16, layers=1, steps=6,
        eval_sequences=8, data=(text,), runs=folder, bias_rate=0.0, checkpoint_every=3, warmup=1, load_every=1,
    )  # fmt: skip

    def go(name, resume=False, **options):
        config = configure(base, name=name, **options)
        check(config)
        whole_run(config, Console(file=io.StringIO()), Processes(), resume=resume)
        return list(map(json.loads, (folder / name / "metrics.jsonl").read_text().splitlines()))

    found = {"plain": go("plain"), "moved": go("moved", rebalance_every=2, redundant_experts=2)}
    shutil.copytree(folder / "moved", folder / "resumed")
    shutil.rmtree(folder / "resumed" / CHECKPOINTS / "6")  # as a kill after that of step 3 would have left it
    found["resumed"] = go("resumed", resume=True, rebalance_every=2, redundant_experts=2)
    return found


def curve(records, key="loss"):
    return [record[key] for record in records if key in record]


@pytest.mark.slow
def test_a_run_whose_experts_move_is_the_same_run(runs):
    """Resumed on the same devices it goes on to the last bit; its loads are evened out, and it says so."""
    for name in ("moved", "resumed"):
        for key in ("loss", "grad_norm", "heldout_loss"):
            found, rtol = curve(runs[name], key), 1e-6 if key == "loss" else 1e-5
            np.testing.assert_allclose(found, curve(runs["plain"], key), rtol=rtol, err_msg=name)
    loads = [record["load"] for record in runs["plain"] if "load" in record]
    assert loads == [record["load"] for record in runs["moved"] if "load" in record]
    for key in ("loss", "grad_norm", "device_load"):
        assert curve(runs["resumed"], key) == curve(runs["moved"], key)
    moves = [record for record in runs["moved"] if "experts_moved" in record]
    assert [record["step"] for record in moves] == [2, 4]
    assert moves[0]["experts_moved"] > 0 and moves[0]["device_load_after"] < moves[0]["device_load_before"]
    plain, moved = curve(runs["plain"], "device_load"), curve(runs["moved"], "device_load")
    assert sum(moved[2:]) < sum(plain[2:])
    assert not any("event" in record for record in runs["plain"])
