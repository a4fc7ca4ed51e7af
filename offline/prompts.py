"""What a caller may hand over as prompts and conversations, made into lists of one kind.

    "text" · (1, 2, 3) · ["text", (1, 2, 3), …]                     {"role": …, "content": …} messages, one list or several

Each raises TypeError or ValueError that says which prompt it is. Does not know tokens' meaning.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from offline.params import SamplingParams
from router.text.chat_template import Conversation, Message

Prompt = str | Sequence[int]
ChatMessage = Mapping[str, str]

T = TypeVar("T")


def prompts_of(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several, as several."""
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise TypeError(f"prompts: got {type(prompts).__name__}, must be a text, token ids, or a list of these")
    if prompts and all(_is_id(one) for one in prompts):
        return [[one for one in prompts if isinstance(one, int)]]
    found: list[Prompt] = []
    for number, one in enumerate(prompts, 1):
        if isinstance(one, int) or not isinstance(one, Sequence):
            raise TypeError(f"prompt {number}: got {one!r}, must be a text or token ids")
        if not isinstance(one, str) and not all(_is_id(token_id) for token_id in one):
            wrong = next(token_id for token_id in one if not _is_id(token_id))
            raise TypeError(f"prompt {number}: got {wrong!r} for a token id, must be an integer")
        found.append(one)
    return found


def conversations_of(messages: Sequence[ChatMessage] | Sequence[Sequence[ChatMessage]]) -> list[Conversation]:
    """One conversation or several, as several."""
    if isinstance(messages, str) or not isinstance(messages, Sequence):
        raise TypeError(f"messages: got {type(messages).__name__}, must be a list of messages, or of conversations")
    if messages and all(isinstance(one, Mapping) for one in messages):
        return [_conversation([one for one in messages if isinstance(one, Mapping)], 1)]
    found = []
    for number, one in enumerate(messages, 1):
        if isinstance(one, str | Mapping) or not isinstance(one, Sequence):
            raise TypeError(f"conversation {number}: got {one!r}, must be a list of messages")
        found.append(_conversation(one, number))
    return found


def params_for(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    """One for each of `count` prompts."""
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams):
        return [params] * count
    if not isinstance(params, Sequence) or not all(isinstance(one, SamplingParams) for one in params):
        raise TypeError(f"sampling_params: got {params!r}, must be SamplingParams, or one for each prompt")
    if len(params) != count:
        raise ValueError(f"sampling_params: got {len(params)}, must be one, or one for each of {count} prompts")
    return list(params)


def _conversation(messages: Sequence[ChatMessage], number: int) -> Conversation:
    if not messages:
        raise ValueError(f"conversation {number}: got no messages, must have at least one")
    turns = []
    for message in messages:
        said = message if isinstance(message, Mapping) else {}
        role, content = said.get("role"), said.get("content")
        if set(said) != {"role", "content"} or not isinstance(role, str) or not isinstance(content, str):
            raise TypeError(
                f"conversation {number}: got {message!r}, a message must be a role and a content, both texts"
            )
        turns.append(Message(role, content))
    return Conversation(tuple(turns))


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
