"""Wiring: every option reaches what it is for, batches come from the text to train on, evaluation from the other."""

import math
import types

import jax
import numpy as np
import optax
import pytest

import models
from dualpipe_jax.engine import Out, StagedModel
from dualpipe_jax.parallel import make_mesh
from dualpipe_jax.schedule import gpipe, limit_stash, zb_h1
from train import model, setup
from train.config import ConfigError, configure
from train.data import Corpus
from train.data.corpus import text_source
from train.data.vocabulary import BYTES
from train.evaluate import make_evaluate

OTHER = configure(
    dp=2, pp=2, ep=1, mtp=1, mtp_weight=0.2, balance_factor=0.01,
    microbatches=4, microbatch_size=2, sequence=24, schedule="zb_h1", max_stash=1, model="tiny", layers=2,
    stage_layers=(1, 2),
    precision="bfloat16", dispatch="capacity", capacity_factor=1.5,
    dispatch_payload="float8", remat="all", attention="plain", matmul="ragged",
    steps=77, learning_rate=3e-3, warmup=7, weight_decay=0.03, clip=0.7, b1=0.8, b2=0.9, bias_rate=0.02,
    shard="parameters", seed=9,
    moments="bfloat16", gradient_sums="bfloat16", eval_sequences=11,
    overlap=False, compiler_option=("xla_cpu_enable_fast_min_max=True",),
)  # fmt: skip
"""No option has its default."""


@pytest.fixture(scope="module")
def spied():
    """What ``prepare`` gave to whom, for options that are all other than the default."""
    seen, patch = {}, pytest.MonkeyPatch()

    def spy(module, name):
        real = getattr(module, name)

        def call(*args, **kwargs):
            result = real(*args, **kwargs)
            seen.setdefault(name, []).append((args, kwargs, result))
            return result

        patch.setattr(module, name, call)

    for name in ("make_optimizer", "run_recipe", "make_update", "make_evaluate", "Pipeline", "Layout"):
        spy(setup, name)
    spy(model.models, "deepseek")
    spy(model.models, "given_plan")
    run = setup.prepare(OTHER)
    patch.undo()
    return run, seen


def test_the_optimizer_gets_its_options(spied):
    _, seen = spied
    ((args, kwargs, _),) = seen["make_optimizer"]
    recipe = seen["run_recipe"][0][2]
    assert recipe.warmup == 7 and recipe.rates[0].start == 3e-3
    assert recipe.tokens == 77 * math.prod(OTHER.batch_shape) and recipe.bias_rates[0].start == 0.02
    assert args == (recipe.learning_rate,)
    assert kwargs == {"clip": 0.7, "weight_decay": 0.03, "b1": 0.8, "b2": 0.9, "moments": "bfloat16"}
    ((_, asked, _), *_) = seen["Pipeline"]
    assert asked["accumulate_dtype"] == "bfloat16"


def test_the_update_gets_gradients_optimizer_and_bias_rate(spied):
    run, seen = spied
    ((args, _, update),) = seen["make_update"]
    assert args[0] is seen["Pipeline"][0][2].value_and_grad
    recipe = seen["run_recipe"][0][2]
    assert args[1] is seen["make_optimizer"][0][2]
    assert (args[2], *args[5:]) == (recipe.bias_rate, recipe.mtp_weight, recipe.learning_rate)
    assert args[4]["xla_cpu_enable_fast_min_max"] == "True"
    assert run.update is update


def test_runs_of_any_number_of_steps_share_the_compiled_step():
    """Learning rate, warm-up, bias rate and weight of multi-token prediction are all others; the program is not."""
    texts, values = [], []
    for steps in (10, 1000):
        run = setup.prepare(
            configure(
                dp=1, pp=1, ep=1, schedule="gpipe", microbatches=1, microbatch_size=1, sequence=8, model="tiny",
                layers=1, mtp=1, final_mtp_weight=0.1, constant_until=0.5, steps=steps,
            )
        )  # fmt: skip
        batch = {name: jax.ShapeDtypeStruct((1, 1, 8), np.int32) for name in ("inputs", "targets")}
        texts.append(run.update.lower(run.layout.abstract, batch).as_text())
        values.append(run.update.values(7))
    assert values[0]["rate"] != values[1]["rate"] and values[0]["mtp_weight"] != values[1]["mtp_weight"]
    assert texts[0] == texts[1]


def test_the_schedule_is_the_one_asked_for(spied):
    run, seen = spied
    assert run.schedule == limit_stash(zb_h1(2, 4), 1) != zb_h1(2, 4)
    args, kwargs, _ = seen["Pipeline"][0]
    trained = seen["deepseek"][0][2]
    assert args[0] is trained.staged and kwargs["param_specs"] is trained.param_specs
    assert kwargs["storage_specs"] is run.layout.storage_specs is seen["make_evaluate"][0][0][4]
    assert kwargs["storage_specs"] is not None and kwargs["fuse_pairs"] is False
    assert args[1] == run.schedule and dict(args[2].shape) == {"dp": 2, "pp": 2, "ep": 1}


def test_the_model_is_the_one_asked_for(spied):
    run, seen = spied
    (args, kwargs, trained), (_, judging, judged) = seen["deepseek"]
    numbers = args[0]
    assert numbers == models.tiny(num_layers=3, num_mtp_layers=1, compute_dtype=np.dtype(jax.numpy.bfloat16))
    planned, _, plan = seen["given_plan"][0]
    assert planned == (numbers, run.schedule, (1, 2)) and args[1] == plan == (1, 2)
    assert kwargs["ep_axis"] == "ep"
    assert (kwargs["mtp_weight"], kwargs["balance_factor"]) == (0.2, 0.01)
    assert (kwargs["dispatch"], kwargs["capacity_factor"], kwargs["payload"]) == ("capacity", 1.5, "float8")
    assert kwargs["remat"] is jax.checkpoint_policies.nothing_saveable
    assert kwargs["kernels"] == models.Kernels("plain", "ragged")
    lossless = {"dispatch": "dropless", "capacity_factor": None, "payload": "plain"}
    assert judging | lossless == judging
    assert seen["make_evaluate"][0][0][0] is judged
    assert seen["Layout"][0][0][0] is trained and seen["Layout"][0][0][4] == "parameters"


def test_evaluation_reads_what_training_does_not(spied):
    run, seen = spied
    args, _, evaluate = seen["make_evaluate"][0]
    assert {batch["inputs"].shape for batch, _ in args[3]} == {(4, 2, 24)}
    found = np.concatenate([batch["inputs"][weights > 0] for batch, weights in args[3]])
    (source,) = run.corpus.sources
    starts = np.arange(11) * (len(source.heldout) - 25) // 10
    np.testing.assert_array_equal(found, source.heldout.windows(starts, 24))
    assert run.evaluate is evaluate


@pytest.mark.parametrize(
    "asked, wanted",
    [
        ({}, "float32"),
        (dict(devices="accelerator"), "bfloat16"),
        (dict(devices="accelerator", precision="float32"), "float32"),
    ],
)
def test_a_run_says_what_it_computes_in(asked, wanted):
    """In its own record, so that it goes on in the same elsewhere."""
    assert setup.in_its_precision(configure(**asked)).step.precision == wanted


@pytest.mark.parametrize(
    "asked, says",
    [
        (dict(matmul="hopper", precision="bfloat16"), "matmul 'hopper' is a kernel for GPUs, .* on a CPU"),
        (
            dict(matmul="hopper", precision="float32"),
            "--matmul hopper: .* take 16 bits; add --precision bfloat16",
        ),
        (dict(attention="splash"), "attention 'splash' is a kernel for TPUs, and this is to run on a CPU"),
    ],
)
@pytest.mark.skipif(jax.default_backend() != "cpu", reason="these are refused on a CPU")
def test_kernels_that_cannot_run_are_refused(asked, says):
    config = configure(pp=1, ep=1, schedule="gpipe", **asked)
    with pytest.raises(ConfigError, match=says):
        model.make_model(config, setup.make_schedule(config))


def test_room_for_tokens():
    bounded = {"dispatch": "dropless", "capacity_factor": 3.0}
    for options, factor in (({}, None), ({"dispatch": "capacity"}, 2.0), (bounded, 3.0)):
        config = configure(**options)
        assert config.step.room == factor
        said = model.describe_dispatch(config)
        assert ("dropped" in said) == (factor is not None) and (factor is None or f"{factor:g} x" in said)


def test_eight_bits_are_named_on_the_first_screen_and_refused_where_there_are_none():
    sent, multiplied = configure(dispatch_payload="float8"), configure(matmul="float8")
    assert model.describe_dispatch(sent) == "dropless: every token reaches its experts; sent in eight bits"
    v5p = types.SimpleNamespace(platform="tpu", device_kind="TPU v5")
    a100 = types.SimpleNamespace(platform="gpu", device_kind="NVIDIA A100", compute_capability="8.0")
    for asked in (sent, multiplied):
        model.refuse_eight_bits(asked, v5p)
        model.refuse_eight_bits(asked, jax.devices()[0])
    with pytest.raises(ConfigError, match="--dispatch-payload plain --matmul float8: .*A100 has .* 8.0"):
        model.refuse_eight_bits(multiplied, a100)


@pytest.mark.parametrize(("asked", "wanted"), [("float8", "auto"), ("ragged", "ragged")])
def test_a_run_is_judged_in_no_eight_bits(asked, wanted, monkeypatch):
    monkeypatch.setattr(model.models, "deepseek", lambda *_, **given: given["kernels"].matmul)
    config = configure(matmul=asked, precision="bfloat16")
    kernels = [
        model.make_model(config, setup.make_schedule(config), lossless=which) for which in (False, True)
    ]
    assert kernels == [asked, wanted]


def test_every_held_out_window_counts_once():
    """Seven of them in batches of four, the last one filled up; a table of logits, against NumPy."""
    random = np.random.default_rng(0)
    table = random.standard_normal((256, 256)).astype(np.float32)
    text = bytes(random.integers(1, 256, 300).tolist())
    corpus = Corpus((text_source("text", [], [text], 1, BYTES),))

    def stage(own, shared, x, at):
        logits, targets = shared[at.batch["inputs"]], at.batch["targets"]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
        tokens = at.batch["mask"].sum(dtype=np.int32)
        mean = jax.numpy.where(at.batch["mask"], losses, 0).sum() / tokens.astype(np.float32).clip(1)
        return Out(losses, {"lm": mean}, {"tokens": tokens})

    def counted(batch):
        return {"lm": batch["mask"].sum(dtype=np.float32)}

    toy = types.SimpleNamespace(
        staged=StagedModel({"all": stage}, ("all",), weights=counted), param_specs=None, compute_dtype=None
    )
    evaluate = make_evaluate(toy, gpipe(1, 2), make_mesh(1, 2), corpus.heldout_batches(7, (2, 2, 8)))
    ((batch, _),) = corpus.heldout_batches(7, (1, 7, 8))
    rows = table[batch["inputs"]].astype(np.float64)
    right = np.take_along_axis(rows, batch["targets"][..., None], -1)[..., 0]
    expected = (np.log(np.exp(rows).sum(-1)) - right).mean()
    assert evaluate({"stages": {"none": np.zeros(1, np.float32)}, "shared": table}) == pytest.approx(expected)


@pytest.mark.slow
def test_the_held_out_loss_is_the_plain_models_whatever_the_layout():
    """Documents within windows, on all three axes; the oracle is the model in one piece, without a mesh."""
    numbers = models.tiny(num_layers=2, dim=16, num_experts=4, num_groups=1, top_groups=1, top_k=2, vocab=64)
    random = np.random.default_rng(0)
    texts = [bytes(random.integers(1, 64, length).tolist()) for length in (5, 90, 130, 70)]
    corpus = Corpus((text_source("text", [], texts, 4, BYTES),))
    built = models.deepseek(numbers, 2, ep_axis="ep")
    batches = corpus.heldout_batches(7, (2, 4, 8))
    params = jax.jit(built.init)(jax.random.key(1))
    found = make_evaluate(built, gpipe(2, 2), make_mesh(2, 2, dp=2), batches)(params)

    whole = jax.jit(models.deepseek(numbers, 1).init)(jax.random.key(1))
    ((batch, _),) = corpus.heldout_batches(7, (1, 7, 8))
    one = {name: values[0] for name, values in batch.items()}
    assert (one["segment_ids"] != one["segment_ids"][:, :1]).any(), "some window spans documents"
    plain = jax.jit(models.logits, static_argnums=0)
    logits = plain(numbers, whole, one["inputs"], positions=one["positions"], segment_ids=one["segment_ids"])
    expected = optax.softmax_cross_entropy_with_integer_labels(logits, one["targets"]).mean()
    assert found == pytest.approx(float(expected), abs=2e-6)
