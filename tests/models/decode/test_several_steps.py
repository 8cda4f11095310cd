"""Steps of decode that the host starts at once, as it does for a GPU: texts and what is told of them are the same."""

import dataclasses
import functools

import pytest

from models import Kernels
from models.decode import Engine, Limits, SamplingParams, decoder
from tests.models.decode.small_models import continued, drawn, loud_params, small

CONFIG = small(num_groups=1, num_mtp_layers=1)
LIMITS = Limits(max_requests=3, max_positions=28, block_size=4, num_blocks=16, chunk_size=4, max_prefill=8)
MODEL = decoder(CONFIG)
prompts = functools.partial(drawn, CONFIG, seed=7)


def a_params():
    return loud_params(CONFIG)


@functools.cache
def engine(num_steps, drafts=False):
    return Engine(MODEL, a_params(), dataclasses.replace(LIMITS, num_steps=num_steps), drafts=drafts)


def asked():
    """Of each length a prompt; some draw, some stop at tokens that devices know, one at more than they know."""
    lengths = (5, 3, 9, 1, 6, 4)
    plain = [continued(CONFIG, a_params(), prompt, 10, LIMITS.max_positions) for prompt in prompts(*lengths)]
    # The last token of each that is new in it, so that it ends there and not before.
    ends = [next(t for n, t in reversed([*enumerate(text)]) if t not in text[:n]) for text in plain]
    many = tuple(token for token in range(CONFIG.vocab) if token not in plain[4])[:9]
    how = [
        SamplingParams(max_tokens=10),
        SamplingParams(max_tokens=13, temperature=0.8, seed=3, likeliest=2),
        SamplingParams(max_tokens=1),
        SamplingParams(max_tokens=12, stop=(ends[3],)),
        SamplingParams(max_tokens=12, stop=(*many, ends[4])),
        SamplingParams(max_tokens=7, temperature=1.1, top_p=0.9, seed=4),
    ]
    return list(zip(prompts(*lengths), how, strict=True))


def served(serving):
    """Two more come in after each step, so that they come while others decode."""
    numbers, ended, waiting, steps = [], [], asked(), 0
    while waiting or serving.busy:
        for one in waiting[:2]:
            numbers.append(serving.add(*one))
        del waiting[:2]
        ended += serving.step()
        steps += 1
    by_number = {one.id: dataclasses.replace(one, id=0) for one in ended}
    return [by_number[number] for number in numbers], steps


@pytest.mark.parametrize("drafts", [pytest.param(False, marks=pytest.mark.slow), True])
def test_texts_are_those_of_one_step_after_the_other(drafts):
    wanted, many = served(engine(1, drafts))
    before = engine(4, drafts).counts[0].sum()
    found, few = served(engine(4, drafts))
    assert [(one.tokens, one.finish_reason, one.scores) for one in found] == [
        (one.tokens, one.finish_reason, one.scores) for one in wanted
    ]
    assert {one.finish_reason for one in found} == {"stop", "length"}
    if drafts:
        assert [(one.num_drafted, one.num_accepted) for one in found] == [
            (one.num_drafted, one.num_accepted) for one in wanted
        ]
    assert few < many
    # What ends is fed no more, but for the one whose end devices do not know: what is left of its four steps, and the
    # four that were begun before the host knew of them.
    fed = sum(len(prompt) for prompt, _ in asked()) + sum(
        len(one.tokens) - (one.finish_reason == "length") for one in found
    )
    told = engine(4, drafts).counts[0].sum() - before
    assert drafts or 4 <= told / CONFIG.top_k - fed <= 8


def test_a_text_that_is_cancelled_ends_where_it_is():
    serving, received = engine(4), []
    prompt = prompts(5)[0]

    def on_token(token):
        received.append(token)
        if len(received) == 3:
            serving.cancel(number)

    number = serving.add(prompt, SamplingParams(max_tokens=15), on_token)
    (found,) = serving.run()
    assert found.finish_reason == "cancelled"
    assert (
        list(found.tokens) == received == list(continued(CONFIG, a_params(), prompt, 3, LIMITS.max_positions))
    )


@pytest.mark.parametrize("drafts", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_gpus_program_for_one_request_gives_its_texts(drafts):
    """For which a row that nobody asked for stands beside the one; here it runs on a CPU."""
    model = decoder(CONFIG, platform="gpu", kernels=Kernels("plain", "plain"))
    limits = dataclasses.replace(LIMITS, max_requests=1, chunk_size=1, max_prefill=1, num_steps=4)
    one = Engine(model, a_params(), limits, drafts=drafts)
    found, _ = served(one)
    wanted, _ = served(engine(1, drafts))
    assert [text.tokens for text in found] == [text.tokens for text in wanted]
    assert [text.finish_reason for text in found] == [text.finish_reason for text in wanted]


def test_tables_hold_what_the_last_of_the_steps_writes():
    limits = dataclasses.replace(LIMITS, num_steps=4, min_table=8)
    serving = Engine(MODEL, a_params(), limits)
    (prompt,) = prompts(5)
    serving.add(prompt, SamplingParams(max_tokens=20))
    (found,) = serving.run()
    assert found.tokens == tuple(continued(CONFIG, a_params(), prompt, 20, LIMITS.max_positions))
