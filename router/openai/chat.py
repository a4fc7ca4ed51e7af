"""What a chat request asks for, and what may be asked of this model's chat template.

    ChatBody ──ChatRules.ask──▶ ChatAsk(ask, tools)        TokenizeBody ──ChatRules.prompt──▶ the prompt alone

A template does nothing with what it does not know, so that is refused by name: tools, earlier calls and documents where the
template never says the word. A developer's words are the system's where it does not know developers, as OpenAI has it for
older models. Does not know HTTP.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from pydantic import JsonValue

from contracts.errors import ConfigError, InvalidRequest, counted
from contracts.sampling import MAX_LOGPROBS
from router.config import ChatConfig
from router.exchange import Ask, ChatPrompt, TextPrompt
from router.openai.ask import Envelope, Length, base_ask, sampling_of
from router.openai.messages import parse_tools, tool_names
from router.openai.schema import ChatBody, TokenizeBody
from router.text.chat_template import RESERVED_VARIABLES, Conversation, Message, says
from router.text.chat_template import JsonValue as TemplateValue
from router.text.model_card import ModelCard
from router.toolcalls.dialects import DIALECTS, Dialect, dialect_of, explained
from router.toolcalls.hearing import CallParser

_AUTO, _NONE = "auto", "none"
_OF_CONVERSATIONS = (  # in what is to be tokenised
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
    "chat_template_kwargs",
    "tools",
)


@dataclass(frozen=True, slots=True)
class ToolUse:
    """How calls are heard in the answers: a parser for each; only the first call counts without `parallel`."""

    new_parser: Callable[[], CallParser]
    parallel: bool


@dataclass(frozen=True, slots=True)
class ChatAsk:
    """`tools` is None where nothing can be called."""

    ask: Ask
    tools: ToolUse | None


class ChatRules:
    """One per router."""

    def __init__(self, card: ModelCard, config: ChatConfig) -> None:
        """Raises ConfigError for a parser that there is not."""
        self._card = card
        self._trust_template = config.trust_request_chat_template
        known = (_AUTO, _NONE, *DIALECTS)
        if config.tool_call_parser not in known:
            raise ConfigError(f"tool_call_parser: got {config.tool_call_parser!r}, must be one of {', '.join(known)}")
        self._parser = config.tool_call_parser

    def ask(self, body: ChatBody, envelope: Envelope) -> ChatAsk:
        """Raises InvalidRequest."""
        if body.top_logprobs is not None and not body.logprobs:
            raise InvalidRequest("top_logprobs", body.top_logprobs, "needs logprobs: true")
        if body.top_logprobs is not None and not 0 <= body.top_logprobs <= MAX_LOGPROBS:
            raise InvalidRequest("top_logprobs", body.top_logprobs, f"must be from 0 to {MAX_LOGPROBS}")
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        max_tokens = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
        sampling = sampling_of(
            body, self._card, max_tokens=max_tokens, logprobs=logprobs, prompt_logprobs=body.prompt_logprobs
        )
        tools = _wanted(parse_tools(body.tools), body.tool_choice)
        conversation = self._conversation(body, tools, tuple(body.documents or ()))
        prompt = ChatPrompt(conversation, body.add_special_tokens is True)
        length, dialect = Length(max_tokens), self._dialect(conversation) if tools else None
        if dialect is None:
            return ChatAsk(base_ask(body, (prompt,), sampling, envelope, length), None)
        names, new_parser = tool_names(tools), dialect.new_parser
        use = ToolUse(lambda: new_parser(names), body.parallel_tool_calls is not False)
        return ChatAsk(base_ask(body, (prompt,), sampling, envelope, length, dialect.marks), use)

    def prompt(self, body: TokenizeBody) -> ChatPrompt | TextPrompt:
        """What is to be tokenised. Raises InvalidRequest."""
        if (body.prompt is None) == (body.messages is None):
            raise InvalidRequest("prompt", body.prompt, "exactly one of prompt and messages must be there")
        if body.prompt is not None:
            for name in _OF_CONVERSATIONS:
                value: JsonValue = body.__dict__[name]
                if not (value is None or value is False or value in ([], {})):  # to Python, 0 is False
                    raise InvalidRequest(name, value, "is for messages, not for a prompt")
            return TextPrompt(body.prompt, body.add_special_tokens is not False)
        conversation = self._conversation(body, parse_tools(body.tools), ())
        return ChatPrompt(conversation, body.add_special_tokens is True)

    def _conversation(
        self,
        body: ChatBody | TokenizeBody,
        tools: tuple[Mapping[str, TemplateValue], ...],
        documents: tuple[TemplateValue, ...],
    ) -> Conversation:
        if body.chat_template is not None and not self._trust_template:
            said = "a template from a request is not taken here (--trust-request-chat-template allows it)"
            raise InvalidRequest("chat_template", body.chat_template, said)
        if body.continue_final_message and body.add_generation_prompt:
            said = "the final message cannot be continued with add_generation_prompt: true"
            raise InvalidRequest("continue_final_message", True, said)
        variables = body.chat_template_kwargs or {}
        for name in sorted(RESERVED_VARIABLES & variables.keys()):
            raise InvalidRequest(f"chat_template_kwargs.{name}", variables[name], "has a field of its own")
        turns = body.messages or []
        conversation = Conversation(
            messages=tuple(turn.as_message(f"messages.{index}") for index, turn in enumerate(turns)),
            add_generation_prompt=body.add_generation_prompt is not False and not body.continue_final_message,
            variables=tuple(variables.items()),
            tools=tools,
            documents=documents,
            continue_final_message=body.continue_final_message is True,
            template=body.chat_template,
        )
        return self._fitted(conversation)

    def _fitted(self, conversation: Conversation) -> Conversation:
        """As the template can render it. Raises InvalidRequest for what it would leave out."""
        source, dialect = self._source(conversation), self._dialect(conversation)
        if conversation.documents and not says(source, "documents"):
            said = "this model's chat template has no place for them"
            raise InvalidRequest("documents", counted(len(conversation.documents), "document"), said)
        messages = conversation.messages
        if any(message.role == "developer" for message in messages) and not says(source, "developer"):
            messages = tuple(replace(m, role="system") if m.role == "developer" else m for m in messages)
        if dialect is not None and dialect.explains:
            return replace(conversation, messages=explained(messages, conversation.tools), tools=())
        if conversation.tools and (dialect is None or not says(source, "tools")):
            said = "this model's chat template does not teach it to call them, or not in a way that is known here"
            raise InvalidRequest("tools", counted(len(conversation.tools), "tool"), said)
        for index, message in enumerate(messages):
            _check_calls(f"messages.{index}.tool_calls", message, source)
        return replace(conversation, messages=messages)

    def _source(self, conversation: Conversation) -> str:
        if conversation.template is not None:
            return conversation.template
        return self._card.template_for(conversation).source

    def _dialect(self, conversation: Conversation) -> Dialect | None:
        if self._parser == _AUTO:
            return dialect_of(self._source(conversation))
        return DIALECTS.get(self._parser)


def _check_calls(where: str, message: Message, source: str) -> None:
    if message.tool_calls and not says(source, "tool_calls"):
        said = "this model's chat template has no place for them"
        raise InvalidRequest(where, counted(len(message.tool_calls), "call"), said)


def _wanted(
    tools: tuple[Mapping[str, TemplateValue], ...], choice: JsonValue
) -> tuple[Mapping[str, TemplateValue], ...]:
    """The tools that the model is shown: with none it is shown none. Raises InvalidRequest for a choice that forces a call."""
    if choice is not None and choice not in (_NONE, _AUTO):
        raise InvalidRequest("tool_choice", choice, "must be auto or none: a call cannot be forced yet")
    return () if choice == _NONE else tools
