"""Whatever a client sends, it is taken or refused by name: never a fault of ours, never ignored."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from contracts.errors import InvalidRequest
from contracts.sampling import MAX_SEED
from router.config import ChatConfig
from router.openai.ask import Envelope, completion_ask
from router.openai.chat import ChatRules
from router.openai.schema import NOT_SERVED, ChatBody, CompletionBody, parse
from router.text.chat_template import ChatTemplate
from router.text.model_card import load_model_card

TINY = load_model_card(Path(__file__).parents[2] / "fixtures/tiny-austen", "tiny")
CARD = replace(TINY, chat_template=ChatTemplate("{{ messages }}", {}))


def chat_ask(body, card, envelope):
    return ChatRules(card, ChatConfig()).ask(body, envelope).ask


KINDS = {"chat": (ChatBody, chat_ask), "completion": (CompletionBody, completion_ask)}
GOOD = {"chat": {"messages": [{"role": "user", "content": "hi"}]}, "completion": {"prompt": "hi"}}

scalars = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5)
values = st.recursive(
    scalars, lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text(max_size=5), v, max_size=3), max_leaves=6
)


def ask(kind, body):
    model, make = KINDS[kind]
    return make(parse(model, body if isinstance(body, bytes) else json.dumps(body).encode()), CARD, Envelope("r"))


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_value_in_any_field(kind, data):
    names = sorted(KINDS[kind][0].model_fields)
    changes = data.draw(st.dictionaries(st.sampled_from(names), values, max_size=3))
    try:
        asked = ask(kind, {**GOOD[kind], **changes})
        asked.sampling.validate(CARD.vocab_size)
    except InvalidRequest as error:
        assert error.field
        assert error.message


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=200, deadline=None)
@given(body=st.binary(max_size=40) | values.map(lambda v: json.dumps(v).encode()))
def test_any_body(kind, body):
    try:
        ask(kind, body)
    except InvalidRequest as error:
        assert error.message


@pytest.mark.parametrize("kind", KINDS)
@given(name=st.text("abcdefghijklmnopqrstuvwxyz_", min_size=1, max_size=12))
@example(name="none")  # what pydantic calls a type
def test_an_unknown_field_is_named(kind, name):
    if name in KINDS[kind][0].model_fields:
        return
    with pytest.raises(InvalidRequest) as caught:
        ask(kind, {**GOOD[kind], name: 1})
    assert caught.value.field == name


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_served_is_refused_by_name_unless_it_asks_for_nothing(kind):
    for name in NOT_SERVED.keys() & KINDS[kind][0].model_fields.keys():
        for nothing in (None, *NOT_SERVED[name]):
            ask(kind, {**GOOD[kind], name: nothing})
        with pytest.raises(InvalidRequest) as caught:
            ask(kind, {**GOOD[kind], name: "something"})
        assert caught.value.field == name


@pytest.mark.parametrize("kind", KINDS)
def test_every_unserved_field_belongs_to_a_body(kind):
    assert not NOT_SERVED.keys() - ChatBody.model_fields.keys() - CompletionBody.model_fields.keys()


def test_a_body_that_is_not_json_is_shown_as_far_as_it_fits_a_line():
    for body, head in [(b"{bad", "{bad'"), (b"\xff" * 4000, "\ufffd" * 60), (b"", "'")]:
        with pytest.raises(InvalidRequest) as caught:
            parse(ChatBody, body)
        assert caught.value.message.startswith(f"body: got '{head}")
        assert "must be JSON" in caught.value.message


ARGUMENTS = '"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": %s}}]}]'
NO_NUMBERS = [
    ('"tools": [{"type": "function", "function": {"name": "f", "parameters": {"maximum": %s}}}]', "tools"),
    ('"tool_choice": {"type": %s}', "tool_choice"),
    ('"documents": [{"a": [1, {"b": %s}]}]', "documents.0.a"),
    ('"chat_template_kwargs": {"a": %s}', "chat_template_kwargs.a"),
    (ARGUMENTS % '{"x": [%s]}', "messages.0.tool_calls.0.function.arguments"),
    (ARGUMENTS % '"{\\"x\\": %s}"', "messages.0.tool_calls.0.function.arguments"),
    ('"prompt_cache_options": {"a": %s}', "prompt_cache_options.a"),
    ('"logit_bias": {"5": %s}', "logit_bias.5"),
    ('"temperature": %s', "temperature"),
]


@pytest.mark.parametrize(("body", "field"), NO_NUMBERS, ids=[field for _, field in NO_NUMBERS])
@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999"])
def test_what_is_no_number_of_json_is_refused_by_name_wherever_it_is(body, field, number):
    good = "" if '"messages"' in body else '"messages": [{"role": "user", "content": "hi"}], '
    with pytest.raises(InvalidRequest) as caught:
        ask("chat", f"{{{good}{body % number}}}".encode())
    assert caught.value.field == field
    parse(ChatBody, f"{{{good}{body % 1.5}}}".encode())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("given", "seed"),
    [(0, 0), (7, 7), (MAX_SEED, MAX_SEED), (-1, MAX_SEED), (-2, MAX_SEED - 1), (-(2**63), 0)],
)
def test_every_seed_of_64_bits_is_one(kind, given, seed):
    sampling = ask(kind, {**GOOD[kind], "seed": given}).sampling
    sampling.validate(CARD.vocab_size)
    assert sampling.seed == seed


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("given", [2**63, -(2**63) - 1, 10**30])
def test_a_seed_that_is_longer_is_refused_as_it_was_given(kind, given):
    with pytest.raises(InvalidRequest, match=rf"seed: got {given}, must be an integer from -{2**63} to {MAX_SEED}"):
        ask(kind, {**GOOD[kind], "seed": given})


def test_the_sampling_that_was_asked_for():
    body = {
        **GOOD["completion"],
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": -1,
        "min_p": 0.1,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.2,
        "logit_bias": {"7": -1, "5": 2.5},
        "seed": 11,
        "max_tokens": 9,
        "min_tokens": 2,
        "stop": "x",
        "stop_token_ids": [3],
        "ignore_eos": True,
        "logprobs": 3,
        "prompt_logprobs": 0,
        "skip_special_tokens": False,
        "include_stop_str_in_output": True,
        "priority": -2,
    }
    asked = ask("completion", body)
    sampling = asked.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 0, 0.1)
    assert (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (1.2, 0.1, 0.2)
    assert sampling.logit_bias == ((5, 2.5), (7, -1))
    assert (sampling.seed, sampling.max_tokens, sampling.min_tokens) == (11, 9, 2)
    assert (sampling.stop_token_ids, sampling.ignore_eos) == ((3,), True)
    assert (sampling.logprobs, sampling.prompt_logprobs) == (3, 0)
    assert (asked.stop, asked.skip_special_tokens, asked.include_stop, asked.priority) == (("x",), False, True, -2)
    assert not asked.fill_context


@pytest.mark.parametrize(
    ("kind", "body", "said"),
    [
        ("chat", {"messages": [{"content": "x"}]}, "messages.0.role: got nothing, is required"),
        ("chat", {"messages": [None]}, "messages.0: got nothing, must be an object"),
        (
            "chat",
            {"messages": [{"role": "user", "content": 5}]},
            "messages.0.content: got 5, must be a string or a list",
        ),
        (
            "chat",
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages.0.content.0.type: got 'image_url', must be 'text'",
        ),
        ("completion", {**GOOD["completion"], "n": True}, "n: got true, must be an integer"),
        ("completion", {**GOOD["completion"], "stop": ["a", 1]}, "stop.1: got 1, must be a string"),
        ("completion", {**GOOD["completion"], "stop": {}}, "stop: got {}, must be a string or a list"),
        (
            "completion",
            {**GOOD["completion"], "store": {"a": [None, True]}},
            "store: got {'a': [null, true]}, is not served",
        ),
        (
            "completion",
            {**GOOD["completion"], "seed": 10**4000},
            "seed: got a number of 13288 bits, must be an integer",
        ),
    ],
)
def test_what_is_wrong_is_said_of_the_very_place_in_the_words_of_json(kind, body, said):
    with pytest.raises(InvalidRequest) as caught:
        ask(kind, body)
    assert caught.value.message.startswith(said)


@pytest.mark.parametrize(
    ("kind", "body", "field", "most"),
    [
        ("chat", {"messages": GOOD["chat"]["messages"] * 16385}, "messages", 16384),
        (
            "chat",
            {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 16385}]},
            "messages.0.content",
            16384,
        ),
        ("chat", {**GOOD["chat"], "documents": [{}] * 16385}, "documents", 16384),
        ("completion", {**GOOD["completion"], "logit_bias": {f"a{i}": 1 for i in range(1025)}}, "logit_bias", 1024),
        ("completion", {"prompt": ["a", *["b"] * 128]}, "prompt", 128),
    ],
)
def test_lists_are_no_longer_than_any_model_could_read(kind, body, field, most):
    """A body of 8 MB that was 260,000 messages took seconds to be turned into a conversation, while all streams waited."""
    with pytest.raises(InvalidRequest, match=f"at most {most} (entries|answers)") as caught:
        ask(kind, body)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("completion", b'{"prompt": [' + b"[1]," * 2**17 + b"[1]]}"),
        ("completion", b'{"prompt": "x", "metadata": {' + b'"a":"",' * 2**17 + b'"b": ""}}'),
        ("chat", b'{"messages": [{"role": "user", "content": "x"}], "tools": [' + b"{}," * 2**17 + b"{}]}"),
        ("chat", b'{"messages": [], "chat_template_kwargs": {"a": "\\"", "b": [' + b"[]," * 2**17 + b"[]]}}"),
        ("chat", b'{"messages": [], "chat_template_kwargs": ' + b"[" * 2**18 + b"}"),
    ],
)
def test_a_body_is_not_made_of_a_million_things(kind, body):
    """It took five seconds to read one of 5 MB, in which nobody else was served."""
    with pytest.raises(InvalidRequest, match=f"at most {2**17} lists, objects and fields in one") as caught:
        ask(kind, body)
    assert caught.value.field == "body"


@pytest.mark.parametrize("text", ["[{:" * 2**17, '\\"[{:' * 2**16, "\n[[:" * 2**16])
def test_a_prompt_may_have_as_many_brackets_as_it_likes(text):
    (prompt,) = ask("completion", {"prompt": text}).prompts
    assert prompt.text == text


@pytest.mark.parametrize(
    "body", [b'{"prompt": "' + b'\\"[{:' * 2**17, b'"' * 2**18 + b"[" * 2**18, b"[" * 2**17 + b'"\\']
)
def test_what_never_ends_is_no_json_and_is_found_so_at_once(body):
    with pytest.raises(InvalidRequest) as caught:
        ask("completion", body)
    assert caught.value.field == "body"


@pytest.mark.parametrize(
    ("kind", "body", "field"),
    [
        ("completion", b'{"prompt": [' + b"1," * 100_000 + b"1.5]}", "prompt"),
        ("completion", b'{"prompt": "x", "stop_token_ids": [' + b'"1",' * 100_000 + b"1]}", "stop_token_ids.0"),
        ("completion", b'{"prompt": "x"' + b"".join(b',"a%d":1' % i for i in range(100_000)) + b"}", "body"),
        ("chat", b'{"messages": [' + b'{"role": "u"},' * 10_000 + b"1]}", "messages.0.role"),
    ],
)
def test_thousands_of_mistakes_cost_no_more_than_one(kind, body, field):
    """A body of 2 MB, one number of it wrong, held the event loop for seven seconds, each mistake being made an object of."""
    with pytest.raises(InvalidRequest) as caught:
        ask(kind, body)
    assert caught.value.field == field
    assert isinstance(caught.value.__cause__, ValidationError)
    assert caught.value.__cause__.error_count() < 10 or field == "body"
