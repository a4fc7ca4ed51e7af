"""The answers to one request over HTTP: streamed or whole, given up the moment the client leaves.

    first piece ──▶ 200, events … [DONE]        an error before it ──▶ its status and body
                                                an error after it  ──▶ a last event, then [DONE]; never a silent close

The client's leaving is heard while the answer is being made, in both forms, and cancels it at once. Does not know how
answers are made.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from contracts.errors import (
    DiptychError,
    ErrorCode,
    InternalError,
    InvalidRequest,
    Overloaded,
    RateLimited,
    RetriesSpent,
)
from observability.log import get_logger
from router.exchange import Piece
from router.http.visit import visit_of
from router.openai.format import Format
from router.openai.json import DONE, error_body, event
from router.text.background import Background

log = get_logger(__name__)

_STATUS: Mapping[ErrorCode, tuple[int, str]] = {
    ErrorCode.INVALID_ARGUMENT: (400, "invalid_request_error"),
    ErrorCode.UNAUTHENTICATED: (401, "invalid_request_error"),
    ErrorCode.PERMISSION_DENIED: (403, "invalid_request_error"),
    ErrorCode.NOT_FOUND: (404, "invalid_request_error"),
    ErrorCode.DEADLINE_EXCEEDED: (408, "timeout_error"),
    ErrorCode.RESOURCE_EXHAUSTED: (429, "rate_limit_error"),
    ErrorCode.CANCELLED: (499, "cancelled_error"),
    ErrorCode.INTERNAL: (500, "server_error"),
    ErrorCode.FAILED_PRECONDITION: (500, "server_error"),
    ErrorCode.UNAVAILABLE: (503, "server_error"),
}
_CODES: Mapping[ErrorCode, str] = {
    ErrorCode.UNAUTHENTICATED: "invalid_api_key",
    ErrorCode.PERMISSION_DENIED: "permission_denied",
    ErrorCode.NOT_FOUND: "model_not_found",
    ErrorCode.DEADLINE_EXCEEDED: "request_timeout",
    ErrorCode.RESOURCE_EXHAUSTED: "overloaded",
    ErrorCode.UNAVAILABLE: "unavailable",
}


def error_parts(error: DiptychError) -> tuple[int, bytes, dict[str, str]]:
    """Status, body and headers that say `error` in OpenAI's way."""
    status, kind = _STATUS[error.code]
    param = error.field if isinstance(error, InvalidRequest) else None
    if error.code is ErrorCode.NOT_FOUND:
        param = "model"
    code = _CODES.get(error.code)
    if isinstance(error, InvalidRequest) and "context of" in error.limit:
        code = "context_length_exceeded"
    headers = {}
    if error.code is ErrorCode.UNAUTHENTICATED:
        headers["WWW-Authenticate"] = "Bearer"
    if error.code is ErrorCode.DEADLINE_EXCEEDED:  # OpenAI's clients would ask again, for as long again, and once more
        headers["x-should-retry"] = "false"
    if isinstance(error, RateLimited):
        code = "rate_limit_exceeded"
        headers |= error.quota
    if isinstance(error, Overloaded | RetriesSpent):
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
    return status, error_body(error.message, kind, param, code), headers


def error_response(error: DiptychError, request_id: str | None = None) -> Response:
    """The same as a response."""
    status, body, headers = error_parts(error)
    if request_id is not None:
        headers["X-Request-Id"] = request_id
    return Response(body, status, headers, media_type="application/json")


class AnswerResponse(Response):
    """Makes the answers to one request and sends them. Owns their making: it is closed before this returns, whatever happened."""

    def __init__(
        self,
        pieces: AsyncGenerator[Piece, None],
        form: Format,
        stream: bool,
        request_id: str,
        names: Mapping[str, str] | None,
        aside: Background,
    ) -> None:
        """`names` are what the client calls fields of an Ask that are called otherwise here; long words are found `aside`."""
        super().__init__()
        self._aside = aside
        self._names = names or {}
        self._pieces = pieces
        self._form = form
        self._stream = stream
        self._request_id = request_id
        self.begun = False  # whether the client has been sent any of it

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI: make the answer; the client's leaving cancels that, and is no cancellation to whoever called."""
        del receive
        visit = visit_of(scope)
        # The sockets get a turn: when many come and leave at once, nothing is begun for those that have left.
        await asyncio.sleep(0)
        if visit.gone:
            await self._pieces.aclose()
            return
        making = asyncio.current_task()
        assert making is not None
        visit.watch(making.cancel)
        try:
            await self._make(send)
        except asyncio.CancelledError:
            if not visit.gone or making.uncancel():  # the server stops as well
                raise
        finally:
            visit.unwatch()

    async def _make(self, send: Send) -> None:
        try:
            async with aclosing(self._pieces) as pieces:
                await (self._send_events(pieces, send) if self._stream else self._send_whole(pieces, send))
        except InvalidRequest as error:
            await self._send_error(error.at(self._names.get(error.field, error.field)), send)
        except DiptychError as error:
            await self._send_error(error, send)
        except Exception as error:  # noqa: BLE001 - a fault of ours costs this request, is logged, and is said aloud
            log.error("answer failed", error, request_id=self._request_id)
            await self._send_error(InternalError("a fault of this server; its log has the request id"), send)

    async def _send_whole(self, pieces: AsyncGenerator[Piece, None], send: Send) -> None:
        answers = joined([piece async for piece in pieces])
        body = await self._said(partial(self._form.whole, answers), answers)
        await self._send_body(200, body, _quota(answers[0]), send)

    async def _send_events(self, pieces: AsyncGenerator[Piece, None], send: Send) -> None:
        async for piece in pieces:
            first = bool(piece.prompt_token_ids)
            data = await self._said(partial(self._form.chunk, piece), (piece,)) if first else self._form.chunk(piece)
            if not self.begun:
                headers = {"Cache-Control": "no-cache", **_quota(piece)}
                await self._send_head(200, b"text/event-stream; charset=utf-8", headers, send)
            if piece.usage is not None:
                data += self._form.closing(piece.usage) + DONE
            await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _said(self, say: Callable[[], bytes], pieces: Sequence[Piece]) -> bytes:
        return await self._aside.run(say) if self._form.takes_long(pieces) else say()

    async def _send_error(self, error: DiptychError, send: Send) -> None:
        status, body, headers = error_parts(error)
        if self.begun:
            await send({"type": "http.response.body", "body": event(body) + DONE, "more_body": False})
        else:
            await self._send_body(status, body, headers, send)

    async def _send_body(self, status: int, body: bytes, headers: Mapping[str, str], send: Send) -> None:
        await self._send_head(status, b"application/json", {**headers, "Content-Length": str(len(body))}, send)
        await send({"type": "http.response.body", "body": body, "more_body": False})

    async def _send_head(self, status: int, content_type: bytes, headers: Mapping[str, str], send: Send) -> None:
        self.begun = True
        raw = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
        raw += [(b"content-type", content_type), (b"x-request-id", self._request_id.encode())]
        await send({"type": "http.response.start", "status": status, "headers": raw})


def _quota(piece: Piece) -> Mapping[str, str]:
    return {} if piece.quota is None else piece.quota.words()


def joined(pieces: Sequence[Piece]) -> list[Piece]:
    """All pieces of each answer as one, in the order of their index; each has the usage of all."""
    by_index: dict[int, list[Piece]] = {}
    for piece in pieces:
        by_index.setdefault(piece.index, []).append(piece)
    usage = pieces[-1].usage
    return [replace(_joined(by_index[index]), usage=usage) for index in sorted(by_index)]


def _joined(pieces: Sequence[Piece]) -> Piece:
    return Piece(
        index=pieces[0].index,
        text="".join(piece.text for piece in pieces),
        token_ids=tuple(i for piece in pieces for i in piece.token_ids),
        logprobs=tuple(entry for piece in pieces for entry in piece.logprobs),
        prompt_token_ids=pieces[0].prompt_token_ids,
        prompt_logprobs=next(
            (piece.prompt_logprobs for piece in pieces if piece.prompt_logprobs), ()
        ),  # they come at once
        ending=pieces[-1].ending,
        quota=pieces[0].quota,
    )
