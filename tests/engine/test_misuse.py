"""What users get wrong first is refused, with what is wanted; what they have is taken as it is."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dualpipe_jax import (
    Out,
    Pipeline,
    PipelineModel,
    StagedModel,
    make_mesh,
    place_stages,
    reference_value_and_grad,
    sequential_value_and_grad,
    unplace_stages,
)
from dualpipe_jax.arguments import UnfitError
from dualpipe_jax.schedule import dualpipe_v, gpipe, interleaved_1f1b, one_f_one_b, zb_v

MICROBATCHES = 4


def stage(own, shared, x, at):
    """x times a weight and a shared one; every stage adds a loss."""
    x = at.batch if x is None else x
    y = jnp.sin(x * own["w"] + shared["b"])
    return Out(y, {"loss": jnp.mean(y**2)}, {"sum": jnp.sum(y)})


def plain_loss(params, batch, weight_of_metric=0.0):
    """The same in a loop over microbatches: the objective, and what ``sum`` adds to it."""
    total = 0.0
    for x in batch:
        for w in params["stages"]["w"]:
            x = jnp.sin(x * w + params["shared"]["b"])
            total += jnp.mean(x**2) / len(batch) + weight_of_metric * jnp.sum(x)
    return total


def arguments(num_stages=2, dtype=jnp.float32):
    params = {
        "stages": {"w": jnp.linspace(0.5, 1.5, num_stages, dtype=dtype)},
        "shared": {"b": jnp.ones((), dtype)},
    }
    return params, jnp.linspace(-1, 1, MICROBATCHES * 2, dtype=dtype).reshape(MICROBATCHES, 2)


def pipeline(function=stage, num_stages=2, schedule=None, weights=None, **options):
    schedule = schedule or one_f_one_b(2, MICROBATCHES)
    model = StagedModel({"middle": function}, ("middle",) * num_stages, weights)
    return Pipeline(model, schedule, make_mesh(2, 1), **options)


def returning(change):
    """A stage that returns something else."""
    return lambda own, shared, x, at: change(stage(own, shared, x, at), at)


WRONG = {
    "a bare array": (
        lambda out, at: out.x,
        TypeError,
        r"must return a dualpipe_jax.Out: .*an array float32\[2\]",
    ),
    "a tuple": (lambda out, at: (out.x, {}), TypeError, r"must return a dualpipe_jax.Out: .* a tuple"),
    "a loss without a name": (
        lambda out, at: Out(out.x, jnp.mean(out.x)),
        TypeError,
        r"losses by name, such as .*Out.losses is an array float32\[\]",
    ),
    "no loss": (
        lambda out, at: Out(out.x),
        ValueError,
        "no stage returns a loss, so there is nothing to differ",
    ),
    "a loss of many": (
        lambda out, at: Out(out.x, {"l": out.x}),
        TypeError,
        r"each loss as a floating scalar.*losses\['l'\] is an array float32\[2\]",
    ),
    "a bool metric": (
        lambda out, at: out._replace(metrics={"all": jnp.all(out.x > 0)}),
        TypeError,
        r"an array bool\[\] in metrics\['all'\].*astype\(jnp.int32\)",
    ),
    "a key as metric": (
        lambda out, at: out._replace(metrics={"key": jax.random.key(0)}),
        TypeError,
        r"an array key<fry>\[\] in metrics\['key'\]: metrics are numbers",
    ),
    "a word as metric": (
        lambda out, at: out._replace(metrics={"name": "middle"}),
        TypeError,
        r"a str in metrics\['name'\]: metrics are numbers",
    ),
    "None as loss": (
        lambda out, at: Out(out.x, {"l": None}),
        TypeError,
        r"each loss as a floating scalar.*losses\['l'\] is a NoneType",
    ),
    "a key that is not there": (
        lambda out, at: out._replace(x=out.x * jax.random.bernoulli(at.key, 0.5, (2,))),
        TypeError,
        "kind 'middle' uses at.key, but the step was given no key: call it with one",
    ),
}


@pytest.mark.parametrize("change, error, words", WRONG.values(), ids=WRONG)
def test_what_a_stage_may_not_return(change, error, words):
    with pytest.raises(error, match=words):
        jax.eval_shape(pipeline(returning(change)).value_and_grad, *arguments())
    if error is TypeError:
        model = StagedModel({"middle": returning(change)}, ("middle",) * 2)
        # The oracle takes no less; that a key is missing JAX says to it.
        with pytest.raises(TypeError, match="PRNG key" if "at.key" in words else words):
            jax.eval_shape(reference_value_and_grad(model), *arguments())


def test_a_forward_needs_no_loss():
    applied = pipeline(returning(lambda out, at: Out(out.x))).apply(*arguments(), outputs="everywhere")
    params, want = arguments()
    for w in params["stages"]["w"]:
        want = jnp.sin(want * w + params["shared"]["b"])
    np.testing.assert_allclose(applied.outputs, want, rtol=1e-6)


def test_arguments_of_a_step():
    step = pipeline()
    with pytest.raises(
        TypeError, match=r"third argument of a step is the key.*not int32\[\]. Inputs and targets"
    ):
        step.value_and_grad(*arguments(), 7)
    with pytest.raises(TypeError, match=r"not int32\[4\].*belong in the batch"):
        step.value_and_grad(*arguments(), jnp.arange(4))
    with pytest.raises(ValueError, match="outputs='all': there are 'none', 'last_rank', 'everywhere'"):
        step.apply(*arguments(), outputs="all")
    with pytest.raises(ValueError, match=r"weights names \['lmm'\], but the losses.*are \['loss'\]"):
        pipeline(weights=lambda batch: {"lmm": jnp.sum(batch)}).value_and_grad(*arguments())


@pytest.mark.parametrize("dtype", [jnp.int32, "bool", jnp.complex64, "bfloat17"])
def test_gradients_are_made_and_summed_in_floating_dtypes(dtype):
    """Of integers all gradients would be zero, and nothing said so."""
    for name, given, where in (
        ("accumulate_dtype", dtype, "accumulate_dtype"),
        ("compute_dtype", dtype, "compute_dtype"),
        ("compute_dtype", {"stages": {"w": dtype}}, r"compute_dtype\['stages'\]\['w'\]"),
    ):
        with pytest.raises(ValueError, match=f"{where}=.*gradients need a floating dtype"):
            pipeline(**{name: given})


def test_leaves_of_a_batch_have_one_microbatch_size():
    """Two rows for each device beside one would be broadcast, where the plain model refuses them."""

    def error(own, shared, x, at):
        x = at.batch["x"] if x is None else x
        return Out(x, {"loss": jnp.mean((own["w"] * x - at.batch["y"]) ** 2)})

    model = StagedModel({"middle": error}, ("middle",) * 2)
    step = Pipeline(model, one_f_one_b(2, MICROBATCHES), make_mesh(2, 2)).value_and_grad
    params, _ = arguments()
    batch = {"x": jnp.ones((MICROBATCHES, 4, 3)), "y": jnp.ones((MICROBATCHES, 2, 3))}
    with pytest.raises(
        ValueError, match=r"different microbatch sizes, 4 in batch\['x'\] and 2 in batch\['y'\]"
    ):
        step(params, batch)


def test_the_oracle_cuts_whole_microbatches():
    """Six rows in parts of a fourth would be parts of one row, with other microbatches' numbers and keys."""
    model = StagedModel({"middle": stage}, ("middle",) * 2)
    params, _ = arguments()
    for num_parts, shapes in ((4, [(2, 6)]), (0, [(2, 6)]), (2, [(2, 4), (2, 2)]), (1, [(2,)]), (1, [])):
        told = f"num_parts={num_parts} divides; their shapes are {', '.join(map(str, shapes)) or 'none'}"
        with pytest.raises(ValueError, match=re.escape(told)):
            reference_value_and_grad(model, num_parts=num_parts)(params, list(map(jnp.ones, shapes)))


def test_what_is_no_array_is_named_without_the_whole_schedule():
    """JAX's error begins with what was called, whose schedule has thousands of actions."""
    params, batch = arguments()
    schedule = one_f_one_b(2, 2000)
    with pytest.raises(TypeError, match=r"path params\['shared'\]\['b'\]") as raised:
        pipeline(schedule=schedule).value_and_grad(params | {"shared": {"b": "one"}}, batch)
    assert len(str(raised.value)) < 2000


def test_under_the_setting_that_refuses_arrays_of_unlike_ranks():
    with jax.numpy_rank_promotion("raise"):
        (loss, _), _ = pipeline().value_and_grad(*arguments())
    np.testing.assert_allclose(loss, plain_loss(*arguments()), rtol=1e-6)


def test_without_jit_there_is_a_word_instead_of_hours():
    with jax.disable_jit():
        with pytest.raises(UnfitError, match="JAX_DISABLE_JIT or jax.disable_jit.. is on"):
            pipeline().value_and_grad(*arguments())
        params, batch = arguments(num_stages=1)
        (loss, _), _ = reference_value_and_grad(StagedModel({"one": stage}, ("one",)))(params, batch[:1])
    np.testing.assert_allclose(loss, plain_loss(params, batch[:1]), rtol=1e-6)


@pytest.mark.parametrize("shape", [(1,), (2,)])
def test_a_weight_is_a_scalar(shape):
    """With an array of one the oracle's mean was of every loss by every weight."""
    weighted = pipeline(weights=lambda batch: {"loss": jnp.ones(shape)})
    for step in (weighted.value_and_grad, reference_value_and_grad(weighted.model)):
        with pytest.raises(ValueError, match=r"weights gives 'loss' an array of shape .*jnp.sum\(mask\)"):
            step(*arguments())


def test_weights_are_a_dict():
    weighted = pipeline(weights=lambda batch: jnp.float32(3))
    for step in (weighted.value_and_grad, weighted.loss, reference_value_and_grad(weighted.model)):
        with pytest.raises(
            TypeError, match="weights returns .*; it must return a dict of scalars by the names"
        ):
            step(*arguments())


def test_sums_of_narrow_gradients():
    """1,024 gradients of 1: one by one in bfloat16 a quarter arrives."""
    number = 1024

    def one(own, shared, x, at):
        x = at.batch if x is None else x
        return Out(x, {"loss": jnp.mean(x) * own + jnp.mean(x) * shared})

    model = StagedModel({"one": one}, ("one",) * 2)
    params = {"stages": jnp.ones(2, jnp.bfloat16), "shared": jnp.ones((), jnp.bfloat16)}
    batch = jnp.ones((number, 1), jnp.bfloat16)
    want = {"stages": jnp.ones(2, jnp.bfloat16), "shared": jnp.full((), 2, jnp.bfloat16)}
    steps = [
        Pipeline(model, gpipe(2, number), make_mesh(2, 1)).value_and_grad,
        reference_value_and_grad(model),
    ]
    for step in steps:
        _, gradients = jax.jit(step)(params, batch)
        jax.tree.map(np.testing.assert_array_equal, gradients, want)
        assert {leaf.dtype for leaf in jax.tree.leaves(gradients)} == {jnp.dtype(jnp.bfloat16)}
    # What is asked for is summed in and returned; of 1,024 different numbers, not rounded to bfloat16 after all.
    wide = Pipeline(model, gpipe(2, number), make_mesh(2, 1), accumulate_dtype=jnp.float32)
    batch = np.random.default_rng(0).uniform(1, 2, (number, 1)).astype(jnp.bfloat16)
    _, gradients = wide.value_and_grad(params, batch)
    mean = batch.astype(np.float64).mean()
    for got, exact in ((gradients["stages"], mean), (gradients["shared"], 2 * mean)):
        assert got.dtype == jnp.float32
        np.testing.assert_allclose(got, exact, rtol=1e-6)


def test_a_loss_may_have_any_name():
    """Also the one that the report's own sum once had."""
    named = returning(lambda out, at: Out(out.x, {"metrics": out.losses["loss"]}, out.metrics))
    weights = lambda batch: {"metrics": jnp.ones(())}  # noqa: E731
    step = pipeline(named, weights=weights)

    def total(params, batch):
        _, report = step.loss(params, batch)
        return report.losses["metrics"] ** 2 + 0.1 * report.metrics["sum"]

    def plain(params, batch):
        objective = plain_loss(params, batch)
        return objective**2 + (plain_loss(params, batch, 0.1) - objective)

    got, want = jax.grad(total)(*arguments()), jax.grad(plain)(*arguments())
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=2e-6), got, want)


def test_stages_placed_for_another_schedule():
    params, batch = arguments(num_stages=4)
    placed = pipeline(num_stages=4, schedule=interleaved_1f1b(2, MICROBATCHES, num_stages_per_rank=2)).place(
        params
    )
    on_a_v = [pipeline(num_stages=4, schedule=make(2, MICROBATCHES)) for make in (dualpipe_v, zb_v)]
    for other in on_a_v:
        for use in (other.value_and_grad, other.apply, other.loss, other.state):
            with pytest.raises(
                ValueError, match=r"hold the stages \[\[0, 1\], \[2, 3\]\].*\[\[0, 1\], \[3, 2\]\]"
            ):
                use(placed, batch)
    # Both of these hold stages alike, so either takes the other's.
    _, gradients = on_a_v[0].value_and_grad(on_a_v[1].place(params), batch)
    want = jax.grad(plain_loss)(params, batch)
    got = on_a_v[0].unplace(gradients)
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=2e-6, atol=1e-7), got, want)
    with pytest.raises(ValueError, match="metadata"):
        jax.tree.map(jnp.add, placed, on_a_v[0].place(params))


@pytest.mark.parametrize("make, has", [(one_f_one_b, 2), (dualpipe_v, 4)])
@pytest.mark.parametrize("given", [1, 3, 8])
def test_stages_that_are_placed_are_as_many_as_there_are(make, has, given):
    """Of eight stages four would be left out, and the third of three would be NaN."""
    params, _ = arguments(given)
    schedule = make(2, MICROBATCHES)
    used = pipeline(num_stages=has, schedule=schedule)
    for place in (used.place, used.shardings, lambda p: place_stages(p["stages"], schedule, make_mesh(2, 1))):
        with pytest.raises(
            ValueError, match=rf"\['w'\] has shape \({given},\); .* schedule has {has}: \[{has}"
        ):
            place(params)


def test_a_list_of_one_tree_for_each_stage():
    params, batch = arguments(num_stages=4)
    listed = params | {"stages": [{"w": w} for w in params["stages"]["w"]]}
    step = pipeline(num_stages=4, schedule=zb_v(2, MICROBATCHES))
    reference = reference_value_and_grad(step.model)
    want = jax.grad(plain_loss)(params, batch)
    for function in (step.value_and_grad, reference):
        _, got = function(listed, batch)
        assert jax.tree.structure(got) == jax.tree.structure(listed)
        stacked = got | {"stages": {"w": jnp.stack([stage["w"] for stage in got["stages"]])}}
        jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=2e-6, atol=1e-7), stacked, want)
    with pytest.raises(ValueError, match="a list of 3 trees, but there are 4 stages"):
        step.value_and_grad(listed | {"stages": listed["stages"][:3]}, batch)
    unlike = [*listed["stages"][:3], {"w": jnp.ones(5)}]
    with pytest.raises(ValueError, match=r"stage 3 has {w: float32\[5\]}, but stage 0 has {w: float32\[\]}"):
        step.value_and_grad(listed | {"stages": unlike}, batch)
    both = [{"w": jnp.ones((4, 2))}] * 4
    with pytest.raises(
        ValueError, match=r"a list of 4 alike trees of leaves \[4, ...\]: that may be a tree for each"
    ):
        step.value_and_grad(listed | {"stages": both}, batch)


def test_a_list_of_leaves_of_all_stages_is_one_tree():
    params, batch = arguments()
    of_leaves = params | {"stages": [params["stages"]["w"]]}
    step = pipeline(lambda own, shared, x, at: stage({"w": own[0]}, shared, x, at))
    _, got = step.value_and_grad(of_leaves, batch)
    want = jax.grad(plain_loss)(params, batch)["stages"]["w"]
    np.testing.assert_allclose(got["stages"][0], want, rtol=2e-6)


def test_parameters_are_placed_from_wherever_they_lie():
    params, batch = arguments()
    params["shared"]["key"] = jax.random.key(3)
    away = jax.device_put(params, jax.devices()[5])
    step = pipeline()
    _, got = step.value_and_grad(step.place(away), batch)
    _, want = step.value_and_grad(step.place(params), batch)
    np.testing.assert_array_equal(got["stages"].local[0]["w"], want["stages"].local[0]["w"])
    assert step.place(away)["shared"]["key"] == params["shared"]["key"]


def test_frozen_is_said_by_bools():
    for given, words in (
        ({"stages": {"w": "no"}}, "frozen['stages']['w']='no'"),
        ({"shared": 0}, "frozen['shared']=0"),
        ("no", "frozen='no'"),
    ):
        with pytest.raises(ValueError, match=re.escape(f"{words}: give True for what has no gradient, else")):
            pipeline(frozen=given)
    pipeline(frozen={"stages": {"w": np.False_, "more": None}})
    for given in (True, {"stage": True}):  # ``trained`` took the second for nothing frozen
        with pytest.raises(ValueError, match="frozen must be a dict with keys among"):
            pipeline(frozen=given)
    for name in ("param_specs", "storage_specs", "compute_dtype"):
        with pytest.raises(ValueError, match=f"{name} must be a dict with keys among .*, got .'stage'"):
            pipeline(**{name: {"stage": None}})


def test_the_plain_model_takes_as_many_stages_in_model_order():
    """A function that maps over its parameters' leaves would take all stages of a rank for one."""
    params, batch = arguments()
    model = StagedModel({"middle": stage}, ("middle",) * 2)
    placed = place_stages(params["stages"], zb_v(1, MICROBATCHES), make_mesh(1))
    for wrong, told in ((placed, "are placed on ranks"), ({"w": jnp.ones(3)}, "of which the model has 2")):
        with pytest.raises(ValueError, match=rf"params\['stages'\].* {told}"):
            reference_value_and_grad(model)(params | {"stages": wrong}, batch)
    plain = PipelineModel(lambda w, x: x, lambda w, x: x * sum(jax.tree.leaves(w)), lambda w, x, y: x.sum())
    with pytest.raises(ValueError, match="are placed on ranks"):
        sequential_value_and_grad(plain)({"embed": {}, "stages": placed, "head": {}}, batch, batch)


def test_only_what_was_placed_here_is_brought_back():
    params, _ = arguments()
    step = pipeline()
    with pytest.raises(ValueError, match=r"params\['stages'\] of type dict are not placed: only what place"):
        step.unplace(params)
    with pytest.raises(
        ValueError, match=r"params must be a dict with the keys \['shared', 'stages'\], got \['w"
    ):
        step.place(params["stages"])
    placed = place_stages(params["stages"], step.schedule, step.mesh)
    away = dataclasses.replace(placed, model_stages=tuple(row[::-1] for row in placed.model_stages))
    for bring_back in (
        lambda: step.unplace(params | {"stages": away}),
        lambda: unplace_stages(away, step.schedule),
    ):
        with pytest.raises(
            ValueError, match=r"params\['stages'\] are placed for another schedule: the ranks hold"
        ):
            bring_back()


def test_frozen_leaves_and_an_optimizer():
    """One step of momentum by hand, for the only leaf that is trained; the shared one and the count stay."""
    params, batch = arguments()
    params["shared"]["count"] = jnp.int32(3)
    step = pipeline(frozen={"shared": {"b": True, "count": None}})
    optimizer = optax.sgd(0.1, momentum=0.9)
    for given in (params, step.place(params)):
        trained = step.trained(given)
        state = optimizer.init(trained)
        _, gradients = step.value_and_grad(given, batch)
        updates, state = optimizer.update(step.trained(gradients), state, trained)
        new = step.with_trained(given, optax.apply_updates(trained, updates))
        new = step.unplace(new) if given is not params else new
        want = (
            params["stages"]["w"] - 0.1 * jax.grad(plain_loss, allow_int=True)(params, batch)["stages"]["w"]
        )
        np.testing.assert_allclose(new["stages"]["w"], want, rtol=2e-6)
        assert new["shared"] == params["shared"]


def test_frozen_leaves_of_listed_stages_and_an_optimizer():
    """Without the frozen leaves, the gradients' list could be one tree of stacked leaves, too."""
    num_stages = 2
    params, batch = arguments(num_stages)
    params["stages"] = [
        {"w": jnp.full(num_stages, 0.5 + number), "fixed": jnp.ones(5)} for number in range(num_stages)
    ]

    def first_weight(own, shared, x, at):
        return stage({"w": own["w"][0] * own["fixed"][0]}, shared, x, at)

    step = pipeline(first_weight, frozen={"stages": {"w": False, "fixed": True}})
    _, gradients = step.value_and_grad(params, batch)
    assert gradients["stages"][0]["fixed"] is None
    new = step.with_trained(params, jax.tree.map(jnp.add, step.trained(params), step.trained(gradients)))
    want = jax.grad(plain_loss)(
        params | {"stages": {"w": jnp.stack([own["w"][0] for own in params["stages"]])}}, batch
    )
    for own, before, gradient in zip(new["stages"], params["stages"], want["stages"]["w"], strict=True):
        np.testing.assert_allclose(own["w"], before["w"] + jnp.array([1.0, 0.0]) * gradient, rtol=2e-6)
        np.testing.assert_array_equal(own["fixed"], before["fixed"])


@jax.custom_vjp
def summed_in_the_backward(x):
    return x


summed_in_the_backward.defvjp(lambda x: (x, None), lambda _, g: (jax.lax.pmean(g, ("pp", "ep")),))

OVER_PP = {
    "psum": lambda x: x + jax.lax.psum(jnp.sum(x), "pp"),
    "all_gather in a scan": lambda x: jax.lax.scan(
        lambda c, _: (jax.lax.all_gather(c, "pp")[0], None), x, None, 2
    )[0],
    "pmax under checkpoint and jit": jax.checkpoint(
        jax.jit(lambda x: x - jax.lax.pmax(jnp.max(x), ("ep", "pp")))
    ),
    "a custom backward": summed_in_the_backward,
}


@pytest.mark.parametrize("check_vma", [False, True])
@pytest.mark.parametrize("function", OVER_PP.values(), ids=OVER_PP)
def test_collectives_over_the_ranks(function, check_vma):
    """Ranks run a stage at different times: it would hang."""
    if check_vma and function is summed_in_the_backward:
        pytest.skip("JAX itself refuses a backward whose result varies over fewer axes")
    wrong = returning(lambda out, at: out._replace(x=function(out.x)))
    with pytest.raises(ValueError, match=r"a stage of kind 'middle' contains a p?\w+ over 'pp'.*Out.metrics"):
        jax.eval_shape(pipeline(wrong, check_vma=check_vma).value_and_grad, *arguments())


def test_a_rank_may_know_its_number():
    """An index over pp exchanges nothing, and so does a collective over ep."""
    fine = returning(
        lambda out, at: out._replace(x=out.x + jax.lax.psum(jax.lax.axis_index("pp").astype(float), "ep"))
    )
    jax.eval_shape(pipeline(fine).value_and_grad, *arguments())


@jax.tree_util.register_pytree_node_class
class Held:
    """A tree of a class that defines no equality and no text."""

    def __init__(self, w):
        self.w = w

    def tree_flatten(self):
        return (self.w,), None

    @classmethod
    def tree_unflatten(cls, _, leaves):
        return cls(*leaves)


def held_stage(own, shared, x, at):
    out = stage({"w": own.w}, shared, None if x is None else x.w, at)
    return Out(Held(out.x), out.losses, {"sum": Held(out.metrics["sum"])})


def test_trees_of_ones_own_classes_are_compared_by_what_they_hold():
    """As stages, as x and as metrics; by their text the same types were different."""
    params, batch = arguments()
    model = StagedModel({"first": held_stage, "last": lambda *seen: held_stage(*seen)}, ("first", "last"))
    step = Pipeline(model, one_f_one_b(2, MICROBATCHES), make_mesh(2, 1))
    listed = params | {"stages": [Held(w) for w in params["stages"]["w"]]}
    (_, report), got = step.value_and_grad(listed, batch)
    want = jax.grad(plain_loss)(params, batch)["stages"]["w"]
    np.testing.assert_allclose([tree.w for tree in got["stages"]], want, rtol=2e-6)
    assert report.metrics["sum"].w.shape == ()


def test_a_kind_of_all_stages_is_traced_as_often_for_many_stages_as_for_few():
    traced = []

    def counted(own, shared, x, at):
        traced.append(1)
        return stage(own, shared, x, at)

    def traces(num_stages):
        params, batch = arguments(num_stages)
        schedule = interleaved_1f1b(2, MICROBATCHES, num_stages // 2)
        traced.clear()
        pipeline(counted, num_stages, schedule).state(params, batch)
        return len(traced)

    assert traces(8) == traces(6)


def test_placing_is_compiled_once(caplog):
    """Also the way back; each call made a new program of every leaf, which takes seconds for a large model."""
    step = pipeline(num_stages=4, schedule=zb_v(2, MICROBATCHES))
    params = jax.device_get(arguments(num_stages=4)[0])
    step.unplace(step.place(params))
    more = jax.tree.map(lambda leaf: leaf + 1, params)
    with jax.log_compiles():
        again = step.unplace(step.place(more))
    assert not [line for line in caplog.messages if "Compiling" in line]
    np.testing.assert_array_equal(again["stages"]["w"], more["stages"]["w"])


def test_parameters_are_placed_from_a_mesh_of_the_same_devices_in_another_order():
    params, _ = arguments()
    params["shared"]["key"] = jax.random.key(3)
    orders = jax.devices()[:2], jax.devices()[1::-1]
    model = StagedModel({"middle": stage}, ("middle",) * 2)
    there, here = (Pipeline(model, one_f_one_b(2, MICROBATCHES), make_mesh(2, devices=d)) for d in orders)
    moved = here.unplace(here.place(there.place(params)))
    assert moved["shared"]["key"] == params["shared"]["key"]
    np.testing.assert_array_equal(moved["stages"]["w"], params["stages"]["w"])
