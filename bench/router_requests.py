"""What is asked of a router that is measured: the same prompt in several shapes, each time the same or each time another.

    Manner(shape, varied, api_key, ca), number ──▶ the bytes of request `number`, over HTTP and over gRPC

With `varied` each prompt begins differently, has a session and a name of its own, and over HTTP one of sixteen is refused and
one is left in the middle. Does not know sockets or what is measured.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

import msgspec

from contracts.pb.diptych.v1 import inference_pb2, types_pb2
from contracts.sampling import MAX_LOGPROBS

_EVERY, _REFUSED, _LEFT = 16, 5, 11
_LEFT_TOKENS = 50  # of which it hears the first


class Shape(StrEnum):
    """What the prompt is."""

    TEXT = "text"
    IDS = "token ids"
    CHAT = "chat"
    ECHO = "echo and log-probabilities"  # of each token of the prompt


@dataclass(frozen=True, slots=True)
class Manner:
    """How a router is asked. `ca` is the file of the authority whose certificate it shows, "" for no TLS."""

    shape: Shape = Shape.TEXT
    varied: bool = False
    api_key: str = ""
    ca: str = ""
    first: int = 0  # the number of a plan's first request

    def refused(self, number: int) -> bool:
        """Whether request `number` over HTTP asks for what there is not."""
        return self.varied and number % _EVERY == _REFUSED

    def left(self, number: int) -> bool:
        """Whether its client leaves when it hears the first of it."""
        return self.varied and number % _EVERY == _LEFT

    def context(self, protocol: str) -> ssl.SSLContext | None:
        """What connections are made with, for ALPN's name of what is talked on them."""
        if not self.ca:
            return None
        made = ssl.create_default_context(cafile=self.ca)
        made.set_alpn_protocols([protocol])
        return made


PLAIN = Manner()


@dataclass(frozen=True, slots=True)
class Asked:
    """What all requests of a plan have."""

    host: str
    text: str
    max_tokens: int
    manner: Manner


def http_requests(asked: Asked) -> Callable[[int], bytes]:
    """The whole request `number`, head and body. What does not change is rendered once."""
    if not asked.manner.varied:
        request = _http_request(asked, 0)
        return lambda _: request
    return lambda number: _http_request(asked, number)


def _http_request(asked: Asked, number: int) -> bytes:
    manner = asked.manner
    path, prompt = _prompt(_text(asked, number), manner.shape)
    body = {
        **prompt,
        "max_tokens": _LEFT_TOKENS if manner.left(number) else asked.max_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if manner.refused(number):
        body["top_p"] = 7.0
    raw = msgspec.json.encode(body)
    lines = [f"POST {path} HTTP/1.1", f"Host: {asked.host}", "Content-Type: application/json"]
    lines += [f"{name}: {value}" for name, value in metadata(asked, number)]
    return ("\r\n".join([*lines, f"Content-Length: {len(raw)}"]) + "\r\n\r\n").encode() + raw


def _prompt(text: str, shape: Shape) -> tuple[str, dict[str, object]]:
    """Where it goes, and the fields that say it."""
    if shape is Shape.CHAT:
        return "/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}
    prompt: object = _ids(text) if shape is Shape.IDS else text
    more: dict[str, object] = {"echo": True, "logprobs": MAX_LOGPROBS} if shape is Shape.ECHO else {}
    return "/v1/completions", {"prompt": prompt, **more}


def grpc_messages(asked: Asked) -> Callable[[int], bytes]:
    """The GenerateRequest `number`."""
    if not asked.manner.varied:
        message = _grpc_message(asked, 0)
        return lambda _: message
    return lambda number: _grpc_message(asked, number)


def _grpc_message(asked: Asked, number: int) -> bytes:
    text = _text(asked, number)
    sampling = types_pb2.SamplingParams(temperature=0.0, max_tokens=asked.max_tokens, ignore_eos=True)
    request = inference_pb2.GenerateRequest(sampling=sampling)
    match asked.manner.shape:
        case Shape.IDS:
            request.token_ids.ids.extend(_ids(text))
        case Shape.CHAT:
            request.chat.messages.add(role="user", content=text)
        case Shape.TEXT:
            request.text = text
        case Shape.ECHO:
            request.text = text
            sampling.prompt_logprobs = sampling.logprobs = MAX_LOGPROBS
            request.sampling.CopyFrom(sampling)
    return request.SerializeToString()


def metadata(asked: Asked, number: int) -> tuple[tuple[str, str], ...]:
    """Headers of request `number`, in lower case."""
    found: list[tuple[str, str]] = []
    if asked.manner.api_key:
        found.append(("authorization", f"Bearer {asked.manner.api_key}"))
    if asked.manner.varied:
        found += [("x-session-id", f"session-{number}"), ("x-request-id", f"request-{number}")]
    return tuple(found)


def _text(asked: Asked, number: int) -> str:
    return f"{number:x} {asked.text}" if asked.manner.varied else asked.text


def _ids(text: str) -> list[int]:
    """As many tokens as the text has words: the fake workers do not look at them."""
    return [300 + i % 1000 for i in range(len(text.split()))]
