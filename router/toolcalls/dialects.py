"""Which models write their calls how: chosen by name, or told from a chat template's text.

    hermes        <tool_call>{"name": …, "arguments": {…}}</tool_call>, again for each call     Hermes 2 and 3, Qwen 2.5 and 3
    smollm2       <tool_call>[{…}, {…}]</tool_call>, [] for none                                SmolLM2
    llama3_json   {"name": …, "parameters": {…}}, also behind <|python_tag|>                    Llama 3.1, 3.2, 3.3

The names are vLLM's where it has one. Does not know requests.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass

from router.text.chat_template import JsonValue, Message
from router.toolcalls.bare import BareParser
from router.toolcalls.hearing import CallParser
from router.toolcalls.tagged import TaggedParser

_OPENING, _CLOSING, _PYTHON_TAG = "<tool_call>", "</tool_call>", "<|python_tag|>"
_SMOLLM2_SYSTEM = """You can call functions to answer. These are the functions, as JSON:
<tools>{tools}</tools>

Where functions help, answer with nothing but a list of the calls in this form, one entry for each, arguments of the right types:
<tool_call>[
{{"name": "func_name1", "arguments": {{"argument1": "value1", "argument2": "value2"}}}}
]</tool_call>
If no function helps, or a parameter that a function requires is not known, say so."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """One way to write calls. `marks` may be special tokens of the vocabulary, and count as text. With `explains` the model's
    template does not know tools: conversations are put in its words by `explained`.
    """

    name: str
    marks: tuple[str, ...]
    new_parser: Callable[[Container[str]], CallParser]
    explains: bool = False


def _tagged(names: Container[str]) -> CallParser:
    del names  # a tag says clearly enough that it is a call
    return TaggedParser(_OPENING, _CLOSING)


def _bare(names: Container[str]) -> CallParser:
    return BareParser(_PYTHON_TAG, names)


DIALECTS: Mapping[str, Dialect] = {
    dialect.name: dialect
    for dialect in (
        Dialect("hermes", (_OPENING, _CLOSING), _tagged),
        Dialect("smollm2", (_OPENING, _CLOSING), _tagged, explains=True),
        Dialect("llama3_json", (_PYTHON_TAG,), _bare),
    )
}


def dialect_of(template: str) -> Dialect | None:
    """What this chat template teaches its model; None for one that says nothing of calls."""
    if _OPENING in template:
        return DIALECTS["hermes"]
    if "<|start_header_id|>" in template and "tools" in template:
        return DIALECTS["llama3_json"]
    if "named SmolLM" in template:
        return DIALECTS["smollm2"]
    return None


def explained(messages: Sequence[Message], tools: Sequence[JsonValue]) -> tuple[Message, ...]:
    """A conversation about tools in plain words, for a template that does not know them: the tools in a system message of
    their own, before the client's own words of that kind; calls as the model writes them.
    """
    turns = [_in_words(message) for message in messages]
    if not tools:
        return tuple(turns)
    system = _SMOLLM2_SYSTEM.format(tools=json.dumps(list(tools), ensure_ascii=False))
    if turns and turns[0].role == "system":
        first = turns.pop(0)
        system = f"{first.content}\n\n{system}"
    return (Message("system", system), *turns)


def _in_words(message: Message) -> Message:
    if not message.tool_calls:
        return message
    calls = [call["function"] for call in message.tool_calls if isinstance(call, Mapping)]
    written = f"{_OPENING}{json.dumps(calls, ensure_ascii=False)}{_CLOSING}"
    content = f"{message.content}\n{written}" if message.content else written
    return Message(message.role, content, message.name)
