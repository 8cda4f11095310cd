"""Programs of users' own: found by name, counted by hand, updated as optax does it; with the package alone."""

import dataclasses
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from dualpipe_jax.engine import reference_value_and_grad
from dualpipe_jax.parallel import make_mesh
from dualpipe_jax.pods import Answer, Plan, Setting, ahead, loading
from dualpipe_jax.pods.dryrun import draw
from dualpipe_jax.pods.plain import filled, plain
from dualpipe_jax.pods.program import Blueprint, abstract_mesh
from dualpipe_jax.pods.results import Compiled, TargetFigures, Unit
from dualpipe_jax.schedule import dualpipe
from dualpipe_jax.schedule.lowering.unit_key import UnitKey
from tests.pods import own_program

ROOT = Path(__file__).parents[2]
FILE = Path(own_program.__file__)
PLAN = Plan(f"{FILE}:blocks", pp=2, ep=2, microbatches=4, microbatch_size=4, schedule="zb_h1")
DIM, HIDDEN = 4, 8
STAGE, FLOAT = 2 * DIM * HIDDEN, 4


def test_memory_of_a_users_program_by_hand():
    b = draw(PLAN, None, None)
    kinds = ahead.memory_by_kind(b)
    assert kinds["stages"] == STAGE * FLOAT and kinds["shared"] == DIM * FLOAT and kinds["mirrored"] == 0
    assert kinds["optimizer"] == 2 * (STAGE + DIM) * FLOAT + 4, "two averages, and how many steps"
    assert kinds["gradients"] == (STAGE + DIM) * FLOAT
    halves = "half of each microbatch's x and y, and the loss"
    assert kinds["batch"] == 2 * 4 * 2 * DIM * FLOAT + FLOAT, halves
    assert ahead.num_parameters(b.program.params) == 2 * STAGE + DIM
    assert ahead.num_parameters(b.params, device=True) == STAGE + DIM


@pytest.mark.parametrize("narrow", [False, True])
def test_what_is_stored_in_parts_is_counted_by_hand(narrow):
    """A matrix of each stage and the bias over ep and pp, gathered once a step; DualPipe's second copy is whole."""
    schedule, mesh = dualpipe(2, 4), abstract_mesh(2, 2)
    options = {
        "storage_specs": {"stages": {"up": P("ep"), "down": None}, "shared": {"bias": P(("pp", "ep"))}},
        "compute_dtype": {"stages": {"up": jnp.bfloat16, "down": None}} if narrow else None,
    }
    program = own_program.blocks(Setting(PLAN, schedule, mesh))
    b = Blueprint(dataclasses.replace(program, pipeline=options), schedule, mesh)
    kinds, sizes = ahead.memory_by_kind(b), ahead.rank_memory(b)
    half, up = STAGE // 2, STAGE // 2 * (2 if narrow else FLOAT)
    stored = (half // 2 + half) * FLOAT, DIM // 4 * FLOAT
    optimizer = 2 * (half // 2 + half + DIM // 4) * FLOAT + 4
    assert (kinds["stages"], kinds["shared"], kinds["optimizer"]) == (*stored, optimizer)
    assert kinds["cast"] == up + DIM * FLOAT and kinds["mirrored"] == up + half * FLOAT
    assert kinds["gradients"] == (2 * STAGE + DIM) * FLOAT
    assert sizes.parameters == up + half * FLOAT + STAGE * FLOAT
    beside = half // 2 * FLOAT  # the part of up that is stored
    assert sizes.fixed == beside + stored[1] + 2 * DIM * FLOAT + optimizer + kinds["batch"]
    assert ahead.num_parameters(b.params, device=True) == half // 2 + half + DIM // 4
    assert ahead.num_parameters(b.program.params) == 2 * STAGE + DIM
    assert [leaf.sharding.spec for leaf in jax.tree.leaves(b.used)] == [P(), P("pp"), P("pp")]


def test_without_an_update_nothing_is_kept_for_one():
    b = draw(Plan(**{**plain(PLAN), "set": ("learns=0", "dim=6")}), None, None)
    kinds = ahead.memory_by_kind(b)
    assert kinds["optimizer"] == 0 and kinds["stages"] == 2 * 6 * HIDDEN * FLOAT


@pytest.mark.parametrize("frozen", [False, True])
def test_the_step_is_optaxs(frozen):
    """Compiled as `--compile step` does, run, and compared with optax on the plain model's gradients."""
    schedule, mesh = PLAN.make_schedule(), make_mesh(2, 2)
    program = own_program.blocks(Setting(PLAN, schedule, mesh))
    stays = {"stages": {"up": frozen, "down": False}, "shared": False}
    program = dataclasses.replace(program, pipeline=program.pipeline | {"frozen": stays})
    b = Blueprint(program, schedule, mesh, fuse_pairs=False)
    compiled = ahead.lower_step(b).compile()
    counted = sum(ahead.memory_by_kind(b)[kind] for kind in ("stages", "shared", "optimizer"))
    assert compiled.memory_analysis().argument_size_in_bytes == counted + ahead.nbytes(b.batch)
    random = np.random.default_rng(0)

    def noise(tree):
        return jax.tree.map(lambda leaf: jnp.float32(random.standard_normal(leaf.shape)), tree)

    params, batch = noise(program.params), noise(program.batch)
    optimizer = optax.adam(own_program.RATE)
    (objective, _), grads = reference_value_and_grad(program.model)(params, batch)
    with jax.numpy_dtype_promotion("standard"):
        updates, _ = optimizer.update(grads, optimizer.init(params), params)
    lies = jax.tree.map(lambda leaf: leaf.sharding, (b.update.state, b.batch))
    placed = b.pipeline.place(params)
    state = jax.device_put(optimizer.init(b.pipeline.trained(placed)), lies[0])
    trained = [*jax.tree.leaves(program.params["shared"]), program.params["stages"]["down"]]
    moments = 2 * (ahead.nbytes(trained) + (0 if frozen else ahead.nbytes(program.params["stages"]["up"])))
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(state)) == moments + 4, (
        "a count of steps, and two averages"
    )
    new, _, loss = compiled(placed, state, jax.device_put(batch, lies[1]))
    np.testing.assert_allclose(loss, objective, rtol=1e-5)
    wanted = optax.apply_updates(params, updates)
    if frozen:
        wanted["stages"]["up"] = params["stages"]["up"]
    for a, c in zip(*map(jax.tree.leaves, (b.pipeline.unplace(new), wanted)), strict=True):
        np.testing.assert_allclose(a, c, rtol=1e-4, atol=1e-5)


def test_the_package_alone_is_enough(tmp_path):
    """Where there is the package and a user's file, and neither trainer nor models."""
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "dualpipe_jax").symlink_to(ROOT / "dualpipe_jax")
    (tmp_path / "mine.py").write_text(FILE.read_text())
    # Where scripts/test runs, every process would find the checkout's.
    hidden = "import sys\nsys.modules.update(train=None, models=None)\n"
    (tmp_path / "lib" / "sitecustomize.py").write_text(hidden)

    command = "-m dualpipe_jax dryrun --target v5e:2x2 --program mine:blocks --pp 2 --ep 2 --schedule zb_h1"
    command = [sys.executable, *command.split(), "--compile", "nothing", "--json"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "lib"), "XLA_FLAGS": ""}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = filled(Answer, json.loads(done.stdout))
    assert found.memory.kinds["stages"] == STAGE * FLOAT and found.parameters.total == 2 * STAGE + DIM
    assert found.program.model == "mine:blocks" and found.program.microbatches == 8


def test_models_of_the_trainer_are_not_in_the_package(monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "train" else found(name))
    for look, message in (
        (
            lambda: loading.find("v3"),
            "--program v3: a name without a module is a model of the trainer, which is in",
        ),
        (
            lambda: loading.registered("--what prefill and decode: serving is"),
            "--what prefill and decode: serving is in the repository and not in the installed package",
        ),
    ):
        with pytest.raises(ValueError, match="^" + re.escape(message)):
            look()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no.py:step", "--program no.py:step: there is no file no.py"),
        (f"{FILE}:block", f"--program {FILE}:block: {FILE} has no function block; did you mean blocks?"),
        (f"{FILE}:NUMBER", f"--program {FILE}:NUMBER: {FILE} has no function NUMBER; it has blocks, forgets, fails"),
        ("no.such:step", "--program no.such:step: there is no module no.such on Python's path or in this folder; a"),
        (":step", "--program :step: wants FILE.py:name or package.module:name"),
        ("tests.pods.own_program:forgets", "--program tests.pods.own_program:forgets: returns NoneType; it must be a"),
    ],
)  # fmt: skip
def test_programs_that_there_are_not(name, message):
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        draw(Plan(name, pp=2, ep=2), None, None)


def test_changes_that_it_does_not_take_and_mistakes_inside():
    message = r"blocks\(\) got an unexpected keyword argument 'width'; it is called"
    with pytest.raises(ValueError, match=message):
        draw(Plan(f"{FILE}:blocks", pp=2, ep=2, set=("width=3",)), None, None)
    with pytest.raises(TypeError, match="^a mistake inside$"):
        draw(Plan(f"{FILE}:fails", pp=2, ep=2), None, None)
    assert loading.find("tests.pods.own_program:blocks") is own_program.blocks


def test_results_come_back_from_json():
    unit = Unit(3.0, 2.0, 1.0, 1.0, 0)
    found = Answer(
        TargetFigures("v5e:4x4", 16, 2**34, 197e12, 819e9, 1.5e9),
        PLAN,
        compiled=Compiled(
            "units", units={UnitKey("F"): unit, UnitKey("FB", ("first", "last")): unit}, options={"a": "b"}
        ),
    )
    assert filled(Answer, json.loads(json.dumps(plain(found)))) == found
    assert plain(unit)["over_limit"] == 1.5 and plain(unit)["over_sum"] == 1.0
