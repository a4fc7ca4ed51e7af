"""The chat templates that Qwen 2.5, Qwen 3, Llama 3.1 and 3.2 really have: we render them as transformers does, and hear in
an answer the calls that they write.

None is copied here: see tests/chat_templates.py.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import jinja2
import pytest
from transformers import PreTrainedTokenizerFast

from contracts.errors import InvalidRequest
from router.config import ChatConfig
from router.openai.ask import Envelope
from router.openai.chat import ChatRules
from router.openai.schema import ChatBody, parse
from router.text.chat_template import ChatTemplate, Conversation, Message
from router.text.model_card import load_model_card
from router.toolcalls.dialects import DIALECTS, dialect_of
from tests.chat_templates import template_of

TINY = Path(__file__).parents[2] / "fixtures/tiny-austen"
OTHERS = ("cohere2", "deepseekv3", "gemma", "gemma3", "glm4moe", "gptoss", "lfm2", "llama3_training", "phi3", "qwen3_6")
QWEN, LLAMA = ("qwen2_5", "qwen3", "qwen3_instruct_2507"), ("llama3_1", "llama3_2")
BOS = {"bos_token": "<|begin_of_text|>"}

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city, <b>now</b> & later",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {}}, "required": ["city"]},
    },
}
TIME = {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}}}
ARGUMENTS = {"city": "Zürich 🙂 \"'<&>", "days": [1, 2.5, {"at": None, "sure": True}]}


def call(number: int, name: str = "get_weather", **arguments):
    function = {"name": name, "arguments": arguments or ARGUMENTS}
    return {"id": f"call_{number}", "type": "function", "function": function}


def result(number: int, content: str = '{"sky": "clear"}'):
    return {"role": "tool", "tool_call_id": f"call_{number}", "content": content}


SYSTEM = {"role": "system", "content": " You are brief.\n"}
USER = {"role": "user", "content": "Weather?"}
ASKED = [USER, {"role": "assistant", "content": None, "tool_calls": [call(1)]}, result(1)]
TOLD = [*ASKED, {"role": "assistant", "content": "Clear."}, {"role": "user", "content": "And the time?"}]
SAID_AND_ASKED = [
    USER,
    {"role": "assistant", "content": "Let me look.", "tool_calls": [call(1, city="Bonn")]},
    result(1),
]
TWO_AT_ONCE = [
    USER,
    {"role": "assistant", "content": "", "tool_calls": [call(1), call(2, "get_time")]},
    result(1),
    result(2),
]
THOUGHT = [USER, {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nClear."}, USER]
BOTH = {"tools": [WEATHER, TIME]}
CASES = {
    "plain": ([SYSTEM, USER], {}),
    "no system message": ([USER], {}),
    "tools": ([SYSTEM, USER], BOTH),
    "tools without a system message": ([USER], BOTH),
    "a call and its result": ([SYSTEM, *ASKED], BOTH),
    "a conversation after it": ([SYSTEM, *TOLD], BOTH),
    "the same without tools now": ([SYSTEM, *TOLD], {}),
    "words beside a call": (SAID_AND_ASKED, BOTH),
    "two calls, one after the other": ([*ASKED, {"role": "assistant", "tool_calls": [call(2)]}, result(2)], BOTH),
    "no answer wanted": (TOLD, {**BOTH, "add_generation_prompt": False}),
    "thoughts": (THOUGHT, {}),
    "no thinking": ([USER], {"chat_template_kwargs": {"enable_thinking": False}}),
    "tools in the system message": ([USER], {**BOTH, "chat_template_kwargs": {"tools_in_user_message": False}}),
    "continued": ([SYSTEM, USER, {"role": "assistant", "content": "The sky is "}], {"continue_final_message": True}),
}
DATE = {"date_string": "30 Nov 2026"}  # Llama 3.2 looks at the clock


@pytest.fixture(scope="module")
def hugging_face():
    return PreTrainedTokenizerFast(tokenizer_file=str(TINY / "tokenizer.json"), **BOS)


@pytest.fixture(scope="module")
def card():
    return load_model_card(TINY, "tiny")


def ours(card, name, turns, more) -> str:
    """All that a router does with the body of a client, up to the text; a client sends arguments as text."""
    sent = [
        {
            **turn,
            "tool_calls": [
                {**c, "function": {**c["function"], "arguments": json.dumps(c["function"]["arguments"])}}
                for c in turn["tool_calls"]
            ],
        }
        if "tool_calls" in turn
        else turn
        for turn in turns
    ]
    body = {"messages": sent, **more, "chat_template_kwargs": {**DATE, **more.get("chat_template_kwargs", {})}}
    card = replace(card, chat_template=ChatTemplate(template_of(name), BOS))
    conversation = (
        ChatRules(card, ChatConfig())
        .ask(parse(ChatBody, json.dumps(body).encode()), Envelope("r"))
        .ask.prompt.conversation
    )
    return card.template_for(conversation).render(conversation)


def theirs(tokenizer, name, turns, more) -> str:
    options = {"add_generation_prompt": not more.get("continue_final_message"), **DATE, **more}
    options |= options.pop("chat_template_kwargs", {})
    return tokenizer.apply_chat_template(
        [{"content": None, **turn} for turn in turns], chat_template=template_of(name), tokenize=False, **options
    )


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", [*QWEN, *LLAMA])
def test_a_conversation_is_the_same_text(card, hugging_face, name, case):
    turns, more = CASES[case]
    text = ours(card, name, turns, more)
    assert text == theirs(hugging_face, name, turns, more)
    assert ("get_weather" in text) == ("tools" in more or "tool_calls" in str(turns))


@pytest.mark.parametrize("name", QWEN)
def test_two_calls_at_once(card, hugging_face, name):
    text = ours(card, name, TWO_AT_ONCE, BOTH)
    assert text == theirs(hugging_face, name, TWO_AT_ONCE, BOTH)
    assert text.count('<tool_call>\n{"name": "get_') == 2


@pytest.mark.parametrize("name", LLAMA)
def test_what_the_template_refuses_is_refused_in_its_words(card, hugging_face, name):
    with pytest.raises(jinja2.TemplateError, match="single tool-calls"):
        theirs(hugging_face, name, TWO_AT_ONCE, BOTH)
    with pytest.raises(InvalidRequest, match="single tool-calls at once") as caught:
        ours(card, name, TWO_AT_ONCE, BOTH)
    assert caught.value.field == "messages"


@pytest.mark.parametrize("name", [*QWEN, *LLAMA])
def test_what_clients_send_in_other_forms_is_what_the_template_can_take(card, hugging_face, name):
    parts = [{"type": "text", "text": "Weather"}, {"type": "text", "text": "now?"}]
    developer = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts}]
    plain = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Weather\nnow?"}]
    assert ours(card, name, developer, BOTH) == theirs(hugging_face, name, plain, BOTH)


@pytest.mark.parametrize("name", [*QWEN, *LLAMA])
def test_what_the_template_writes_is_heard_as_the_call_that_it_is(card, name):
    """The model has learnt to write calls as its template does: the turn of the assistant is such an answer."""
    unthinking = {**BOTH, "chat_template_kwargs": {"enable_thinking": False}}
    before = ours(card, name, [USER], unthinking)
    after = ours(card, name, ASKED[:2], {**unthinking, "add_generation_prompt": False})
    assert after.startswith(before)
    answer = after[len(before) :]
    end = max(answer.find("<|im_end|>"), answer.find("<|eot_id|>"))  # an end token, which is not text
    dialect = dialect_of(template_of(name))
    assert dialect is DIALECTS["hermes" if name in QWEN else "llama3_json"]
    for width in (1, 7, end):
        parser = dialect.new_parser(frozenset({"get_weather"}))
        heard = [parser.feed(answer[at : min(at + width, end)]) for at in range(0, end, width)] + [parser.end()]
        calls = [delta for one in heard for delta in one.calls]
        assert [delta.name for delta in calls if delta.name is not None] == ["get_weather"]
        assert json.loads("".join(delta.arguments for delta in calls)) == ARGUMENTS
        assert "".join(one.content for one in heard).strip() == "", "and nothing of it is content"


@contextmanager
def refusal() -> Iterator[list[str]]:
    said: list[str] = []
    try:
        yield said
    except (InvalidRequest, jinja2.TemplateError, TypeError) as error:
        said.append(str(error))


@pytest.mark.parametrize("name", OTHERS)
def test_templates_of_other_models_are_the_same_text(hugging_face, name):
    """What one family's template leans on in jinja2 the next does not."""
    turns = [{"role": "system", "content": "Be brief."}, USER, {"role": "assistant", "content": "Clear."}, USER]
    with refusal() as their_refusal:
        expected = theirs(hugging_face, name, turns, {})
    messages = tuple(Message(turn["role"], turn["content"]) for turn in turns)
    with refusal() as our_refusal:
        got = ChatTemplate(template_of(name), BOS).render(Conversation(messages, variables=tuple(DATE.items())))
    assert bool(their_refusal) == bool(our_refusal), (their_refusal, our_refusal)
    if not our_refusal:
        assert got == expected
