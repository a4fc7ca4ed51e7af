"""JSON as it goes out: values, errors, and server-sent events. Does not know what they say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

Json = str | int | float | bool | None | msgspec.Raw | Sequence["Json"] | Mapping[str, "Json"]
DONE = b"data: [DONE]\n\n"
_ENCODER = msgspec.json.Encoder()


def render(value: Json) -> bytes:
    """JSON in UTF-8."""
    return _ENCODER.encode(value)


def listed(rendered: Sequence[bytes]) -> msgspec.Raw:
    """A list of values that are rendered already: long ones are, one by one, for nobody else runs while one is."""
    return msgspec.Raw(b"[" + b",".join(rendered) + b"]")


def joined(lists: Sequence[bytes]) -> msgspec.Raw:
    """One list of the entries of several that are rendered already, none of them empty."""
    return msgspec.Raw(b"[" + b",".join(one[1:-1] for one in lists) + b"]")


def error_body(message: str, kind: str, param: str | None, code: str | int | None) -> bytes:
    """OpenAI's error object."""
    return render({"error": {"message": message, "type": kind, "param": param, "code": code}})


def event(body: bytes) -> bytes:
    """One server-sent event."""
    return b"data: " + body + b"\n\n"
