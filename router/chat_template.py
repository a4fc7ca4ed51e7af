"""A model's own chat template: a conversation in, the text that the model was trained to see out.

Rendered in jinja2's immutable sandbox with what Hugging Face gives templates (raise_exception, strftime_now, tojson,
loop controls, the generation tag), so that a template from a hub can spoil nothing but its own text. Does not know tokens.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from contracts.errors import InvalidRequest, ModelLoadError

JsonValue = str | int | float | bool | None | Sequence["JsonValue"] | Mapping[str, "JsonValue"]


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation."""

    role: str
    content: str
    name: str | None = None

    def as_variables(self) -> dict[str, str]:
        """As templates expect a message; a name only when there is one."""
        base = {"role": self.role, "content": self.content}
        return base if self.name is None else {**base, "name": self.name}


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a chat request asks to have rendered. `variables` are the request's chat_template_kwargs."""

    messages: tuple[Message, ...]
    add_generation_prompt: bool = True
    variables: tuple[tuple[str, JsonValue], ...] = ()


class _TemplateRefusal(Exception):
    """What `raise_exception` in a template raises."""


class _GenerationTag(jinja2.ext.Extension):
    """Accepts {% generation %} … {% endgeneration %}, which marks the assistant's words for training."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own declaration

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """One compiled template and the names of the model's special tokens. Safe to use from any thread."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Raises ModelLoadError when the template is not valid jinja2."""
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _GenerationTag]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self._special_tokens = dict(special_tokens)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ModelLoadError(f"chat template, line {error.lineno}: {error.message}") from error

    def render(self, conversation: Conversation) -> str:
        """The prompt's text. Raises InvalidRequest with the template's own words when it refuses the conversation."""
        variables: dict[str, object] = {
            **dict(conversation.variables),
            **self._special_tokens,
            "messages": [m.as_variables() for m in conversation.messages],
            "add_generation_prompt": conversation.add_generation_prompt,
            "tools": None,
            "documents": None,
        }
        try:
            return self._template.render(variables)
        except (_TemplateRefusal, jinja2.TemplateError, TypeError, ValueError, ArithmeticError) as error:
            said = f"this model's chat template refuses it: {error}"
            raise InvalidRequest("messages", f"{len(conversation.messages)} messages", said) from error


def _raise_exception(message: str) -> NoReturn:
    raise _TemplateRefusal(message)


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
