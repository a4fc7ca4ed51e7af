"""The body of an HTTP request: whole, in a form that is read here, within bounds of size and time, or refused with a status.

Does not know what is in it.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive

from contracts.errors import shown
from router.admission.deadlines import wanted_timeout_s
from router.http.incoming import Incoming
from router.http.visit import visit_of
from router.openai.json import error_body

_READ_ON = 4  # times the limit


@dataclass(frozen=True, slots=True)
class FrontLimits:
    """What one HTTP request may cost."""

    max_body_bytes: int
    request_timeout_s: float


class Refused(Exception):
    """A refusal with a status of HTTP's own."""

    def __init__(self, status: int, message: str, code: str) -> None:
        super().__init__(message)
        body = error_body(message, "invalid_request_error", None, code)
        # The body may not have been read to its end, so the connection cannot be used again.
        self.response = Response(body, status, {"Connection": "close"}, media_type="application/json")


async def read_body(request: Incoming, limits: FrontLimits) -> bytes:
    """The whole body. Raises Refused for a kind that is not read, over the limit, and when it takes too long to come, and
    ClientDisconnect.
    """
    content_type = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if content_type != "application/json":
        said = f"Content-Type: got {shown(content_type)}, must be application/json"
        raise Refused(415, said, "unsupported_media_type")
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise Refused(415, f"Content-Encoding: got {shown(encoding)}, must be identity", "unsupported_encoding")
    limit_s = min(limits.request_timeout_s, wanted_timeout_s(request.headers) or math.inf)
    if visit_of(request.scope).whole:  # as nearly every one: to set a timer and take it back costs more than to read
        return await _read(request.receive, limits.max_body_bytes)
    try:
        async with asyncio.timeout(limit_s):
            return await _read(request.receive, limits.max_body_bytes)
    except TimeoutError as error:
        waited = f"body: not complete after {limit_s:g} s, which is the limit"
        raise Refused(408, waited, "request_timeout") from error


async def _read(receive: Receive, limit: int) -> bytes:
    """A body that is too large is read on for a while and dropped: a client that still writes does not hear an answer."""
    parts: list[bytes] = []
    size, more = 0, True
    while more and size <= _READ_ON * limit:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        part, more = message.get("body", b""), message.get("more_body", False)
        size += len(part)
        if size <= limit:
            parts.append(part)
    if size > limit:
        raise Refused(413, f"body: got more than {limit} bytes, which is the limit", "body_too_large")
    return b"".join(parts)
