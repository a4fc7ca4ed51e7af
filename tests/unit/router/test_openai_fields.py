"""Every field of OpenAI's and vLLM's requests is in one class: it works, it is taken and changes nothing, or it is refused.

The names come from the official client's own types, from vLLM's request classes, and from our bodies: a new one fails here until
somebody has said what it is.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params

from contracts.errors import InvalidRequest
from router.config import ChatConfig
from router.openai.ask import Envelope, completion_ask
from router.openai.chat import ChatRules
from router.openai.schema import ChatBody, CompletionBody, parse
from router.text.chat_template import ChatTemplate
from router.text.model_card import load_model_card

TEMPLATE = ChatTemplate("{{ tools }} {{ documents }} <tool_call>", {})
CARD = replace(load_model_card(Path(__file__).parents[2] / "fixtures/tiny-austen", "tiny"), chat_template=TEMPLATE)
RULES = ChatRules(CARD, ChatConfig(trust_request_chat_template=True))
TOOL = {"type": "function", "function": {"name": "f"}}
BASE = {
    "chat": {"messages": [{"role": "user", "content": "hi"}], "seed": 1},
    "completion": {"prompt": "hi", "seed": 1},
}

# What the answer is made from: the request differs with it.
WORKS = {
    "model": "tiny",
    "frequency_penalty": 0.5,
    "ignore_eos": True,
    "include_stop_str_in_output": True,
    "logit_bias": {"5": 1},
    "max_tokens": 7,
    "min_p": 0.1,
    "min_tokens": 2,
    "n": 2,
    "presence_penalty": 0.5,
    "priority": 3,
    "prompt_logprobs": 1,
    "repetition_penalty": 1.5,
    "seed": 2,
    "skip_special_tokens": False,
    "stop": ["x"],
    "stop_token_ids": [7],
    "temperature": 0.25,
    "top_k": 3,
    "top_p": 0.5,
    "truncate_prompt_tokens": 5,
    "diptych": {"route": "colocated"},
}
WORKS_IN = {
    "chat": {
        "messages": [{"role": "user", "content": "ho"}],
        "add_generation_prompt": False,
        "add_special_tokens": True,
        "chat_template": "x",
        "chat_template_kwargs": {"a": 1},
        "continue_final_message": True,
        "documents": [{"title": "a"}],
        "logprobs": True,
        "max_completion_tokens": 7,
        "tools": [TOOL],
    },
    "completion": {"prompt": "ho", "add_special_tokens": False, "logprobs": 1},
}
# How the answer is said, or what the request is called: proven at the door, by tests/integration.
FORM = {
    "stream": True,
    "stream_options": None,
    "return_token_ids": True,
    "request_id": "r",
    "echo": True,
    "top_logprobs": None,
    "tool_choice": "auto",
    "parallel_tool_calls": False,
}
# Taken, and nothing in the answer can differ: they say who asks, or how it may be billed, stored or routed.
NO_INFLUENCE = {
    "user": "u",
    "metadata": {"a": "b"},
    "service_tier": "auto",
    "safety_identifier": "s",
    "prompt_cache_key": "k",
    "prompt_cache_options": {},
    "prompt_cache_retention": "24h",
    "spaces_between_special_tokens": True,
    "best_of": 1,
    "include_reasoning": True,
    "store": False,
}
REFUSED = {
    "allowed_token_ids": [5],
    "audio": {"voice": "x"},
    "bad_words": ["x"],
    "cache_salt": "x",
    "function_call": {"name": "f"},
    "functions": [{"name": "f"}],
    "guided_choice": ["a"],
    "guided_decoding_backend": "x",
    "guided_grammar": "x",
    "guided_json": {},
    "guided_regex": "x",
    "guided_whitespace_pattern": "x",
    "kv_transfer_params": {},
    "length_penalty": 2.0,
    "logits_processors": ["x"],
    "media_io_kwargs": {},
    "mm_processor_kwargs": {},
    "modalities": ["audio"],
    "moderation": {},
    "prediction": {"type": "content", "content": "x"},
    "prompt_embeds": "x",
    "reasoning_effort": "low",
    "response_format": {"type": "json_object"},
    "return_tokens_as_token_ids": True,
    "structural_tag": "x",
    "structured_outputs": {},
    "suffix": "x",
    "thinking_token_budget": 3,
    "use_beam_search": True,
    "verbosity": "low",
    "vllm_xargs": {},
    "web_search_options": {},
}
REFUSED_BESIDES = [
    ("best_of", 2),
    ("store", True),
    ("include_reasoning", False),
    ("tool_choice", "required"),
    ("echo", True),
    ("function_call", "auto"),  # of no functions
    *(("service_tier", tier) for tier in ("flex", "scale", "priority")),  # another speed or price
]
NOT_IN = {  # that endpoint has no such field: it is refused there as well
    "chat": {"best_of", "suffix", "prompt", "echo", "prompt_embeds"},
    "completion": {
        *("messages", "max_completion_tokens", "top_logprobs", "tools", "tool_choice", "functions", "function_call"),
        *("add_generation_prompt", "chat_template", "chat_template_kwargs", "continue_final_message", "documents"),
        *("modalities", "audio", "prediction", "web_search_options", "reasoning_effort", "verbosity", "moderation"),
        *("include_reasoning", "media_io_kwargs", "mm_processor_kwargs"),
    },
}
# vLLM's ChatCompletionRequest and CompletionRequest, beyond OpenAI's fields.
VLLM = {
    *("add_generation_prompt", "add_special_tokens", "allowed_token_ids", "bad_words", "cache_salt", "chat_template"),
    *("chat_template_kwargs", "continue_final_message", "documents", "echo", "guided_choice", "guided_grammar"),
    *("guided_decoding_backend", "guided_json", "guided_regex", "guided_whitespace_pattern", "ignore_eos"),
    *("include_reasoning", "include_stop_str_in_output", "kv_transfer_params", "length_penalty", "logits_processors"),
    *("media_io_kwargs", "min_p", "min_tokens", "mm_processor_kwargs", "priority", "prompt_embeds", "prompt_logprobs"),
    *("repetition_penalty", "request_id", "return_token_ids", "return_tokens_as_token_ids", "skip_special_tokens"),
    *(
        "spaces_between_special_tokens",
        "stop_token_ids",
        "structural_tag",
        "structured_outputs",
        "thinking_token_budget",
    ),
    *("top_k", "truncate_prompt_tokens", "use_beam_search", "vllm_xargs", "stream"),
}
OPENAI = {
    "chat": set(chat_create_params.CompletionCreateParamsBase.__annotations__),
    "completion": set(completion_create_params.CompletionCreateParamsBase.__annotations__),
}
OURS = {"chat": ChatBody, "completion": CompletionBody}
KINDS = ("chat", "completion")


def asked(kind, changes):
    """What is asked for, without what a request cannot do without."""
    body = json.dumps({**BASE[kind], **changes}).encode()
    if kind == "chat":
        chat = RULES.ask(parse(ChatBody, body), Envelope("r"))
        return chat.ask, chat.tools is None
    return completion_ask(parse(CompletionBody, body), CARD, Envelope("r")), True


@pytest.mark.parametrize("kind", KINDS)
def test_every_field_is_in_one_class(kind):
    classes = [set(WORKS) | set(WORKS_IN[kind]), set(FORM) - set(WORKS_IN[kind]), set(NO_INFLUENCE), set(REFUSED)]
    for index, one in enumerate(classes):
        for other in classes[index + 1 :]:
            assert not one & other
    assert OPENAI[kind] | VLLM | set(OURS[kind].model_fields) <= set().union(*classes) | NOT_IN[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_what_works_changes_what_is_asked_for(kind):
    base = asked(kind, {})
    for name, value in {**WORKS, **WORKS_IN[kind]}.items():
        if value is not None:
            assert asked(kind, {name: value}) != base, name


@pytest.mark.parametrize("kind", KINDS)
def test_what_has_no_influence_changes_nothing(kind):
    base = asked(kind, {})
    for name, value in NO_INFLUENCE.items():
        if name not in NOT_IN[kind]:
            assert asked(kind, {name: value}) == base, name


@pytest.mark.parametrize("kind", KINDS)
def test_all_else_is_refused_by_name(kind):
    elsewhere = {name: {**FORM, **WORKS, **NO_INFLUENCE}.get(name, "x") for name in NOT_IN[kind]}
    for name, value in [*REFUSED.items(), *elsewhere.items(), *REFUSED_BESIDES]:
        if name == "echo" and kind == "completion":
            continue
        with pytest.raises(InvalidRequest) as caught:
            asked(kind, {name: value if value is not None else "x"})
        assert caught.value.field == name


@pytest.mark.parametrize("kind", KINDS)
def test_what_says_how_is_taken(kind):
    for name, value in FORM.items():
        if name not in NOT_IN[kind]:
            asked(kind, {name: value})
    asked(kind, {"model": None, "diptych": {"route": None, "stages": None}})
    nothing = dict.fromkeys(("include_usage", "include_obfuscation", "continuous_usage_stats"))
    asked(kind, {"stream_options": nothing, "stream": True})
    with pytest.raises(InvalidRequest, match="stream_options"):
        asked(kind, {"stream_options": {"include_usage": True}})
    asked(kind, {"stream_options": {"include_usage": True, "include_obfuscation": False}, "stream": True})
    with pytest.raises(InvalidRequest) as caught:
        asked(kind, {"stream_options": {"include_obfuscation": True}, "stream": True})
    assert caught.value.field == "stream_options.include_obfuscation"
