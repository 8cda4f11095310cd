"""Serving over several devices: each request's text is the plain forward's, wherever requests and experts lie."""

import functools
import re
from pathlib import Path

import jax
import numpy as np
import pytest

from dualpipe_jax.balance import Layout, balance
from dualpipe_jax.parallel import make_mesh
from models import Dispatch
from models.decode import Engine, Limits, RequestError, SamplingParams, decoder
from models.serve import Runner
from tests.models.decode.small_models import COMPILED, continued, drawn, random_params, small
from tests.two_processes import what_both_say

CONFIG = small(num_groups=1, num_mtp_layers=1)
"""A dense layer, one with 4 experts, a module of multi-token prediction with as many."""

LIMITS = Limits(max_requests=4, max_positions=16, block_size=4, chunk_size=4, max_prefill=8)
LENGTHS = (9, 2, 5, 11, 1, 6)
NUM_NEW = (4, 7, 5, 3, 8, 2)

TWICE = np.asarray([[[0, 1, 2], [3, 0, 1]], [[2, 3, 0], [1, 2, 3]]])
ELSEWHERE = np.asarray([[[3, 2, 1], [0, 1, 3]], [[0, 1, 2], [3, 2, 0]]])
"""Some experts on both devices, [layers, devices, slots]."""


@functools.cache
def mesh(num_devices=2):
    return make_mesh(1, num_devices, jax.devices()[:num_devices])


@functools.cache
def model(method="dropless"):
    return decoder(CONFIG, dispatch=Dispatch(method, axis_name="ep"))


prompts = functools.partial(drawn, CONFIG, *LENGTHS)


@functools.cache
def greedy(n, seed=0):
    return continued(CONFIG, random_params(CONFIG), prompts(seed=seed)[n], NUM_NEW[n], LIMITS.max_positions)


def ask(serving, seed=0):
    """All of them, some later than others; texts by request."""
    numbers, found = [], []
    for prompt, number in zip(prompts(seed=seed), NUM_NEW, strict=True):
        numbers.append(serving.add(prompt, SamplingParams(max_tokens=number)))
        if len(numbers) > 3:
            found += serving.step()
    done = {one.id: one for one in found + serving.run()}
    assert len(serving._scheduler.blocks) == LIMITS.total_blocks
    return [done[number] for number in numbers]


@pytest.fixture(scope="module")
def moving():
    """One for all that compile nothing new; some experts are on both devices."""
    return Engine(model(), random_params(CONFIG), LIMITS, mesh=mesh(), placement=TWICE)


def test_experts_move_while_requests_are_served_and_nothing_is_compiled_again(moving):
    ask(moving, seed=1)
    fed = sum(length + number - 1 for length, number in zip(LENGTHS, NUM_NEW, strict=True))
    assert moving.counts.tolist()[1] == [0] * 4 and moving.counts.shape == (2, 4)
    assert moving.counts[0].sum() == fed * CONFIG.top_k, "every token that was fed chose so many"
    moving.rebalance(ELSEWHERE)
    moving.rebalance(TWICE)
    before = len(COMPILED)
    numbers = [
        moving.add(prompt, SamplingParams(max_tokens=number))
        for prompt, number in zip(prompts(), NUM_NEW, strict=True)
    ]
    found = []
    for place in (ELSEWHERE, TWICE, ELSEWHERE):
        found += moving.step()
        moving.rebalance(place)
    found += moving.run()
    assert len(COMPILED) == before
    texts = {one.id: one.tokens for one in found}
    assert [texts[number] for number in numbers] == [greedy(n) for n in range(len(LENGTHS))]
    moving.rebalance(balance(moving.counts, Layout(2, 3)).experts)
    assert [one.tokens for one in ask(moving)] == [greedy(n) for n in range(len(LENGTHS))]


def test_who_begins_alike_goes_where_that_is_known(moving):
    prompt = np.arange(9)
    moving.add(prompt, SamplingParams(max_tokens=2))
    (first,) = moving.run()
    for _ in range(3):
        moving.add(prompt, SamplingParams(max_tokens=2))
    others = moving.run()
    assert {one.tokens for one in others} == {first.tokens}
    assert first.num_reused == 0 and [one.num_reused for one in others][:2] == [8, 8]


def test_requests_are_shared_out_over_devices(moving):
    for prompt in prompts(seed=2)[:2]:
        moving.add(prompt, SamplingParams(max_tokens=4))
    moving.step()
    assert [sum(map(bool, moving._scheduler.slots_of(device))) for device in (0, 1)] == [1, 1]
    moving.run()


@pytest.mark.slow
@pytest.mark.parametrize(
    "method, placement, drafts, microbatches",
    [("capacity", None, True, 1), ("dropless", TWICE, True, 2), ("capacity", None, False, 2)],
)
def test_texts_are_the_plain_forwards(method, placement, drafts, microbatches):
    how = dict(placement=placement, drafts=drafts, microbatches=microbatches)
    serving = Engine(model(method), random_params(CONFIG), LIMITS, mesh=mesh(), **how)
    found = ask(serving)
    assert [one.tokens for one in found] == [greedy(n) for n in range(len(LENGTHS))]
    assert sum(one.num_drafted for one in found) > 0 or not drafts


def refused(message, **how):
    arguments = dict(limits=LIMITS, mesh=mesh()) | how
    served = arguments.pop("model", model())
    with pytest.raises(ValueError, match=re.escape(message)):
        Engine(served, random_params(CONFIG), **arguments)


def test_what_does_not_fit_together_is_refused():
    refused("the model sends tokens to experts over axis 'ep': give a mesh", mesh=None)
    refused(
        "the mesh is {'dp': 1, 'pp': 1, 'ep': 2} and the model's experts lie over None; both must be over 'ep'",
        model=decoder(CONFIG),
    )
    refused("max_requests is 3; 2 devices must share it equally", limits=Limits(3, 16, 4, num_blocks=8))
    refused("4 experts do not divide over 8 devices; give a placement", mesh=mesh(8), limits=Limits(8, 16))
    refused(
        "the placement is [1, 2, 3], must be [2 layers with experts, 2 devices, slots]", placement=TWICE[:1]
    )
    refused("held is float64 [2, 2, 3]; give integers", placement=TWICE + 0.5)
    refused("a placement needs a mesh", placement=TWICE, mesh=None, model=decoder(CONFIG))
    serving = Engine(model(), random_params(CONFIG), LIMITS, mesh=mesh())
    with pytest.raises(ValueError, match="the new placement has 3 slots a device, the old one 2"):
        serving.rebalance(TWICE)
    serving = Engine(model(), random_params(CONFIG), Limits(4, 16, 4, num_blocks=6), mesh=mesh())
    for refuses in (serving.add, Runner(serving, 0).check):  # a server says so before it adds it
        with pytest.raises(
            RequestError, match="take 4 blocks of 4 positions, and a device's cache has 3 in all"
        ):
            refuses(np.ones(8, np.int32), SamplingParams(max_tokens=8))


@pytest.mark.slow
def test_two_processes_serve_as_one_program():
    """Each is told of the same requests and has the texts of all of them; experts move between the two."""
    said = what_both_say(Path(__file__).with_name("serving_process.py"))
    assert said[0] == said[1]
    wanted = [list(greedy(n)) for n in range(len(LENGTHS))]
    assert said[0]["texts"] == 2 * wanted
    assert said[0]["counted"] > 0
    assert "prefixes are kept by one process, and the mesh has devices of several" in said[0]["refused"]
