"""A model's own chat template: a conversation in, the text that the model was trained to see out.

Rendered in jinja2's immutable sandbox with what Hugging Face gives templates (raise_exception, strftime_now, tojson,
loop controls, the generation tag), so that a template from a hub can spoil nothing but its own text. Time and memory are
not bounded here: `router.text.template_processes` renders what strangers wrote. Does not know tokens.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from contracts.errors import InvalidRequest, ModelLoadError, counted

JsonValue = str | int | float | bool | None | Sequence["JsonValue"] | Mapping[str, "JsonValue"]
RESERVED_VARIABLES = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
_CONTINUED = (
    "CONTINUE_FINAL_MESSAGE_TAG "  # Hugging Face's own word and way: the space shows whether the template strips
)


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation. `tool_calls` are in Hugging Face's form: their arguments are mappings, not text."""

    role: str
    content: str | None
    name: str | None = None
    tool_calls: tuple[JsonValue, ...] = ()
    tool_call_id: str | None = None

    def as_variables(self) -> dict[str, JsonValue]:
        """As templates expect a message; what is optional only when it is there."""
        variables: dict[str, JsonValue] = {"role": self.role, "content": self.content}
        if self.name is not None:
            variables["name"] = self.name
        if self.tool_calls:
            variables["tool_calls"] = list(self.tool_calls)
        if self.tool_call_id is not None:
            variables["tool_call_id"] = self.tool_call_id
        return variables


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a chat request asks to have rendered. `variables` are the request's chat_template_kwargs; `template` is its own
    template, in place of the model's. With `continue_final_message` the text ends where the last message's content does.
    """

    messages: tuple[Message, ...]
    add_generation_prompt: bool = True
    variables: tuple[tuple[str, JsonValue], ...] = ()
    tools: tuple[JsonValue, ...] = ()
    documents: tuple[JsonValue, ...] = ()
    continue_final_message: bool = False
    template: str | None = None

    @property
    def num_chars(self) -> int:
        """About how long it is rendered: what was said, calls and tools."""
        said = sum(len(message.content or "") for message in self.messages)
        calls = sum(len(str(message.tool_calls)) for message in self.messages if message.tool_calls)
        return said + calls + (len(str(self.tools)) if self.tools else 0)


class TemplateRefusal(Exception):
    """The template does not take this conversation, or is none; the message is for whoever sent it."""


class _GenerationTag(jinja2.ext.Extension):
    """Accepts {% generation %} … {% endgeneration %}, which marks the assistant's words for training."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own declaration

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """One template and the names of the model's special tokens. Safe to use from any thread."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Raises ModelLoadError when the template is not valid jinja2. It is only read here: compiling one already computes
        what is constant in it, however large.
        """
        self.source = source
        self.special_tokens = dict(special_tokens)
        self._environment = environment()
        try:
            _check(self._environment, source)
        except jinja2.TemplateSyntaxError as error:
            raise ModelLoadError(f"chat template, line {error.lineno}: {error.message}") from error
        except RecursionError as error:
            raise ModelLoadError("chat template: it is nested too deeply") from error

    def render(self, conversation: Conversation) -> str:
        """The prompt's text, in this process and without bounds. Raises InvalidRequest with the template's own words."""
        try:
            template = self._compiled if conversation.template is None else compiled(conversation.template)
            text = rendered(template, template_variables(conversation, self.special_tokens))
            return continued(conversation, text)
        except TemplateRefusal as refusal:
            raise refused(conversation, str(refusal)) from refusal

    @cached_property
    def _compiled(self) -> jinja2.Template:
        return compiled(self.source)


def says(source: str, word: str) -> bool:
    """Whether a template ever says this word, the name of a variable or of a field: it does nothing with others."""
    return word in source and re.search(rf"(?<!\w){re.escape(word)}(?!\w)", source) is not None


def template_variables(conversation: Conversation, special_tokens: Mapping[str, str]) -> dict[str, JsonValue]:
    """All that a template is given."""
    messages = [m.as_variables() for m in conversation.messages]
    if conversation.continue_final_message:
        messages[-1]["content"] = (conversation.messages[-1].content or "") + _CONTINUED
    return {
        **dict(conversation.variables),
        **special_tokens,
        "messages": messages,
        "add_generation_prompt": conversation.add_generation_prompt,
        "tools": list(conversation.tools) or None,
        "documents": list(conversation.documents) or None,
    }


def compiled(source: str) -> jinja2.Template:
    """Raises TemplateRefusal for what is not valid jinja2."""
    try:
        return environment().from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise TemplateRefusal(f"line {error.lineno}: {error.message}") from error
    except Exception as error:  # constants are computed; what jinja2 does not check, such as a stray break, Python does
        raise TemplateRefusal(f"it cannot be compiled: {type(error).__name__}: {error}") from error


def rendered(template: jinja2.Template, variables: Mapping[str, JsonValue], max_chars: int | None = None) -> str:
    """Raises TemplateRefusal with the template's own words, or because it says more than `max_chars` characters."""
    parts: list[str] = []
    size = 0
    try:
        for part in template.generate(variables):
            parts.append(part)
            size += len(part)
            if max_chars is not None and size > max_chars:
                raise TemplateRefusal(f"it makes a text of more than {max_chars} characters, which is the limit")
        text = "".join(parts)
        text.encode()  # a template may spell half a character
    except TemplateRefusal:
        raise
    except (RecursionError, MemoryError) as error:
        raise TemplateRefusal(f"it needs too much: {type(error).__name__}") from error
    except Exception as error:  # a stranger's program may fail in any way
        raise TemplateRefusal(str(error) or type(error).__name__) from error
    return text


def continued(conversation: Conversation, text: str) -> str:
    """`text` up to the end of the final message, where that is what was asked for."""
    if not conversation.continue_final_message:
        return text
    tag = _CONTINUED.strip()
    end = text.rfind(tag)
    if end < 0:
        raise TemplateRefusal("it does not show the final message as it is, so that it cannot be continued")
    whole = text[end : end + len(_CONTINUED)] == _CONTINUED
    return text[:end] if whole else text[:end].rstrip()


def refused(conversation: Conversation, reason: str) -> InvalidRequest:
    """A refusal as the request's error."""
    count = counted(len(conversation.messages), "message")
    if conversation.template is not None:
        return InvalidRequest("chat_template", count, f"this chat template refuses it: {reason}")
    return InvalidRequest("messages", count, f"this model's chat template refuses it: {reason}")


def environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """jinja2 as Hugging Face sets it up for templates."""
    made = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _GenerationTag]
    )
    made.filters["tojson"] = _tojson
    made.globals["raise_exception"] = _raise_exception
    made.globals["strftime_now"] = _strftime_now
    return made


def _check(made: jinja2.Environment, source: str) -> None:
    """Syntax, and names of filters and tests: all that can be said without computing anything."""
    for node in made.parse(source).find_all((jinja2.nodes.Filter, jinja2.nodes.Test)):
        assert isinstance(node, jinja2.nodes.Filter | jinja2.nodes.Test)
        known = made.filters if isinstance(node, jinja2.nodes.Filter) else made.tests
        if node.name not in known:
            kind = type(node).__name__.lower()
            raise jinja2.TemplateSyntaxError(f"No {kind} named {node.name!r}.", node.lineno)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _tojson(
    value: JsonValue,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike jinja2's own, does not escape for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
