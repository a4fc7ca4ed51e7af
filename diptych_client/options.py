"""A prompt and options into one GenerateRequest.

Options are the fields of GenerateRequest and of SamplingParams, by the names and with the meaning that the proto gives them; an
option that is left out is left out of the message, and the server's default holds. Values are not checked here: the server
names the field, the value and the limit, and two truths would drift.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import TypedDict, Unpack, cast

from contracts.pb.diptych.v1 import inference_pb2 as pb
from contracts.pb.diptych.v1 import types_pb2

Conversation = Sequence[pb.ChatMessage] | pb.Chat
"""For the model's chat template; pb.Chat where it needs more than its messages: tools, a turn to be continued, variables."""
Prompt = str | Sequence[int] | Sequence[pb.ChatMessage] | pb.Chat
"""Text as it is, token ids, or a Conversation."""


class Options(TypedDict, total=False):
    """How to answer; see the fields of the same name in proto/diptych/v1/inference.proto and types.proto."""

    model: str
    stop: Sequence[str]
    request_id: str
    priority: int
    route: pb.Route.ValueType
    skip_special_tokens: bool
    n: int
    include_stop: bool
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    seed: int
    max_tokens: int
    min_tokens: int
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    logprobs: int
    prompt_logprobs: int


SAMPLING_FIELDS = frozenset(types_pb2.SamplingParams.DESCRIPTOR.fields_by_name)


def build_request(prompt: Prompt, **options: Unpack[Options]) -> pb.GenerateRequest:
    """The message. Raises TypeError for a prompt or an option that the message cannot hold, ValueError for one out of range."""
    given = dict(options)
    for name in given.keys() - Options.__annotations__.keys():
        near = difflib.get_close_matches(name, Options.__annotations__, 1)
        meant = f", did you mean {near[0]}?" if near else ""
        raise TypeError(f"{name} is no option{meant}")
    sampling = {name: given.pop(name) for name in tuple(given) if name in SAMPLING_FIELDS}
    request = pb.GenerateRequest(**given, sampling=types_pb2.SamplingParams(**sampling))  # type: ignore[arg-type]
    if isinstance(prompt, str):
        request.text = prompt
    elif isinstance(prompt, pb.Chat):
        request.chat.CopyFrom(prompt)
    elif prompt and isinstance(prompt[0], pb.ChatMessage):
        request.chat.messages.extend(cast("Sequence[pb.ChatMessage]", prompt))
    else:
        request.token_ids.SetInParent()
        request.token_ids.ids.extend(cast("Sequence[int]", prompt))
    return request


def build_tokenize_request(
    prompt: str | Conversation, model: str, add_special_tokens: bool | None
) -> pb.TokenizeRequest:
    """The message; `add_special_tokens` None leaves the default to the server."""
    request = pb.TokenizeRequest(model=model)
    if add_special_tokens is not None:
        request.add_special_tokens = add_special_tokens
    if isinstance(prompt, str):
        request.text = prompt
    elif isinstance(prompt, pb.Chat):
        request.chat.CopyFrom(prompt)
    else:
        request.chat.messages.extend(prompt)
    return request


def system(content: str) -> pb.ChatMessage:
    """What the model is told beforehand."""
    return pb.ChatMessage(role="system", content=content)


def user(content: str) -> pb.ChatMessage:
    """What a person says."""
    return pb.ChatMessage(role="user", content=content)


def assistant(content: str) -> pb.ChatMessage:
    """What the model said."""
    return pb.ChatMessage(role="assistant", content=content)
