"""Checkpoints: what comes back, under which layouts, and what happens to what is damaged, foreign or has no room."""

import builtins
import errno
import gc
import io
import json
import os
import platform
import re
import resource
import shutil
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import models
from dualpipe_jax.parallel import EP, make_mesh
from dualpipe_jax.schedule import dualpipe_v, one_f_one_b
from tests.train.state.test_state import check_lies
from train.__main__ import main
from train.config import CheckpointConfig, configure
from train.errors import CheckpointError
from train.figures.folder import CHECKPOINTS
from train.options import options_as_dict
from train.processes.group import Processes
from train.state import checkpoint
from train.state.checkpoint import DAMAGED_FOLDER, Checkpoints, _read, verify
from train.state.facts import describe, describe_changes, refuse_foreign
from train.state.layout import Layout
from train.step import make_optimizer

OPTIMIZER = make_optimizer(lambda step: 1e-3, clip=1.0, weight_decay=0.1)
NUMBERS = models.tiny(
    num_layers=2, num_dense_layers=0, num_experts=4, num_groups=1, top_groups=1, top_k=2, dim=16,
    q_lora_rank=0,
)  # fmt: skip
RECORD = {"loss": 2.5}


def make_layout(recipe=one_f_one_b, pp=2, ep=2, dp=1, shard="nothing"):
    schedule = recipe(pp, 12)
    model = models.deepseek(NUMBERS, schedule.placement.num_model_stages, ep_axis=EP)
    return Layout(model, schedule, make_mesh(pp, ep, dp=dp), OPTIMIZER, shard)


@pytest.fixture(scope="module")
def layout():
    return make_layout()


def random_flat(layout):
    """A canonical state whose every value is another, at step 3."""
    rng = np.random.default_rng(1)
    return {
        name: rng.standard_normal(leaf.shape).astype(leaf.dtype) if leaf.ndim else np.int32(3)
        for name, leaf in layout.canonical.items()
    }


@pytest.fixture(scope="module")
def state(layout):
    return layout.from_canonical(random_flat(layout))


class Run:
    """A run's checkpoints, opened anew for every act, as another process would."""

    def __init__(self, folder, layout, state):
        self.folder, self.layout, self.state, self.said = folder, layout, state, []

    def open(self, layout=None, keep=3, keep_every=None, every=None, minutes=None, count=1, **options):
        layout = self.layout if layout is None else layout
        numbers, corpus = options.pop("numbers", NUMBERS), options.pop("corpus", "c")
        mesh = {axis: layout.mesh.shape.get(axis, 1) for axis in ("dp", "pp", "ep")}
        config = configure(schedule=layout.schedule.name, shard=layout.shard, **mesh, **options)
        facts = describe(config, numbers, corpus, layout.canonical)
        when = CheckpointConfig(every=every, minutes=minutes, keep=keep, keep_every=keep_every)
        return Checkpoints(self.folder, when, layout, facts, self.said.append, Processes(count=count))

    def save(self, *steps, **options):
        with self.open(**options) as checkpoints:
            for step in steps:
                checkpoints.save(step, self.state, RECORD | {"step": step}, [[1, 2]])
                checkpoints.finish(step)

    def restore(self, layout=None, **options):
        with self.open(layout, **options) as checkpoints:
            return checkpoints.restore()

    def steps(self):
        return sorted(int(path.name) for path in (self.folder / CHECKPOINTS).iterdir())

    def damage(self, step, flip=True):
        """Flip a bit of the step's largest file, or take the file away."""
        files = [path for path in (self.folder / CHECKPOINTS / str(step)).rglob("*") if path.is_file()]
        largest = max(files, key=lambda path: path.stat().st_size)
        content = bytearray(largest.read_bytes())
        content[len(content) * 3 // 4] ^= 4  # in the middle Orbax itself would notice
        largest.write_bytes(content) if flip else largest.unlink()


@pytest.fixture
def run(tmp_path, layout, state):
    return Run(tmp_path, layout, state)


def assert_equal(found, layout, state, own):
    """By their canonical forms, ``own`` being the layout of what was found."""
    found, expected = own.to_canonical(found), layout.to_canonical(state)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_what_is_saved_comes_back(run, layout, state):
    assert run.restore() is None, "nothing saved is no error"
    run.save(3)
    found = run.restore()
    assert_equal(found, layout, state, layout)
    check_lies(found, state)
    assert run.said == []


@pytest.mark.parametrize(
    ("layout_now", "told"),
    [
        ((dualpipe_v, 1, 1), "schedule one_f_one_b -> dualpipe_v, pp 2 -> 1, ep 2 -> 1"),
        ((one_f_one_b, 2, 2, 2, "parameters"), "dp 1 -> 2, shard nothing -> parameters"),
    ],
)
def test_it_comes_back_under_another_layout(layout_now, told, run, layout, state):
    """Bit for bit, where that layout wants it."""
    run.save(3)
    now = make_layout(*layout_now)
    found = run.restore(now)
    assert_equal(found, layout, state, now)
    check_lies(found, now.abstract)
    assert run.said == [f"warning: not bit for bit: layout changed, {told}"]


def test_saved_arrays_outlive_the_steps_that_follow(run, layout):
    """The next step takes the state's memory while it is still being written."""
    expected = {name: np.asarray(leaf).copy() for name, leaf in layout.to_canonical(run.state).items()}
    state = layout.from_canonical(expected)
    clear = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf * 0, tree), donate_argnums=0)
    with run.open() as checkpoints:
        checkpoints.save(3, state, RECORD, [])
        clear(state)
        checkpoints.finish(3)
    assert_equal(run.restore(), layout, run.state, layout)


def test_the_latest_are_kept_and_every_mth(run):
    run.save(1, 2, 3, 4, 5, 6, keep=2, keep_every=3)
    assert run.steps() == [3, 5, 6]


def test_when_a_checkpoint_is_due(run, monkeypatch):
    with run.open(every=3) as checkpoints:
        assert [step for step in range(1, 8) if checkpoints.due(step)] == [3, 6]
    clock = [1000.0]
    monkeypatch.setattr("train.state.checkpoint.time.monotonic", lambda: clock[0])
    with run.open(minutes=2.0) as checkpoints:
        clock[0] += 119
        assert not checkpoints.due(1)
        clock[0] += 1
        assert checkpoints.due(2)
        with monkeypatch.context() as patched:
            patched.setattr(checkpoints, "wait", lambda: clock.append(clock.pop() + 7))
            checkpoints.save(2, run.state, RECORD, [])
        assert checkpoints.blocked_seconds == 7
        assert not checkpoints.due(3)
        clock[0] += 120
        assert checkpoints.due(4)


def test_damaged_steps_are_put_aside_and_the_one_before_is_taken(run, layout, state):
    """One of a flipped bit, one whose largest file is gone."""
    run.save(2, 3, 4)
    run.damage(4)
    run.damage(3, flip=False)
    whole, gone, flipped = verify(run.folder)
    assert (whole.step, whole.problem, gone.step, flipped.step) == (2, None, 3, 4)
    assert gone.problem and "1 of 51 arrays are not what was saved, such as params/" in flipped.problem
    with run.open() as checkpoints:
        assert_equal(checkpoints.restore(), layout, state, layout)
        assert [text.partition(":")[0] for text in run.said] == ["warning"] * 3
        assert all(f"{step} is damaged: " in text for step, text in zip((4, 3), run.said, strict=False))
        assert run.steps() == [2]
        aside = sorted(path.name.partition(".")[0] for path in (run.folder / DAMAGED_FOLDER).iterdir())
        assert aside == ["3", "4"]
        checkpoints.save(3, state, RECORD, [])  # the run comes there again
        checkpoints.finish(3)
    assert [(step, problem) for step, problem, _ in verify(run.folder)] == [(2, None), (3, None)]


@pytest.mark.parametrize("times", [2, 9])
def test_a_disk_that_cannot_be_read_damages_nothing(times, run, layout, state, monkeypatch):
    """It is tried again; where that does not help nothing is put aside."""
    run.save(3)
    monkeypatch.setattr(checkpoint, "READ_RETRY_WAITS_S", (0.0,) * 3)
    left = [times]
    with run.open() as checkpoints:
        load = checkpoints._store.load

        def failing(*arguments):
            left[0] -= 1
            if left[0] >= 0:
                raise ValueError("tensorstore") from OSError(errno.EIO, "Input/output error")
            return load(*arguments)

        monkeypatch.setattr(checkpoints._store, "load", failing)
        if times == 2:
            assert_equal(checkpoints.restore(), layout, state, layout)
        else:
            told = "step 3 cannot be read: .*; tried 4 times. It is left where"
            with pytest.raises(CheckpointError, match=told):
                checkpoints.restore()
    assert run.steps() == [3] and not (run.folder / DAMAGED_FOLDER).exists() and run.said == []


def test_a_disk_that_cannot_read_the_facts_damages_nothing(run, layout, state, monkeypatch):
    """Orbax logs what the disk says, and goes on as though nothing were written there."""
    run.save(2, 3)
    monkeypatch.setattr(checkpoint, "READ_RETRY_WAITS_S", (0.0,) * 3)
    ours, left = io.open, [0]

    def failing(file, *arguments, **options):
        if str(file).endswith("3/_CHECKPOINT_METADATA") and left[0]:
            left[0] -= 1
            raise OSError(errno.EIO, "Input/output error")
        return ours(file, *arguments, **options)

    for module in (io, builtins):
        monkeypatch.setattr(module, "open", failing)
    with run.open() as checkpoints:
        left[0] = 2
        assert_equal(checkpoints.restore(), layout, state, layout)
        assert checkpoints.restored["step"] == 3
        left[0] = 1000
        with pytest.raises(CheckpointError, match="step 3 cannot be read: OSError: .*; tried 4 times"):
            checkpoints.restore()
        left[0] = 0
    assert run.steps() == [2, 3] and run.said == []


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory, layout, state):
    run = Run(tmp_path_factory.mktemp("run"), layout, state)
    run.save(2, 3)
    return run


@pytest.mark.thin(5)
@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize(
    ("file", "told"),
    [
        ("state", "No valid PyTree"),
        ("_CHECKPOINT_METADATA", "_CHECKPOINT_METADATA"),
        ("state/_METADATA", "No valid PyTree|JSONDecodeError"),
        ("state/array_metadatas/process_0", "JSONDecodeError"),
        ("state/manifest.ocdbt", "does not exist|manifest: Length in header"),
        ("state/d/*", "state/d/|Requested byte range"),
        ("state/ocdbt.process_0/d/*", "shard has size of 0 bytes|Requested byte range"),
    ],
)
def test_what_is_damaged_is_a_line_and_the_step_before_is_taken(
    two_steps, tmp_path, layout, state, file, told, cut, capfd, caplog
):
    """Any file may be gone, as a kill leaves it while an old step is taken away, or end too soon."""
    run = Run(tmp_path / "run", layout, state)
    shutil.copytree(two_steps.folder, run.folder)
    for path in (run.folder / CHECKPOINTS / "3").glob(file):
        if cut and path.is_file():
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 4])
        else:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    code = main(["--check", str(run.folder)])
    assert_equal(run.restore(), layout, state, layout)
    gc.collect()
    out, err = capfd.readouterr()
    checked, said = out.splitlines(), "\n".join(run.said)
    assert len(checked) == 2 and checked[0].startswith("step 2: whole")
    if not cut and "array_metadatas" in file:  # it can do without
        assert (code, said) == (0, "") and checked[1].startswith("step 3: whole")
    else:
        assert code == 1 and re.search(f"^step 3: damaged: .*({told})", checked[1]) and len(checked[1]) < 300
        assert len(run.said) == 2 and re.search(f"/3 is damaged: .*({told})", run.said[0])
        assert run.said[1].endswith("damaged: step 3; going on from step 2")
    printed = err + caplog.text
    assert not re.search("Traceback|_CHECKPOINT_METADATA", printed)
    assert not re.search("ShapeDtypeStruct|tensorstore_spec|handlers", said + checked[1] + printed)


def test_no_whole_step_at_all_is_said(run):
    run.save(2)
    run.damage(2)
    told = r"none of the checkpoints in .* is whole \(steps 2\); begin anew under"
    with pytest.raises(CheckpointError, match=told):
        run.restore()
    assert run.steps() == [2], "nothing is moved that nothing replaces"


def test_another_runs_checkpoint_is_refused(run):
    run.save(3)
    for options, message in (
        (dict(seed=1), "the seed differs: 0 saved, 1 now"),
        (dict(corpus="d"), "the text .* differs: c saved, d now"),
        (dict(numbers=models.tiny(num_layers=2)), "the model differs: dim 16 -> 64, num_dense_layers 0 -> 1"),
    ):
        with pytest.raises(CheckpointError, match=f"is of another run: {message}.*; .*|{message}"):
            run.restore(**options)
    assert run.steps() == [3]
    ours = describe(configure(), NUMBERS, "c", run.layout.canonical)
    for fact in ("format", "model", "arrays", "corpus", "tokenizer", "seed"):
        with pytest.raises(CheckpointError, match=r"here is of another run: .* differs: [^;]*\. Resume"):
            refuse_foreign(ours | {fact: "another"}, ours, "here")
    refuse_foreign(ours | {"layout": {}, "options": {}, "published": {}, "versions": {}}, ours, "here")


def test_changed_options_are_said(run):
    run.save(3)
    run.restore(steps=500, learning_rate=1e-3, log_every=3)
    told = "optimizer.steps 250 -> 500, optimizer.learning_rate None -> 0.001"
    assert run.said == [f"warning: options changed: {told}"]
    run.restore(ep_nodes=2)
    assert run.said[1:] == ["warning: options changed: step.ep_nodes 1 -> 2"], "it adds in another order"


def test_options_that_there_were_not_yet_are_no_change():
    same = {"layout": {}, "platform": {}, "versions": {}}
    ours = same | {"options": options_as_dict(configure())}
    saved = same | {"options": {"step": {"pp": 2, "remat": "all"}, "optimizer": {"steps": 3}}}
    told = "optimizer.steps 3 -> 250, step.remat all -> none"
    assert [set(line.split(": ")[1].split(", ")) for line in describe_changes(saved, ours)] == [
        set(told.split(", "))
    ]


def test_a_full_disk_costs_a_checkpoint_and_not_the_run(run, layout, state, monkeypatch, caplog):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    run.save(1)
    with run.open() as checkpoints:
        assert checkpoints.restore() is not None, "which silences Orbax itself, and not only until its end"
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))  # no file may grow beyond
        try:
            checkpoints.save(2, state, RECORD, [])
            told = "step 2 could not be saved, .* newest that was is step 1. With room"
            with pytest.raises(CheckpointError, match=told):
                checkpoints.finish(2)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert len(run.said) == 1
        told = "warning: step 2 could not be saved: ValueError: OUT_OF_RANGE: .*: File too large; training goes on, and"
        assert re.match(told, run.said[0]) and len(run.said[0]) < 350 and "Traceback" not in caplog.text
        monkeypatch.setattr(checkpoint, "RETRY_S", 1e9)
        assert not checkpoints.due(2)
        monkeypatch.setattr(checkpoint, "RETRY_S", 0)
        assert checkpoints.due(2)
        checkpoints.save(3, state, RECORD, [])
        checkpoints.finish(3)
    assert_equal(run.restore(), layout, state, layout)
    assert run.steps() == [1, 3]


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("late", [False, True])
def test_what_cannot_be_saved_is_told_at_the_end_too(late, count, run, state, monkeypatch):
    """One of several processes ends, as the others do not know of it and wait; where it ends it waits for none."""

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    def save(*_, **__):
        return SimpleNamespace(result=full) if late else full()

    told = "step 2 could not be saved: OSError: .*No space left on device"
    checkpoints = run.open(count=count)
    monkeypatch.setattr(checkpoints._store, "save_async", save)
    if count == 1:
        with checkpoints:
            checkpoints.save(2, state, RECORD, [])
        assert len(run.said) == 1 and re.match(f"warning: {told}; training goes on", run.said[0])
        return
    with pytest.raises(CheckpointError, match=told), checkpoints:
        checkpoints.save(2, state, RECORD, [])
        assert late
        checkpoints.wait()
    if late:
        with pytest.raises(KeyError), checkpoints:
            checkpoints.save(2, state, RECORD, [])
            raise KeyError
    assert run.said == []


def test_a_folder_that_cannot_be_written_is_named(run):
    (run.folder / CHECKPOINTS).write_text("in the way")
    with pytest.raises(CheckpointError, match=f"cannot write into .*{CHECKPOINTS}: File exists"):
        run.open()


def test_the_facts_are_all_that_matters(run):
    run.save(3)
    (verdict,) = verify(run.folder)
    facts = verdict.facts
    json.dumps(facts)
    assert facts["step"] == 3 and facts["metrics"]["loss"] == 2.5 and facts["load"] == [[1, 2]]
    layout = {"schedule": "one_f_one_b", "pp": 2, "ep": 2, "dp": 1, "shard": "nothing", "processes": 1}
    assert facts["layout"] == layout
    assert facts["options"]["optimizer"]["steps"] == 250
    assert facts["seed"] == 0 and facts["tokenizer"] == "bytes"
    assert facts["versions"]["jax"] == jax.__version__


def test_a_check_is_on_the_cpu_unless_the_environment_says_otherwise(monkeypatch):
    """On an accelerator it would take memory from the run, which may be at work there."""
    platforms = []

    def check_run(folder):
        platforms.append(os.environ["JAX_PLATFORMS"])
        return 0

    monkeypatch.setattr("train.__main__.check_run", check_run)
    monkeypatch.setenv("JAX_PLATFORMS", "tpu")
    assert main(["--check", "run"]) == 0
    monkeypatch.delenv("JAX_PLATFORMS")
    assert main(["--check", "run"]) == 0
    assert platforms == ["tpu", "cpu"]


def test_check_says_which_are_whole(run, capsys):
    run.save(2, 3)
    run.damage(2)
    assert main(["--check", str(run.folder)]) == 1
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("step 2: damaged: ") and said[1].startswith("step 3: whole, ")
    shutil.rmtree(run.folder / CHECKPOINTS / "2")
    writing = run.folder / CHECKPOINTS / "4.orbax-checkpoint-tmp"
    writing.mkdir()
    assert main(["--check", str(run.folder)]) == 0
    assert writing.exists(), "a run that is at work writes it just now"


def test_a_step_that_a_run_takes_away_while_it_is_checked_is_not_damaged(run):
    run.save(1, 2, 3)
    found = verify(run.folder)
    assert next(found).step == 1
    shutil.rmtree(run.folder / CHECKPOINTS / "2")
    assert [(status.step, status.problem) for status in found] == [(3, None)]


@pytest.fixture
def about(run):
    """What is written about the second of two steps."""
    run.save(1, 2)
    return run.folder / CHECKPOINTS / "2" / "_CHECKPOINT_METADATA"


def test_a_flipped_digit_beside_the_arrays_is_damage(run, about, capsys):
    """A run goes on from what it had read: that must be what was saved, as the arrays must."""
    text = about.read_text()
    about.write_text(text.replace('"loss": 2.5', '"loss": 2.7'))
    assert main(["--check", str(run.folder)]) == 1
    told = "damaged: what its _CHECKPOINT_METADATA says is not what was saved"
    assert f"step 2: {told}" in capsys.readouterr().out
    written = json.loads(about.read_text())
    del written["custom_metadata"]["digest"]
    about.write_text(json.dumps(written))
    assert main(["--check", str(run.folder)]) == 0, "earlier trainers wrote none"
    about.write_text(text.replace('"loss": 2.5', '"loss": 2.7'))
    run.restore()
    assert run.steps() == [1] and any(told in text for text in run.said)


def test_damage_of_what_is_written_about_a_step_is_told(run, about, capsys):
    """A flipped bit leaves JSON that Orbax takes, or with which it does not open the folder at all."""
    text = about.read_text()
    about.write_text(text.replace('"fingerprints"', '"fingerprintr"'))
    assert main(["--check", str(run.folder)]) == 1
    assert "step 2: damaged: " in capsys.readouterr().out
    about.write_text(text.replace('"item_handlers"', '"item_handlerr"'))
    told = "_CHECKPOINT_METADATA of a step is damaged: .*; move that step out of it, the newest one first"
    with pytest.raises(CheckpointError, match=told):
        run.restore()
    assert main(["--check", str(run.folder)]) == 1
    assert re.search(told, capsys.readouterr().err)
    shutil.move(about.parent, run.folder / "moved")
    assert run.restore() is not None and main(["--check", str(run.folder)]) == 0


@pytest.mark.parametrize(
    ("own", "others", "problem", "loads"),
    [
        ([TimeoutError("at a barrier")], ["DATA_LOSS", None], "DATA_LOSS", 1),
        ([TimeoutError("at a barrier"), None], [], None, 2),
        ([None, None], [None, "OSError: [Errno 5] Input/output error"], None, 2),
    ],
)
def test_several_processes_read_again_together(monkeypatch, own, others, problem, loads):
    """One that waited for another tells that one's reason, and takes no failing disk of another for damage."""
    monkeypatch.setattr("train.state.checkpoint.READ_RETRY_WAITS_S", (0.0, 0.0))
    told, done = iter(others), []

    def load(step, expected):
        done.append(step)
        if (error := own[len(done) - 1]) is not None:
            raise error
        return {}

    about = SimpleNamespace(custom_metadata={"fingerprints": {}})
    store = SimpleNamespace(metadata=lambda step: about, load=load)
    verdict, _ = _read(store, 3, lambda facts: {}, lambda mine: mine or next(told, None))
    assert (verdict.problem, len(done)) == (problem, loads)


def test_check_wants_a_run(tmp_path, capsys):
    assert main(["--check", str(tmp_path)]) == 1
    assert "no checkpoints there, or none that may be read" in capsys.readouterr().err
    assert main(["--check", "a" * 300]) == 1  # no file system has such a name, and says so
    assert "no checkpoints there, or none that may be read" in capsys.readouterr().err
    (tmp_path / CHECKPOINTS).mkdir()
    assert main(["--check", str(tmp_path)]) == 1
    assert "no whole step in" in capsys.readouterr().err


@pytest.mark.skipif(platform.system() != "Linux", reason="reads /proc/cpuinfo")
def test_a_run_that_goes_on_on_another_cpu_is_told(layout):
    """To JAX each is a "cpu"; with --xla_cpu_max_isa=AVX2 a gradient norm differs on a CPU with AVX-512."""
    ours = describe(configure(), NUMBERS, "c", layout.canonical)
    vectors, known = ours["platform"]["vectors"].split(), np._core._multiarray_umath.__cpu_features__
    for name, in_numpy in (("avx2", "AVX2"), ("avx512f", "AVX512F")):
        assert in_numpy not in known or (name in vectors) == known[in_numpy]
    saved = ours | {"platform": ours["platform"] | {"vectors": "of another"}}
    told = f"not bit for bit: hardware changed, vectors of another -> {ours['platform']['vectors']}"
    assert describe_changes(saved, ours) == [told]


@pytest.mark.parametrize(
    "before, now, says",
    [
        (
            "in any order",
            "in any order",
            "not bit for bit: this GPU adds in any order; a run with --deterministic",
        ),
        ("in one order", "in one order", ""),
        (
            "in one order",
            "in any order",
            "not bit for bit: hardware changed, sums in one order -> in any order",
        ),
    ],
)
def test_a_run_that_goes_on_on_a_gpu_is_told_of_its_sums(before, now, says):
    saved, ours = (
        {"options": options_as_dict(configure()), "platform": {"devices": "H100", "sums": s}}
        for s in (before, now)
    )
    for key in ("layout", "versions"):
        saved[key] = ours[key] = {}
    assert "; ".join(describe_changes(saved, ours)).startswith(says) and bool(
        describe_changes(saved, ours)
    ) == bool(says)
