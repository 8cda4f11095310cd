"""Continuous batching: whoever comes and goes, each request's text is the plain forward's."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from models.decode import Engine, Limits, RequestError, SamplingParams, decoder
from tests.models.decode.small_models import (
    COMPILED,
    continued,
    drawn,
    logits_ahead,
    loud_params,
    small,
    whole,
)
from tests.models.decode.test_sampling import drawn_by_numpy

CONFIG = small(num_groups=1, num_mtp_layers=1)
LIMITS = Limits(max_requests=3, max_positions=24, block_size=4, num_blocks=14, chunk_size=4, max_prefill=8)

MODEL = decoder(CONFIG)


def a_params():
    return loud_params(CONFIG)


@functools.cache
def engine(**how):
    """One for all tests of a kind: what a test leaves must not matter to the next."""
    return Engine(MODEL, a_params(), LIMITS, **how)


prompts = functools.partial(drawn, CONFIG)


def greedy(prompt, number):
    return continued(CONFIG, a_params(), prompt, number, LIMITS.max_positions)


def texts(completions):
    return {one.id: one.tokens for one in completions}


def test_requests_come_and_go_and_nothing_is_compiled_again():
    serving = engine()
    serving.add(prompts(5)[0], SamplingParams(max_tokens=2))
    serving.run()
    before = len(COMPILED)
    wanted, found = {}, []
    arrivals = zip(prompts(11, 1, 6, 16, 3, 9, 4), (5, 9, 1, 8, 12, 4, 7), strict=True)
    for prompt, number in arrivals:
        wanted[serving.add(prompt, SamplingParams(max_tokens=number))] = prompt, number
        found += serving.step()
    found += serving.run()
    assert len(COMPILED) == before
    assert texts(found) == {key: greedy(*asked) for key, asked in wanted.items()}
    assert {one.finish_reason for one in found} == {"length"} and not serving.busy
    assert len(serving._scheduler.blocks) == LIMITS.num_blocks
    assert len(COMPILED) > before, "the oracle's own compilation is counted, so others would be"


@pytest.mark.parametrize("read", [True, False], ids=["weights_of_a_file", "weights_of_a_program"])
def test_one_token_of_a_prompt_and_one_more_compile_all_that_follows(read):
    """As a server does before it says that it is ready. Weights that were read lie on their device for good."""
    params = jax.device_put(a_params(), jax.devices()[0]) if read else a_params()
    serving = Engine(MODEL, params, LIMITS)
    for _ in range(2):
        before = len(COMPILED)
        serving.add([0], SamplingParams(max_tokens=2))
        serving.run()
    assert len(COMPILED) == before


def test_a_step_reads_what_is_used_and_what_it_runs_is_compiled_beforehand():
    limits = dataclasses.replace(LIMITS, min_table=12)
    assert limits.table_sizes == (3, 6)
    # As they are read from a file, on a device for good, and sizes that no other test has compiled for.
    serving = Engine(
        MODEL, jax.device_put(a_params(), jax.devices()[0]), dataclasses.replace(limits, num_blocks=15)
    )
    serving.compile()
    compiled, read, run = len(COMPILED), [], serving._programs[False].decode

    def decode(weights, cache, rows):
        wanted, tables, _, running = rows
        read.append((int(np.max(np.asarray(running.starts)[wanted])) + 1, tables.shape[1]))
        return run(weights, cache, rows)

    serving._programs[False] = serving._programs[False]._replace(decode=decode)
    asked = list(zip(prompts(5, 14, 3), (17, 4, 2), strict=True))
    numbers = [serving.add(prompt, SamplingParams(max_tokens=number)) for prompt, number in asked]
    found = texts(serving.run())
    serving.add(prompts(4)[0], SamplingParams(max_tokens=3, temperature=0.7))
    serving.run()
    assert len(COMPILED) == compiled, "programs that draw, which are others, were compiled, too"
    assert found == {key: greedy(*one) for key, one in zip(numbers, asked, strict=True)}
    assert {blocks for _, blocks in read} == {3, 6}
    assert all(blocks == (3 if used <= 12 else 6) for used, blocks in read)


def test_after_an_interrupted_step_the_engine_says_so(monkeypatch):
    """As of Ctrl-C in a notebook: tokens of the step before were never read, and ``run`` never ended."""
    serving = Engine(MODEL, a_params(), LIMITS)
    serving.add(prompts(5)[0], SamplingParams(max_tokens=9))
    serving.step()
    decode = serving._decode

    def interrupted(*args):
        decode(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(serving, "_decode", interrupted)
    with pytest.raises(KeyboardInterrupt):
        while serving.busy:
            serving.step()
    monkeypatch.undo()
    for goes_on in (serving.step, serving.run):
        with pytest.raises(
            RuntimeError, match="Engine: a step was interrupted or failed, .*; make a new Engine"
        ):
            goes_on()


def test_a_step_is_begun_before_the_last_one_is_read(monkeypatch):
    """What a step came to is the next one's input, and the host is not asked for it."""
    serving, events = engine(), []

    def noted(name, function):
        def run(*arguments):
            events.append(name)
            return function(*arguments)

        return run

    plain = serving._programs[False]
    both = {name: noted(name, getattr(plain, name)) for name in ("prefill", "decode")}
    monkeypatch.setitem(serving._programs, False, plain._replace(**both))
    monkeypatch.setattr(jax, "device_get", noted("read", jax.device_get))
    prompt = prompts(3)[0]
    serving.add(prompt, SamplingParams(max_tokens=5))
    (found,) = serving.run()
    assert found.tokens == greedy(prompt, 5)
    assert events == [
        "prefill",
        "decode",
        "decode",
        "read",
        "read",
        "decode",
        "read",
        "decode",
        "read",
        "read",
    ]


def test_what_stays_as_it_was_is_sent_once(monkeypatch):
    """Who decodes, where, and how tokens are chosen: only a request that comes, goes or outgrows its table is news."""
    serving, sent = engine(), []
    send = jax.make_array_from_callback
    monkeypatch.setattr(jax, "make_array_from_callback", lambda *given: sent.append(given[0]) or send(*given))
    one, other, drawn = prompts(5, 4, 6)
    draws = SamplingParams(max_tokens=3, temperature=0.7, seed=5)
    numbers = [serving.add(one, SamplingParams(max_tokens=14))]
    for _ in range(4):
        serving.step()
    assert len(sent) == 2, "who decodes, and their blocks"
    numbers.append(serving.add(other, SamplingParams(max_tokens=3)))
    for _ in range(5):
        serving.step()
    assert len(sent) == 2 + 2 + 2, "the second came and went"
    numbers.append(serving.add(drawn, draws))
    found = texts(serving.run())
    assert len(sent) == 6 + 5 + 2, "with the third came how they choose"
    assert found[numbers[0]] == greedy(one, 14)
    alone = engine()
    alone.add(drawn, draws)
    assert found[numbers[2]] == alone.run()[0].tokens


@pytest.mark.parametrize(("before", "in_vain"), [(0, 0), (8, 1)], ids=["known_to_devices", "to_the_host"])
def test_a_text_that_has_stopped_is_not_gone_on_with(before, in_vain):
    """Though the step after was begun before its end was known: each token that is fed chooses experts."""
    serving, prompt = engine(), prompts(7)[0]
    wanted = greedy(prompt, 9)
    end = next(n for n in range(2, 9) if wanted[n] not in wanted[:n])
    others = [token for token in range(CONFIG.vocab) if token not in wanted][:before]
    counted = serving.counts[0].sum()
    serving.add(prompt, SamplingParams(max_tokens=9, stop=(*others, wanted[end])))
    (found,) = serving.run()
    assert found.tokens == wanted[:end] and found.finish_reason == "stop"
    assert serving.counts[0].sum() - counted == CONFIG.top_k * (
        len(prompt) - found.num_reused + end + in_vain
    )


def test_sizes_of_tables_double_up_to_the_whole():
    assert Limits(max_positions=1000).table_sizes == (16, 32, 63)
    assert Limits(max_positions=24, block_size=4, min_table=5).table_sizes == (2, 4, 6)
    assert (
        Limits(max_positions=256).table_sizes
        == Limits(max_positions=256, min_table=9999).table_sizes
        == (16,)
    )


def drawn_by_hand(prompt, how):
    """A token at a time: by the plain forward over the whole text and the number of the seed and the token's place."""
    text, key = list(prompt), jax.random.key(how.seed, impl="threefry2x32")
    for place in range(len(prompt), len(prompt) + how.max_tokens):
        padded = np.zeros((1, LIMITS.max_positions), np.int32)
        padded[0, :place] = text
        logits = np.asarray(whole(CONFIG, a_params(), padded))[0, place - 1]
        uniform = float(jax.random.uniform(jax.random.fold_in(key, place)))
        token, margin = drawn_by_numpy(logits, how.temperature, how.top_p, uniform)
        assert margin > 1e-4, "float32's own noise may not decide"
        text.append(token)
    return tuple(text[len(prompt) :])


def test_texts_are_drawn_of_the_plain_forward_whatever_is_served_beside_them():
    serving, numbers = engine(), []
    ways = ((1.2, 0.9), (0.6, 1.0), (2.5, 0.5), (1.2, 1.0), (1.2, 0.9))
    asked = [
        SamplingParams(max_tokens=10, temperature=temperature, top_p=top_p, seed=seed)
        for seed, (temperature, top_p) in enumerate(ways, start=2**32 - 5)
    ]
    lengths = prompts(5, 9, 2, 7, 3)
    for prompt, params in zip(lengths, asked, strict=True):
        numbers.append(serving.add(prompt, params))
        serving.add(prompt[:1], SamplingParams(max_tokens=3))
    found = texts(serving.run())
    wanted = [drawn_by_hand(*one) for one in zip(lengths, asked, strict=True)]
    assert [found[number] for number in numbers] == wanted


def test_stop_tokens_and_streaming():
    serving, (prompt,) = engine(), prompts(6)
    text = greedy(prompt, 8)
    stop = text[4]
    first = text.index(stop)
    received = []
    serving.add(prompt, SamplingParams(max_tokens=8, stop=(stop, 47)), received.append)
    (one,) = serving.run()
    assert one.finish_reason == "stop" and one.tokens == text[:first] == tuple(received) and one.error is None
    assert one.stop_score is None
    serving.add(prompt, SamplingParams(max_tokens=8, stop=(stop, 47), likeliest=1))
    (one,) = serving.run()
    wanted = logprobs_of([*prompt, *one.tokens])[-1].max()
    assert one.stop_score.token == stop == one.stop_score.likeliest[0][0]
    assert one.stop_score.logprob == pytest.approx(wanted, abs=1e-4) and len(one.scores) == first


def test_a_callback_that_raises_ends_its_own_request_alone():
    serving, (first, second) = engine(), prompts(6, 3)

    def closed(token):
        raise BrokenPipeError("the client is gone")

    serving.add(first, SamplingParams(max_tokens=6), closed)
    serving.add(second, SamplingParams(max_tokens=6))
    bad, good = serving.run()
    assert (bad.finish_reason, len(bad.tokens)) == ("error", 1)
    assert bad.error == "on_token raised BrokenPipeError('the client is gone')"
    assert good.tokens == greedy(second, 6)
    assert len(serving._scheduler.blocks) == LIMITS.num_blocks


def test_requests_are_cancelled_waiting_or_served_even_by_their_own_callback():
    serving, asked = engine(), prompts(5, 5, 5, 5)
    numbers = []

    def cancel_itself(token):
        serving.cancel(numbers[1])

    for n, prompt in enumerate(asked):
        callback = cancel_itself if n == 1 else None
        numbers.append(serving.add(prompt, SamplingParams(max_tokens=9), callback))
    serving.cancel(numbers[3])
    found = serving.step()
    serving.cancel(numbers[0])
    serving.cancel(1000)
    found = {one.id: one for one in found + serving.run()}
    reasons = [found[number].finish_reason for number in numbers]
    assert reasons == ["cancelled", "cancelled", "length", "cancelled"]
    assert len(found[numbers[1]].tokens) == 1 and found[numbers[3]].tokens == ()
    assert found[numbers[2]].tokens == greedy(asked[2], 9)


@pytest.mark.parametrize(
    "prompt, params, message",
    [
        ([], {}, "the prompt is empty: give at least one token"),
        ([0.5], {}, "the prompt's tokens are float64, must be integers"),
        ([1, 48], {}, "the prompt holds token 48, which the model does not know: its tokens are 0 to 47; is this"),
        ([-1], {}, "the prompt holds token -1, which the model does not know"),
        ([1], {"stop": (2, 99)}, "the stop tokens hold token 99, which the model does not know"),
        ([1], {"stop": (2**70,)}, f"the stop tokens hold token {2**70}, which the model does not know"),
        ([1], {"max_tokens": 0}, "max_tokens is 0, must be at least 1"),
        ([1], {"temperature": -1.0, "top_p": 0.0}, "temperature is -1.0, must be 0 or more; top_p is 0.0, must be"),
        ([1], {"temperature": float("nan")}, "temperature is nan, must be 0 or more"),
        ([1], {"seed": -1}, r"seed is -1, must lie between 0 and 2\*\*32 - 1"),
        ([1] * 20, {"max_tokens": 5}, "the prompt of 20 tokens and max_tokens 5 are 25 together, the limit is max_pos"
         "itions 24: shorten the prompt, or ask for at most 4 tokens"),
        ([1] * 24, {"max_tokens": 5}, "the prompt of 24 tokens is too long: the limit is max_positions 24"),
    ],
)  # fmt: skip
def test_what_cannot_be_served_is_refused_and_others_are_unharmed(prompt, params, message):
    serving, (other,) = engine(), prompts(3)
    serving.add(other, SamplingParams(max_tokens=2))
    with pytest.raises(RequestError, match=message):
        serving.add(prompt, SamplingParams(**params))
    assert serving.run()[0].tokens == greedy(other, 2)


def test_more_than_the_whole_cache_is_refused():
    small_cache = Limits(max_requests=3, max_positions=24, block_size=4, num_blocks=4, chunk_size=4)
    message = (
        "the prompt of 10 tokens and max_tokens 8 take 5 blocks of 4 positions, and a device's cache has 4 in all: ask "
        "for less, or raise num_blocks"
    )
    with pytest.raises(RequestError, match=message):
        Engine(MODEL, a_params(), small_cache).add(prompts(10)[0], SamplingParams(max_tokens=8))


def test_who_finds_no_room_waits_for_it_though_there_is_a_slot():
    serving, asked = engine(), prompts(14, 14, 14)
    for prompt in asked:
        serving.add(prompt, SamplingParams(max_tokens=8))
    assert (
        serving.step() == []
        and len(serving._scheduler.waiting) == 1
        and len(serving._scheduler.blocks) == 14 - 2 * 6
    )
    assert [one.tokens for one in serving.run()] == [greedy(prompt, 8) for prompt in asked]


def test_weights_that_are_no_numbers_fail_those_who_meet_them():
    asked = prompts(6, 6, 6)
    wanted = [greedy(prompt, 6) for prompt in asked]
    bad = next(t for t in range(48) if not any(t in p or t in w for p, w in zip(asked, wanted, strict=True)))
    params = a_params()
    table = params["shared"]["embed_tokens"].at[bad].set(np.nan)
    params = params | {"shared": params["shared"] | {"embed_tokens": table}}
    serving = Engine(MODEL, params, LIMITS)
    for _ in range(2):  # the second time in blocks where others left NaN
        numbers = []
        for prompt in asked:
            serving.add([*prompt[:3], bad, *prompt[3:]], SamplingParams(max_tokens=6))
            numbers.append(serving.add(prompt, SamplingParams(max_tokens=6)))
        found = {one.id: one for one in serving.run()}
        assert [found[number].tokens for number in numbers] == wanted
        failed = [one for one in found.values() if one.id not in numbers]
        assert [one.finish_reason for one in failed] == ["error"] * 3
        assert {one.error for one in failed} == {
            "the model's answer at position 7 is not a number: its weights hold NaN or infinity, or its activations "
            "grew beyond their type; check the weights, or compute in float32"
        }


@pytest.mark.parametrize("drafts", [False, True])
def test_a_common_beginning_is_computed_once(drafts):
    serving = Engine(MODEL, a_params(), LIMITS, drafts=drafts)  # one that knows nothing yet
    (begin,), ends = prompts(11, seed=5), prompts(4, 4, seed=6)
    first, second = (np.concatenate([begin, end]) for end in ends)
    asked = [first, second, first, first[:8]]
    found = []
    for prompt in asked:
        serving.add(prompt, SamplingParams(max_tokens=5))
        found += serving.run()
    assert [one.num_reused for one in found] == [0, 8, 12, 4]
    assert [one.tokens for one in found] == [greedy(prompt, 5) for prompt in asked]
    more = np.asarray([*first, *found[0].tokens])
    serving.add(more, SamplingParams(max_tokens=3))
    (one,) = serving.run()
    assert one.num_reused == 16 and one.tokens == greedy(more, 3)
    assert len(serving._scheduler.blocks) == LIMITS.num_blocks


# ------------------------------------------------------------------------------------------------ drafts


def guesses(prompt, text):
    """How often the module ahead is asked, and right, replayed on the whole text."""
    length = len(prompt) + len(text)
    tokens = np.zeros((1, LIMITS.max_positions), np.int32)
    tokens[0, :length] = [*prompt, *text]
    guess = np.argmax(np.asarray(logits_ahead(CONFIG, a_params(), tokens)), -1)[0]
    asked = right = 0
    at = len(prompt) - 1
    while at + 3 < length:  # the last token is the answer to a token that is fed anyway
        asked += 1
        hit = guess[at] == tokens[0, at + 2]
        right += hit
        at += 1 + hit
    return asked, right


def test_drafts_change_nothing_but_the_number_of_steps():
    serving, asked = engine(drafts=True), prompts(7, 2, 10, 5)
    for prompt in asked:
        serving.add(prompt, SamplingParams(max_tokens=12))
    found = serving.run()
    assert [one.tokens for one in found] == [greedy(prompt, 12) for prompt in asked]
    counts = [(one.num_drafted, one.num_accepted) for one in found]
    assert counts == [guesses(prompt, one.tokens) for prompt, one in zip(asked, found, strict=True)]
    assert 0 < sum(right for _, right in counts) < sum(tried for tried, _ in counts)


def test_drafts_change_no_sampled_text_and_no_stop():
    asked = prompts(7, 2, 10)
    outcomes = []
    for drafts in (True, False):
        serving = engine(drafts=drafts)
        for seed, prompt in enumerate(asked):
            serving.add(prompt, SamplingParams(max_tokens=14, temperature=1.0, seed=seed, stop=(2,)))
        outcomes.append([(one.tokens, one.finish_reason) for one in serving.run()])
    assert outcomes[0] == outcomes[1]
    assert {reason for _, reason in outcomes[0]} == {"stop", "length"}


def test_limits_and_drafts_that_cannot_be():
    with pytest.raises(ValueError, match="Limits: max_requests is 0, block_size is -1; must be at least 1"):
        Limits(max_requests=0, block_size=-1)
    with pytest.raises(
        ValueError, match="drafts need a module of multi-token prediction, and the model has none"
    ):
        Engine(decoder(small()), None, LIMITS, drafts=True)


def logprobs_of(text):
    """By the plain forward and NumPy: [S, V], in double precision, row i of what stands behind token i."""
    padded = np.zeros((1, LIMITS.max_positions), np.int32)
    padded[0, : len(text)] = text
    logits = np.asarray(whole(CONFIG, a_params(), padded))[0, : len(text)].astype(np.float64)
    return (
        logits
        - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True))
        - logits.max(-1, keepdims=True)
    )


@pytest.mark.parametrize(
    "drafts, microbatches", [(False, 1), (True, 1), pytest.param(False, 2, marks=pytest.mark.slow)]
)
def test_how_likely_tokens_are_is_what_the_plain_forward_says(drafts, microbatches):
    """Beside others that do not ask, of a prompt in several chunks whose beginning is in the cache."""
    serving, (asked, other) = engine(drafts=drafts), prompts(11, 6, seed=1)
    if microbatches == 2:
        limits = dataclasses.replace(LIMITS, max_requests=4)
        serving = Engine(MODEL, a_params(), limits, microbatches=2)
    serving.add(asked, SamplingParams(max_tokens=1))
    serving.run()
    received, tokens = [], []
    how = dict(max_tokens=6, temperature=0.0 if drafts else 0.8, seed=3)
    wants = SamplingParams(**how, likeliest=3, score_prompt=True)
    key = serving.add(asked, wants, tokens.append, received.append)
    serving.add(other, SamplingParams(max_tokens=5))
    alone = serving.add(asked, SamplingParams(**how, likeliest=0))
    plainly = serving.add(asked, SamplingParams(**how))
    found = {one.id: one for one in serving.run()}
    one, text = found[key], [*asked, *found[key].tokens]
    assert (one.num_accepted > 0) == drafts, "with drafts a step has two tokens"
    assert found[alone].tokens == found[plainly].tokens == one.tokens == tuple(tokens)
    assert one.num_reused == 0 < found[plainly].num_reused and received == [*one.prompt_scores, *one.scores]
    assert [score.token for score in received] == text[1:]
    wanted = logprobs_of(text)
    for place, score in enumerate(received):
        assert score.logprob == pytest.approx(wanted[place, score.token], abs=1e-4)
        numbers, logprobs = zip(*score.likeliest, strict=True)
        best = np.sort(wanted[place])[::-1][:3]
        np.testing.assert_allclose(logprobs, best, atol=1e-4)
        np.testing.assert_allclose(wanted[place, list(numbers)], best, atol=1e-4)
    assert [score.token for score in found[alone].scores] == list(found[alone].tokens)
    assert [score.logprob for score in found[alone].scores] == pytest.approx(
        [s.logprob for s in one.scores], abs=1e-4
    )
    assert not found[alone].prompt_scores and not found[plainly].scores
    assert all(not score.likeliest for score in found[alone].scores)


def test_a_scored_prompt_fails_where_the_model_has_no_number_though_its_text_has():
    """The last layer's broken expert leaves its NaN with the tokens that chose it."""
    (prompt,), params = prompts(9, seed=4), a_params()
    for expert in range(4):
        broken = jax.tree_util.tree_map_with_path(
            lambda path, leaf, e=expert: leaf.at[0, e].set(np.nan) if "'experts'" in str(path) else leaf,
            params["stages"]["layers"][0],
        )
        layers = [broken, *params["stages"]["layers"][1:]]
        damaged = params | {"stages": params["stages"] | {"layers": layers}}
        padded = np.zeros((1, LIMITS.max_positions), np.int32)
        padded[0, : len(prompt)] = prompt
        finite = np.isfinite(np.asarray(whole(CONFIG, damaged, padded))[0, : len(prompt)]).all(-1)
        if finite[-1] and not finite.all():
            break
    first = int(np.argmin(finite)) + 1
    serving = Engine(MODEL, damaged, LIMITS)
    serving.add(prompt, SamplingParams(max_tokens=1))
    serving.add(prompt, SamplingParams(max_tokens=1, likeliest=1, score_prompt=True))
    unscored, scored = serving.run()
    assert (unscored.finish_reason, scored.finish_reason, len(scored.prompt_scores)) == (
        "length",
        "error",
        first - 1,
    )
    assert scored.error.startswith(
        f"the model's answer at position {first} is not a number: its weights hold NaN"
    )


def test_whoever_asks_how_likely_tokens_are_has_to_be_able_to_hear_it():
    serving, (prompt,) = engine(), prompts(5, seed=6)

    def fails(score):
        raise KeyError("theirs")

    serving.add(prompt, SamplingParams(max_tokens=3, likeliest=0), None, fails)
    (ended,) = serving.run()
    assert ended.finish_reason == "error" and ended.error == "on_score raised KeyError('theirs')"
    assert not ended.tokens and not ended.scores, "a token that is not taken has no score"
    serving.add(prompt, SamplingParams(max_tokens=3, likeliest=0, score_prompt=True), None, fails)
    (ended,) = serving.run()
    assert ended.error == "on_score raised KeyError('theirs')" and not ended.tokens
    assert (
        len(ended.prompt_scores) == 1
        and not ended.scores
        and len(serving._scheduler.blocks) == LIMITS.num_blocks
    )
    for params, message in (
        (SamplingParams(likeliest=21), "likeliest is 21, must be 0 to 20"),
        (SamplingParams(likeliest=-1), "likeliest is -1, must be 0 to 20"),
        (SamplingParams(score_prompt=True), "score_prompt is asked for without likeliest"),
    ):
        with pytest.raises(RequestError, match=message):
            serving.add(prompt, params)
