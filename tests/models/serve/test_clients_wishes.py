"""What clients expect besides texts: chats, how likely tokens are, keys, and counters for Prometheus."""

import asyncio
import json
import sys
from collections import Counter
from types import SimpleNamespace

import httpx
import jinja2
import numpy as np
import pytest
import tokenizers
from prometheus_client.parser import text_string_to_metric_families
from starlette.requests import Request
from starlette.responses import JSONResponse
from tokenizers import decoders, models, pre_tokenizers

from models.decode import Completion, SamplingParams, Score
from models.decode.text import ByteTokenizer
from models.serve import Chat, Refused
from models.serve.job import Piece, _Choice
from models.serve.metrics import Metrics, TokenTimer
from models.weights import WeightsError, load_tokenizer
from tests.models.decode.small_models import random_params, whole
from tests.models.serve.running import LONG, Slow, as_tokens, running
from tests.models.serve.test_http_server import CONFIG, LIMITS, STOP, Asking, alone, engine, generated, until

WORDS = "{%- for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"


@pytest.fixture(scope="module")
def server():
    chat = Chat(WORDS, {}, as_tokens)
    with running(engine(), stop=(STOP,), chat=chat) as (url, _, _):
        yield url


@pytest.fixture(scope="module")
def client(server):
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0, timeout=LONG) as client:
        yield client


def logprobs(text):
    """By the plain forward and NumPy: of each byte but the first its own, and all of them; with those before it."""
    padded = np.zeros((1, LIMITS.max_positions), np.int32)
    padded[0, : len(text)] = text
    logits = np.asarray(whole(CONFIG, random_params(CONFIG), padded))[0, : len(text) - 1].astype(np.float64)
    every = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return every[np.arange(len(text) - 1), text[1:]], every


def continued(prompt, number):
    """The likeliest tokens."""
    alone().add(as_tokens(prompt), SamplingParams(max_tokens=number, stop=(STOP,)))
    return list(alone().run()[0].tokens)


def test_a_prompt_and_its_text_with_how_likely_they_are(client):
    """As evaluations ask for it: the prompt echoed, and of each token whether it is the likeliest."""
    answer = client.completions.create(
        model="tiny", prompt="def f(", max_tokens=5, temperature=0, echo=True, logprobs=2
    )
    (choice,) = answer.choices
    told = choice.logprobs
    tokens = [*as_tokens("def f("), *continued("def f(", 5)]
    own, every = logprobs(tokens)
    assert told.tokens == [ByteTokenizer().decode([token]) for token in tokens] and told.text_offset == list(
        range(11)
    )
    assert choice.text == ByteTokenizer().decode(tokens)
    assert told.token_logprobs[0] is None and told.top_logprobs[0] is None
    np.testing.assert_allclose(told.token_logprobs[1:], own, atol=2e-4)
    for place, best in enumerate(told.top_logprobs[1:]):
        assert best[told.tokens[place + 1]] >= told.token_logprobs[place + 1] - 1e-9
        assert max(best.values()) == pytest.approx(every[place].max(), abs=2e-4)
    made = zip(told.token_logprobs[6:], told.top_logprobs[6:], strict=True)
    assert [logprob == max(best.values()) for logprob, best in made] == [True] * 5


@pytest.mark.parametrize("stream", [False, True])
def test_lm_eval_cuts_off_one_token_behind_the_prompt_though_that_ends_the_text(stream):
    """It asks for one token and sums up ``token_logprobs[len(context):-1]``."""
    prompt = as_tokens("def f(")
    (end,) = continued("def f(", 1)
    asked = dict(prompt=prompt.tolist(), max_tokens=1, temperature=0, echo=True, logprobs=1, stream=stream)
    with running(engine(), stop=(end,)) as (url, _, _):
        answer = httpx.post(f"{url}/v1/completions", json={"model": "tiny"} | asked, timeout=LONG).text
    (choice,) = json.loads(answer.split("\n\n")[0].removeprefix("data: "))["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("def f(", "stop")
    own, every = logprobs([*prompt, end])
    told = choice["logprobs"]
    assert sum(told["token_logprobs"][4:-1]) == pytest.approx(own[3:5].sum(), abs=2e-4)
    assert told["token_logprobs"][-1] == max(told["top_logprobs"][-1].values())
    assert told["token_logprobs"][-1] == pytest.approx(every[-1].max(), abs=2e-4)
    assert (told["tokens"][-1], told["text_offset"][-1]) == (ByteTokenizer().decode([end]), len(prompt))


def test_a_token_that_is_a_part_of_a_character_stands_where_that_does(client):
    answer = client.completions.create(
        model="tiny", prompt="日本 is", max_tokens=1, temperature=0, echo=True, logprobs=0
    )
    assert answer.choices[0].logprobs.text_offset == [0, 0, 0, 1, 1, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("stream", [False, True])
def test_how_likely_the_tokens_of_a_text_are(client, stream):
    asked = dict(model="tiny", prompt="for", max_tokens=7, temperature=0, logprobs=0, stream=stream)
    answer = client.completions.create(**asked)
    choices = [event.choices[0] for event in answer] if stream else answer.choices
    tokens = [token for choice in choices for token in choice.logprobs.tokens]
    found = [logprob for choice in choices for logprob in choice.logprobs.token_logprobs]
    offsets = [offset for choice in choices for offset in choice.logprobs.text_offset]
    made = continued("for", 7)
    assert tokens == [ByteTokenizer().decode([token]) for token in made]
    assert ByteTokenizer().decode(made) == "".join(choice.text for choice in choices)
    assert offsets == list(range(len(made)))
    own, _ = logprobs([*as_tokens("for"), *made])
    np.testing.assert_allclose(found, own[2:], atol=2e-4)


def test_words_that_stop_a_text_end_its_logprobs(client):
    made = continued("for", 9)
    word = next(chr(token) for token in made[3:] if 32 < token < 127)
    answer = client.completions.create(
        model="tiny", prompt="for", max_tokens=9, temperature=0, stop=[word], logprobs=0
    )
    until = made.index(ord(word)) + 1
    assert answer.choices[0].logprobs.tokens == [ByteTokenizer().decode([token]) for token in made[:until]]
    assert answer.choices[0].finish_reason == "stop" and word not in answer.choices[0].text


def test_tokens_behind_a_word_that_stops_are_nobodys():
    """Several may come at once, those of the prompt's scores ahead of them."""
    metrics = Metrics(SimpleNamespace(num_open=0, num_running=0, num_used_blocks=0))
    choice = _Choice(ByteTokenizer().decode, ["b"], "echo", TokenTimer(metrics))
    scores = [Score(ord(letter), -1.0, ()) for letter in "xyabc"]
    text = choice.receive([ord("a"), ord("b"), ord("c")], scores)
    assert (text, choice.stopped, choice.num_tokens) == ("a", True, 2)
    assert choice.piece(0, text, "stop") == Piece(0, "echoa", "stop", tuple(scores[:4]))
    assert choice.receive([ord("d")], scores[:1]) == "" and choice.piece(0, "", None) == Piece(0, "", None)
    choice.finish(Completion(0, (), "stop", stop_score=scores[0]))
    assert choice.piece(0, "", "stop") == Piece(0, "", "stop")
    timed = asyncio.run(metrics.answer(Request({"type": "http"}))).body.decode()
    assert "serve_first_token_seconds_count 1.0" in timed and "serve_next_token_seconds_count 1.0" in timed


def test_a_chat_is_what_its_template_makes_of_it(client):
    messages = [
        {"role": "system", "content": "Be."},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    ]
    written = "<system>Be.<user>ab<assistant>"
    text, reason, number = generated(written, max_tokens=9)
    for most in ({"max_tokens": 9}, {"max_completion_tokens": 9}):
        answer = client.chat.completions.create(model="tiny", messages=messages, temperature=0, **most)
        (choice,) = answer.choices
        assert (choice.message.role, choice.message.content, choice.finish_reason) == (
            "assistant",
            text,
            reason,
        )
        assert answer.object == "chat.completion" and answer.usage.prompt_tokens == len(written)
        assert answer.usage.completion_tokens == number
    told = dict(stream=True, stream_options={"include_usage": True})
    *events, last = client.chat.completions.create(
        model="tiny", messages=messages, temperature=0, max_tokens=9, **told
    )
    assert "".join(event.choices[0].delta.content for event in events) == text
    assert [event.choices[0].delta.role for event in events] == ["assistant"] + [None] * (len(events) - 1)
    assert events[-1].choices[0].finish_reason == reason and events[0].object == "chat.completion.chunk"
    assert last.choices == [] and last.usage.completion_tokens == number


def test_a_chat_ends_where_the_room_does_and_tells_how_likely_its_tokens_are(client):
    written = "<user>a<assistant>"
    text, _, number = generated(written, max_tokens=LIMITS.max_positions - len(written))
    answer = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "a"}],
        temperature=0,
        logprobs=True,
        top_logprobs=3,
    )
    (choice,) = answer.choices
    assert choice.message.content == text and answer.usage.completion_tokens == number
    told = choice.logprobs.content
    assert [one.top_logprobs[0].logprob == one.logprob and len(one.top_logprobs) for one in told] == [
        3
    ] * number
    assert all(bytes(one.bytes).decode(errors="replace") == one.token for one in told)
    assert b"".join(bytes(one.bytes) for one in told).decode(errors="replace") == text
    assert [one.token for one in told] == [ByteTokenizer().decode([t]) for t in continued(written, number)]


def test_a_template_hears_who_speaks():
    heard, slow = [], Slow()
    messages = [{"role": "user", "content": "a", "name": "Ada"}, {"role": "user", "content": "b"}]
    slow.go_on.release()
    with running(slow, chat=lambda given: heard.extend(given) or as_tokens("x")) as (url, _, _):
        asked = {"model": "tiny", "messages": messages, "max_tokens": 1}
        assert httpx.post(f"{url}/v1/chat/completions", json=asked, timeout=LONG).status_code == 200
    assert heard == messages


def test_a_chat_tells_of_its_message_alone_how_likely_it_is():
    (end,) = continued("<user>a<assistant>", 1)
    asked = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "a"}],
        "temperature": 0,
        "logprobs": True,
    }
    with running(engine(), stop=(end,), chat=Chat(WORDS, {}, as_tokens)) as (url, _, _):
        answer = httpx.post(f"{url}/v1/chat/completions", json=asked, timeout=LONG).json()
    (choice,) = answer["choices"]
    assert (choice["finish_reason"], choice["logprobs"]["content"]) == ("stop", [])


@pytest.mark.parametrize(
    "change, message",
    [
        ({"messages": []}, "messages: List should have at least 1 item"),
        ({"messages": [{"role": "judge", "content": "x"}]}, "messages.0.role: Input should be 'system', 'developer'"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages.0.content"),
        ({"top_logprobs": 2}, "top_logprobs is 2 without logprobs: set logprobs to true"),
        ({"max_tokens": 2, "max_completion_tokens": 2}, "max_tokens and max_completion_tokens say the same: give one"),
        ({"messages": [{"role": "user", "content": "\ud83d"}]}, "messages: are not a text of Unicode"),
        ({"tools": []}, "tools: this server knows no such parameter; leave it out"),
        ({"messages": [{"role": "user", "content": "x" * 70}]}, "the prompt of 87 tokens is too long"),
    ],
)  # fmt: skip
def test_chats_that_will_not_do(server, change, message):
    body = {"model": "tiny", "messages": [{"role": "user", "content": "x"}]} | change
    asked = dict(content=json.dumps(body), headers={"content-type": "application/json"})
    answer = httpx.post(f"{server}/v1/chat/completions", **asked, timeout=LONG)
    assert answer.status_code == 400 and message in answer.json()["error"]["message"], answer.text


TEMPLATE = """{{ bos_token }}{% for message in messages %}
    {%- if message['role'] == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}
    {%- if loop.index0 > 3 %}{% break %}{% endif %}
<|{{ message['role'] }}|>{% generation %}{{ message['content'] | tojson }}{% endgeneration %}
{{ message | tojson(sort_keys=true, separators=(',', ':')) }}
{% endfor %}
{% if add_generation_prompt %}<|assistant|>{% endif %}"""


def checkpoint(folder, *, where):
    """A tokenizer of bytes with names for what begins and ends a text, and its template, in one of its places."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(models.BPE({letter: n for n, letter in enumerate(letters)}, []))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.add_special_tokens(["<begin>", "<end>"])
    made.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<begin>", "eos_token": "<end>"}
    if where == "settings":
        settings["chat_template"] = TEMPLATE
    elif where == "by name":
        settings["chat_template"] = [
            {"name": "rag", "template": ""},
            {"name": "default", "template": TEMPLATE},
        ]
    elif where == "file":
        (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return load_tokenizer(folder)


@pytest.mark.parametrize("where", ["settings", "by name", "file"])
def test_a_checkpoints_template_writes_what_transformers_writes(tmp_path, where):
    transformers = pytest.importorskip("transformers")
    tokenizer = checkpoint(tmp_path, where=where)
    chat = Chat(tokenizer.chat_template, tokenizer.special, tokenizer.encode_as_it_is)
    messages = [
        {"role": role, "content": f'"{role}" <end> ü\n'}
        for role in ("system", "user", "assistant", "user", "user")
    ]
    own = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert chat.write(messages) == own.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    wanted = own(chat.write(messages), add_special_tokens=False)["input_ids"]
    assert chat(messages).tolist() == wanted and {256, 257} < set(wanted)


def test_templates_that_will_not_do(tmp_path):
    tokenizer = checkpoint(tmp_path, where="file")
    chat = Chat(tokenizer.chat_template, tokenizer.special, tokenizer.encode_as_it_is)
    with pytest.raises(Exception, match="messages: the model's chat template refuses them: no tools here"):
        chat.write([{"role": "tool", "content": ""}])
    with pytest.raises(Exception, match="chat template refuses them: .*unsafe"):
        Chat("{{ messages.__class__.__mro__ }}", {}, as_tokens).write([{}])
    with pytest.raises(Refused, match="chat template refuses them: .*str.*int"):
        Chat("{{ messages[0].content + 1 }}", {}, as_tokens).write([{"content": "x"}])
    with pytest.raises(Refused, match=r"refuses them: no \\ud83d") as refused:
        Chat("{{ raise_exception('no ' ~ messages[0].content) }}", {}, as_tokens).write(
            [{"content": "\ud83d"}]
        )
    assert b"ud83d" in JSONResponse(refused.value.body).body, "half a pair of surrogates has no bytes"
    with pytest.raises(ValueError, match="the chat template is not Jinja: 'break' outside loop"):
        Chat("{% break %}", {}, as_tokens)
    with pytest.raises(ValueError, match="the chat template is not Jinja: Expected an expression"):
        Chat("{% for %}", {}, as_tokens)
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(WeightsError, match="chat_template.jinja: .*utf-8"):
        load_tokenizer(tmp_path)
    assert checkpoint(tmp_path, where="file").chat_template and load_tokenizer(tmp_path).special == {
        "bos_token": "<begin>", "eos_token": "<end>",
    }  # fmt: skip


MACRO = "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(N) }}"
LOOPS = "{% for a in range(N) %}{% for b in messages * N if b %}{% endfor %}{% endfor %}"
TREE = "{% for a in [N] recursive %}{% if a %}{{ loop([a - 1, a - 1]) }}{% endif %}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "ends", "never"),
    [(MACRO, 8, 9), (LOOPS, 30, 32), (TREE, 8, 9)],
)
def test_a_template_that_does_not_end_is_ended(monkeypatch, template, ends, never):
    """Macros and loops that call themselves double what is done with each level."""
    monkeypatch.setattr("models.serve.chat.MAX_ITERATIONS", 1000)
    chat = Chat(template.replace("N", str(ends)), {}, as_tokens)
    assert [chat.write([{"role": "user"}]).strip() for _ in range(3)] == [""] * 3, "each begins to count anew"
    with pytest.raises(
        Refused, match="refuses them: it is not done after 1,000 turns .*; send fewer or shorter"
    ) as no:
        Chat(template.replace("N", str(never)), {}, as_tokens).write([{"role": "user"}])
    assert no.value.status == 400


def test_loops_are_jinjas():
    """Whatever a template may ask of one."""
    template = """{% for m in messages if m.x != 2 %}{{ loop.index }}/{{ loop.length }} {{ loop.revindex0 }}
{{ (loop.previtem or m).x }} {{ (loop.nextitem or m).x }} {{ loop.last }} {{ loop.changed(m.x > 3) }}
{{ loop.cycle("a", "b") }} {% else %}{% endfor %}
{% for m in messages recursive %}{{ m.x }}{{ loop.depth }}{{ loop(m.of) if m.of }}{% endfor %}
{% for m in messages[5:] %}{% else %}none{% endfor %}
{% for m in messages[::-1] %}{% if m.x == 3 %}{% continue %}{% endif %}{{ m.x }}{% endfor %}
{% for k, v in messages[0].items() %}{{ k }}{{ v }}{% endfor %}{% for c in "word" %}{{ c }},{% endfor %}"""
    messages = [{"x": x, "of": [{"x": 10 * x}]} for x in (1, 2, 3, 4, 5)]
    plain = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    wanted = plain.from_string(template).render(messages=messages)
    assert Chat(template, {}, as_tokens).write(messages) == wanted and "4/4 0\n4 5 True" in wanted


def test_a_model_without_a_template_says_so():
    with running(engine()) as (url, _, _):
        body = {"model": "tiny", "messages": [{"role": "user", "content": "x"}]}
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=LONG)
    assert answer.status_code == 400
    assert "the model 'tiny' has no chat template" in answer.json()["error"]["message"]


def test_only_who_has_a_key_may_ask():
    openai = pytest.importorskip("openai")
    with running(engine(), keys=("one", "two", "drüi")) as (url, _, _):
        for key, status in ((None, 401), ("three", 401), ("one", 200), ("two", 200), ("drüi", 200)):
            headers = {} if key is None else {"authorization": f"Bearer {key}".encode()}
            answer = httpx.get(f"{url}/v1/models", headers=headers)
            assert answer.status_code == status
            if status == 401:
                assert answer.headers["www-authenticate"] == "Bearer"
                assert answer.json()["error"]["code"] == "invalid_api_key"
                assert "send the header 'Authorization: Bearer KEY'" in answer.json()["error"]["message"]
        for scheme, status in (("bearer", 200), ("BEARER ", 200), ("Basic", 401)):
            headers = {"authorization": f"{scheme} one"}
            assert httpx.get(f"{url}/v1/models", headers=headers).status_code == status
        assert httpx.get(f"{url}/health").status_code == httpx.get(f"{url}/metrics").status_code == 200
        ask = openai.OpenAI(base_url=f"{url}/v1", api_key="wrong", max_retries=0)
        with ask as client, pytest.raises(openai.AuthenticationError):
            client.models.list()
        with openai.OpenAI(base_url=f"{url}/v1", api_key="two", max_retries=0) as client:
            assert client.completions.create(model="tiny", prompt="a", max_tokens=1).choices


def samples(url):
    """By name and labels."""
    found = Counter()
    for family in text_string_to_metric_families(httpx.get(f"{url}/metrics").text):
        for sample in family.samples:
            found[sample.name, *sample.labels.values()] = sample.value
    return found


def test_prometheus_reads_what_is_held():
    slow = Slow()
    with running(slow) as (url, _, _):
        asking = [Asking(url) for _ in range(3)]
        until(lambda: samples(url)["serve_texts_open",] == 3)
        slow.go_on.release()  # the first is in a step, and the others are let in behind it
        until(lambda: samples(url)["serve_slots_used",] == 3)
        assert samples(url)["serve_blocks_used",] == 3
        slow.go_on.release(9)
        assert {one.answer().status_code for one in asking} == {200}
        found = samples(url)
        assert found["serve_texts_open",] == found["serve_slots_used",] == found["serve_blocks_used",] == 0
        if sys.platform == "linux":
            with open("/proc/self/statm") as file:
                pages = int(file.read().split()[1])
            assert samples(url)["process_resident_memory_bytes",] == pytest.approx(4096 * pages, rel=0.5)


def test_prometheus_reads_what_the_server_failed_at():
    with running(Slow(), chat=lambda messages: 1 / 0) as (url, _, _):
        asked = {"model": "tiny", "messages": [{"role": "user", "content": "a"}]}
        answer = httpx.post(f"{url}/v1/chat/completions", json=asked, timeout=LONG)
        assert answer.status_code == 500
        assert answer.json()["error"]["message"] == "the server failed at this request"
        assert samples(url)["serve_requests_total", "/v1/chat/completions", "500"] == 1


def test_prometheus_reads_what_was_done():
    with running(engine(), stop=(STOP,)) as (url, _, _):
        prompt = "a prompt that fills blocks"
        made = 0
        for _ in range(2):
            answer = httpx.post(
                f"{url}/v1/completions",
                json={"model": "tiny", "prompt": prompt, "max_tokens": 6, "temperature": 0},
                timeout=LONG,
            )
            made += answer.json()["usage"]["completion_tokens"]
        assert (
            httpx.post(f"{url}/v1/completions", json={"model": "gpt", "prompt": ""}, timeout=LONG).status_code
            == 404
        )
        assert httpx.get(f"{url}/favicon.ico").status_code == 404
        answer, found = httpx.get(f"{url}/metrics"), samples(url)
    assert answer.headers["content-type"].startswith("text/plain; version=")
    assert found["serve_requests_total", "/v1/completions", "200"] == 2
    assert (
        found["serve_requests_total", "/v1/completions", "404"]
        == found["serve_requests_total", "other", "404"]
        == 1
    )
    assert (
        found["serve_texts_total", generated(prompt, max_tokens=6)[1]] == 2
        and found["serve_texts_open",] == 0
    )
    assert (
        found["serve_prompt_tokens_total",] == 2 * len(prompt) and found["serve_reused_tokens_total",] == 24
    )
    assert found["serve_generated_tokens_total",] == made
    assert (
        found["serve_first_token_seconds_count",] == 2
        and found["serve_next_token_seconds_count",] == made - 2
    )
    assert found["serve_text_seconds_count",] == 2
    assert found["serve_first_token_seconds_sum",] <= found["serve_text_seconds_sum",]
