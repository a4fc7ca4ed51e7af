"""A conversation as OpenAI clients send it: turns, calls of tools and their results, and the tools themselves.

    ChatMessage ──as_message──▶ router.text.chat_template.Message          tools ──parse_tools──▶ as templates take them

Templates get what Hugging Face gives them: a call's arguments as a mapping, a tool as the client wrote it. Does not know
templates or how a model writes calls.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Annotated, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue
from pydantic_core import PydanticCustomError, from_json

from contracts.errors import InvalidRequest, counted
from router.text.chat_template import JsonValue as TemplateValue
from router.text.chat_template import Message

MAX_TOOLS = 128
# More than any context holds, each being a token or more; and a tenth of a second's work for all who wait meanwhile.
MAX_MESSAGES = 2**14
_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
_TOOL_FIELDS = frozenset({"type", "function"})
_FUNCTION_FIELDS = frozenset({"name", "description", "parameters", "strict"})
_NOT_SERVED = ("audio", "function_call", "annotations", "reasoning", "reasoning_content")
_MAX_PLACE_CHARS = 60
_MAY_HOLD = (float, list, dict)


def not_json(given: JsonValue) -> str | None:
    """What is wrong with a value that pydantic takes for JSON: it reads NaN, Infinity and 1e999 as numbers. None: nothing."""
    with suppress(ValueError):  # a tenth of what it takes to look at each, and nearly always enough
        json.dumps(given, allow_nan=False)
        return None
    todo: list[tuple[str, JsonValue]] = [("", given)]
    while todo:
        place, value = todo.pop()
        if isinstance(value, float) and not math.isfinite(value):
            where = f" ({place[1 : _MAX_PLACE_CHARS + 1]})" if place and place.isprintable() else ""
            return f"must be JSON, where no number is {value}{where}"
        if isinstance(value, list):
            todo.extend((f"{place}.{index}", one) for index, one in enumerate(value) if isinstance(one, _MAY_HOLD))
        elif isinstance(value, dict):
            todo.extend((f"{place}.{name}", one) for name, one in value.items() if isinstance(one, _MAY_HOLD))
    return None


def _checked(given: JsonValue) -> JsonValue:
    wrong = not_json(given)
    if wrong is not None:
        raise PydanticCustomError("not_json", "{wrong}", {"wrong": wrong})
    return given


T = TypeVar("T")
FIRST = Field(fail_fast=True)
Listed = Annotated[list[T], FIRST]  # of which the first mistake is told: a million of them are a body, too
FreeJson = Annotated[JsonValue, AfterValidator(_checked)]  # a field's value whose shape the client chooses


class Strict(BaseModel):
    """Fields by name and type, and no others."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)


class TextPart(Strict):
    """A piece of a message's content. Only text is served."""

    type: Literal["text"]
    text: str


class CalledFunction(Strict):
    """What a tool call calls; arguments are the text of a JSON object, or the object."""

    name: str
    arguments: str | dict[str, JsonValue] = ""


class ToolCall(Strict):
    """A call that the assistant made earlier in the conversation. `index` is a place in a stream, and means nothing here."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None

    def for_template(self, where: str) -> TemplateValue:
        """In Hugging Face's form. Raises InvalidRequest for arguments that are no JSON object."""
        arguments: object = self.function.arguments
        if isinstance(arguments, str):
            try:
                # Unlike json.loads it bounds how deeply things may be nested.
                arguments = from_json(arguments, allow_inf_nan=False) if arguments else {}
            except ValueError:
                arguments = None
        if not isinstance(arguments, dict):
            raise InvalidRequest(f"{where}.function.arguments", self.function.arguments, "must be a JSON object")
        if (wrong := not_json(arguments)) is not None:
            raise InvalidRequest(f"{where}.function.arguments", self.function.arguments, wrong)
        call: dict[str, TemplateValue] = {
            "type": self.type,
            "function": {"name": self.function.name, "arguments": arguments},
        }
        return call if self.id is None else {"id": self.id, **call}


class ChatMessage(Strict):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[Listed[TextPart], Field(max_length=MAX_MESSAGES)] | None = None
    name: str | None = None
    refusal: str | None = None
    tool_calls: Listed[ToolCall] | None = Field(default=None, max_length=MAX_TOOLS)
    tool_call_id: str | None = None
    # Not served; in what servers answer and clients send back they are null or empty.
    audio: JsonValue = None
    function_call: JsonValue = None
    annotations: JsonValue = None
    reasoning: JsonValue = None
    reasoning_content: JsonValue = None

    def as_message(self, where: str) -> Message:
        """For the template. Raises InvalidRequest for turns that cannot be rendered."""
        for name in _NOT_SERVED:
            value: JsonValue = self.__dict__[name]
            if value not in (None, []):
                raise InvalidRequest(f"{where}.{name}", value, "is not served yet; leave it out")
        if self.tool_calls and self.role != "assistant":
            raise InvalidRequest(
                f"{where}.tool_calls", counted(len(self.tool_calls), "call"), "only the assistant calls"
            )
        if self.tool_call_id is not None and self.role != "tool":
            raise InvalidRequest(f"{where}.tool_call_id", self.tool_call_id, "only messages of role tool answer calls")
        calls = tuple(
            call.for_template(f"{where}.tool_calls.{index}") for index, call in enumerate(self.tool_calls or ())
        )
        return Message(self.role, self._text(where), self.name, calls, self.tool_call_id)

    def _text(self, where: str) -> str | None:
        """Parts a line each, as in vLLM. None for a turn that is calls only."""
        content = self.content
        if content is None and self.refusal is not None:
            content = self.refusal
        elif self.refusal is not None:
            raise InvalidRequest(f"{where}.refusal", self.refusal, "cannot be there beside content")
        if content is None:
            if self.role != "assistant":
                raise InvalidRequest(f"{where}.content", None, "must be a string or a list of text parts")
            return None if self.tool_calls else ""
        return content if isinstance(content, str) else "\n".join(part.text for part in content)


def parse_tools(tools: JsonValue) -> tuple[Mapping[str, TemplateValue], ...]:
    """The tools as the client wrote them. Raises InvalidRequest naming the part that is wrong."""
    if tools is None:
        return ()
    if not isinstance(tools, list) or len(tools) > MAX_TOOLS:
        raise InvalidRequest("tools", tools, f"must be a list of at most {MAX_TOOLS} tools")
    return tuple(_tool(f"tools.{index}", tool) for index, tool in enumerate(tools))


def tool_names(tools: tuple[Mapping[str, TemplateValue], ...]) -> frozenset[str]:
    """Of tools that `parse_tools` has seen."""
    functions = [tool["function"] for tool in tools]
    return frozenset(str(function["name"]) for function in functions if isinstance(function, Mapping))


def _tool(where: str, tool: JsonValue) -> Mapping[str, TemplateValue]:
    if not isinstance(tool, dict):
        raise InvalidRequest(where, tool, 'must be {"type": "function", "function": {…}}')
    _only(where, tool, _TOOL_FIELDS)
    if tool.get("type") != "function":
        raise InvalidRequest(f"{where}.type", tool.get("type"), "must be function")
    function = tool.get("function")
    if not isinstance(function, dict):
        raise InvalidRequest(f"{where}.function", function, "must be an object")
    _only(f"{where}.function", function, _FUNCTION_FIELDS)
    name, description, parameters = function.get("name"), function.get("description"), function.get("parameters")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidRequest(f"{where}.function.name", name, "must be letters, digits, _, . and -, at most 64")
    if not isinstance(description, str | None):
        raise InvalidRequest(f"{where}.function.description", description, "must be a string")
    if not isinstance(parameters, dict | None):
        raise InvalidRequest(f"{where}.function.parameters", parameters, "must be a JSON schema, an object")
    if function.get("strict") not in (None, False):
        raise InvalidRequest(
            f"{where}.function.strict", function["strict"], "arguments are not constrained; leave it out"
        )
    return tool


def _only(where: str, given: Mapping[str, JsonValue], known: frozenset[str]) -> None:
    for name in given:
        if name not in known:
            raise InvalidRequest(f"{where}.{name}"[:80], given[name], "is not a field of a tool")
