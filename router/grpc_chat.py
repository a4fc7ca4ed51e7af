"""Conversations as gRPC clients send them, under the rules that OpenAI clients' conversations have.

    pb.Chat ──chat_prompt──▶ ChatPrompt

One set of rules decides what a template can be asked (`router.openai.chat.ChatRules`); here its errors get the names of the
proto's fields. Does not know templates.
"""

from __future__ import annotations

import re
from collections.abc import Sized

from pydantic import JsonValue
from pydantic_core import from_json

from contracts.errors import InvalidRequest
from contracts.pb.diptych.v1 import inference_pb2 as pb
from router.exchange import ChatPrompt
from router.openai.chat import ChatRules
from router.openai.messages import MAX_MESSAGES, MAX_TOOLS, CalledFunction, ChatMessage, ToolCall
from router.openai.schema import TokenizeBody, checked

CHAT_ROLES = ("system", "developer", "user", "assistant", "tool")
_INDEX = re.compile(r"\.(\d+)")
# Fields of OpenAI's form → fields of the proto, where they are called otherwise.
_NAMES = (
    (re.compile(r"^chat_template_kwargs"), "template_variables_json"),
    (re.compile(r"^tools"), "tools_json"),
    (re.compile(r"\.function\.arguments$"), ".arguments_json"),
    (re.compile(r"\.function\.name$"), ".name"),
)


def chat_prompt(chat: pb.Chat, rules: ChatRules, add_special_tokens: bool | None = None) -> ChatPrompt:
    """Raises InvalidRequest naming the field of the message that is wrong."""
    if not chat.messages:
        raise InvalidRequest("chat.messages", 0, "must have at least 1 message")
    _bound(
        "chat.messages", chat.messages, MAX_MESSAGES
    )  # these are looked at one by one: not before they are few enough
    _bound("chat.tools_json", chat.tools_json, MAX_TOOLS)
    tools: list[JsonValue] = [_json(f"chat.tools_json[{i}]", text) for i, text in enumerate(chat.tools_json)]
    fields = {
        "messages": [_message(index, turn) for index, turn in enumerate(chat.messages)],
        "tools": tools,
        "add_special_tokens": add_special_tokens,
        "add_generation_prompt": chat.add_generation_prompt if chat.HasField("add_generation_prompt") else None,
        "continue_final_message": chat.continue_final_message,
        "chat_template_kwargs": _variables(chat.template_variables_json),
    }
    try:
        prompt = rules.prompt(checked(TokenizeBody, fields))
    except InvalidRequest as error:
        raise error.at(f"chat.{_field(error.field)}") from error
    assert isinstance(prompt, ChatPrompt)  # it has messages
    return prompt


def _message(index: int, turn: pb.ChatMessage) -> ChatMessage:
    """The turn; what proto3 cannot leave out is left out where it is empty."""
    if turn.role not in CHAT_ROLES:
        raise InvalidRequest(f"chat.messages[{index}].role", turn.role, f"must be one of {', '.join(CHAT_ROLES)}")
    _bound(f"chat.messages[{index}].tool_calls", turn.tool_calls, MAX_TOOLS)
    calls = [
        ToolCall(id=call.id or None, function=CalledFunction(name=call.name, arguments=call.arguments_json))
        for call in turn.tool_calls
    ]
    return ChatMessage.model_validate(
        {
            "role": turn.role,
            "content": None if calls and not turn.content else turn.content,
            "name": turn.name or None,
            "tool_calls": calls or None,
            "tool_call_id": turn.tool_call_id or None,
        }
    )


def _bound(field: str, given: Sized, most: int) -> None:
    if len(given) > most:
        raise InvalidRequest(field, len(given), f"must have at most {most} entries")


def _variables(text: str) -> dict[str, JsonValue] | None:
    if not text:
        return None
    variables = _json("chat.template_variables_json", text)
    if not isinstance(variables, dict):
        raise InvalidRequest("chat.template_variables_json", text, "must be a JSON object")
    return variables


def _json(field: str, text: str) -> JsonValue:
    try:
        # Unlike json.loads it bounds how deeply things may be nested, and takes no half characters.
        value: JsonValue = from_json(text, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidRequest(field, text, "must be JSON, not nested by the hundred") from error
    return value


def _field(path: str) -> str:
    for pattern, name in _NAMES:
        path = pattern.sub(name, path)
    return _INDEX.sub(r"[\1]", path)
