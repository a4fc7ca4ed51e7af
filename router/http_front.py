"""The door for OpenAI clients: routes, headers, bodies and their limits.

    POST /v1/chat/completions · /v1/completions      GET /v1/models · /health · /version · /metrics

Everything that is refused here or deeper becomes {"error": {message, type, param, code}} with its status. Does not know
how answers are made, or the forms that they are sent in.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from contracts.errors import DiptychError, InternalError, InvalidRequest, shown
from observability.metrics import RouterMetrics
from router.deadlines import wanted_timeout_s
from router.exchange import Ask, TextPrompt, valid_traceparent
from router.health import HealthReport
from router.http_answer import AnswerResponse, error_response
from router.key_door import caller_of
from router.openai_format import ChatFormat, CompletionFormat, Echo, Format, Frame, Json, error_body, render
from router.openai_schema import ChatBody, CommonBody, CompletionBody, chat_ask, completion_ask, parse
from router.service import MAX_REQUEST_ID_CHARS, Inference
from router.sessions import HEADER, session_of

_READ_ON = 4  # times the limit
_SHOWN_PATH = 200  # characters


@dataclass(frozen=True, slots=True)
class FrontLimits:
    """What one HTTP request may cost."""

    max_body_bytes: int
    request_timeout_s: float


class HttpFront:
    """Owns the ASGI application `app`. `new_id` names requests whose clients did not."""

    def __init__(
        self,
        service: Inference,
        health: Callable[[], HealthReport],
        metrics: RouterMetrics,
        limits: FrontLimits,
        new_id: Callable[[], str],
    ) -> None:
        self._service = service
        self._health_now = health
        self._metrics = metrics
        self._limits = limits
        self._new_id = new_id
        self._started_at = int(time.time())
        self.app = Starlette(
            routes=[
                Route("/v1/chat/completions", self._guarded(self._chat), methods=["POST"]),
                Route("/v1/completions", self._guarded(self._completion), methods=["POST"]),
                Route("/v1/models", self._models),
                Route("/v1/models/{name:path}", self._guarded(self._model)),
                Route("/health", self._health),
                Route("/version", self._version),
                Route("/metrics", self._show_metrics),
            ],
            exception_handlers={HTTPException: _on_http_exception, Exception: _on_fault},
        )

    async def _chat(self, request: Request, request_id: str) -> Response:
        body = parse(ChatBody, await self._body(request))
        request_id = _given_id(request) or _checked_id("request_id", body.request_id or "") or request_id
        ask = replace(
            chat_ask(body, self._service.card, request_id, _traceparent(request)),
            caller=caller_of(request),
            timeout_s=wanted_timeout_s(request),
            session=session_of(request.headers.get(HEADER), body.prompt_cache_key, body.user),
        )
        frame = self._frame(body, f"chatcmpl-{request_id}", logprobs=body.logprobs is True)
        return self._answer(ask, ChatFormat(frame), body)

    async def _completion(self, request: Request, request_id: str) -> Response:
        body = parse(CompletionBody, await self._body(request))
        request_id = _given_id(request) or _checked_id("request_id", body.request_id or "") or request_id
        ask = replace(
            completion_ask(body, self._service.card, request_id, _traceparent(request)),
            caller=caller_of(request),
            timeout_s=wanted_timeout_s(request),
            session=session_of(request.headers.get(HEADER), body.prompt_cache_key, body.user),
        )
        text = ask.prompt.text if isinstance(ask.prompt, TextPrompt) else None
        echo = Echo(text, ask.skip_special_tokens) if body.echo else None
        frame = replace(self._frame(body, f"cmpl-{request_id}", logprobs=body.logprobs is not None), echo=echo)
        return self._answer(ask, CompletionFormat(frame), body)

    def _answer(self, ask: Ask, form: Format, body: CommonBody) -> Response:
        pieces = self._service.answer(ask, self._limits.request_timeout_s)
        return AnswerResponse(pieces, form, body.stream is True, ask.request_id)

    def _frame(self, body: CommonBody, response_id: str, *, logprobs: bool) -> Frame:
        card = self._service.card
        return Frame(
            response_id=response_id,
            created=int(time.time()),
            model=card.name,
            fingerprint=card.fingerprint,
            tokenizer=card.tokenizer,
            usage_chunk=body.wants_usage_chunk,
            stages=body.wants_stages,
            token_ids=body.return_token_ids is True,
            logprobs=logprobs,
            prompt_logprobs=body.prompt_logprobs is not None,
        )

    def _guarded(
        self, endpoint: Callable[[Request, str], Awaitable[Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        """An endpoint whose errors are said in OpenAI's way, and whose request has a name."""

        async def call(request: Request) -> Response:
            request_id: str | None = None
            try:
                request_id = _given_id(request) or self._new_id()
                return await endpoint(request, request_id)
            except _Refused as refusal:
                return refusal.response
            except DiptychError as error:
                return error_response(error, request_id)
            except ClientDisconnect:
                return Response(status_code=499)  # nobody reads it

        return call

    async def _body(self, request: Request) -> bytes:
        """The whole body. Raises _Refused for a kind that is not read, over the limit, and when it takes too long to come."""
        content_type = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
        if content_type != "application/json":
            raise _Refused(
                415, f"Content-Type: got {shown(content_type)}, must be application/json", "unsupported_media_type"
            )
        encoding = request.headers.get("content-encoding", "identity").strip().lower()
        if encoding not in ("", "identity"):
            raise _Refused(415, f"Content-Encoding: got {shown(encoding)}, must be identity", "unsupported_encoding")
        limit_s = min(self._limits.request_timeout_s, wanted_timeout_s(request) or math.inf)
        try:
            async with asyncio.timeout(limit_s):
                return await self._read(request)
        except TimeoutError as error:
            waited = f"body: not complete after {limit_s:g} s, which is the limit"
            raise _Refused(408, waited, "request_timeout") from error

    async def _read(self, request: Request) -> bytes:
        """A body that is too large is read on for a while and dropped: a client that still writes does not hear an answer."""
        limit = self._limits.max_body_bytes
        parts: list[bytes] = []
        size = 0
        async for part in request.stream():
            size += len(part)
            if size > _READ_ON * limit:
                break
            if size <= limit:
                parts.append(part)
        if size > limit:
            raise _Refused(413, f"body: got more than {limit} bytes, which is the limit", "body_too_large")
        return b"".join(parts)

    async def _models(self, request: Request) -> Response:
        del request
        return _json({"object": "list", "data": [self._model_json()]})

    async def _model(self, request: Request, request_id: str) -> Response:
        del request_id
        self._service.check_model(request.path_params["name"])
        return _json(self._model_json())

    def _model_json(self) -> dict[str, Json]:
        return {
            "id": self._service.card.name,
            "object": "model",
            "created": self._started_at,
            "owned_by": "diptych",
            "root": self._service.card.name,
            "parent": None,
            "max_model_len": self._service.max_model_len(),
        }

    async def _health(self, request: Request) -> Response:
        """200 only when a request can be served: the body says what there is, and what is missing."""
        del request
        report = self._health_now()
        return _json(report.as_json(), 200 if report.servable else 503)

    async def _version(self, request: Request) -> Response:
        del request
        return _json({"version": importlib.metadata.version("diptych")})

    async def _show_metrics(self, request: Request) -> Response:
        del request
        return Response(self._metrics.render(), media_type="text/plain; version=0.0.4")


class _Refused(Exception):
    """A refusal with a status of HTTP's own."""

    def __init__(self, status: int, message: str, code: str) -> None:
        super().__init__(message)
        body = error_body(message, "invalid_request_error", None, code)
        # The body may not have been read to its end, so the connection cannot be used again.
        self.response = Response(body, status, {"Connection": "close"}, media_type="application/json")


def _given_id(request: Request) -> str:
    return _checked_id("X-Request-Id", request.headers.get("x-request-id", ""))


def _checked_id(field: str, given: str) -> str:
    """A request id goes out again in a header, so it must be fit for one."""
    if len(given) > MAX_REQUEST_ID_CHARS or not (given.isascii() and given.isprintable()):
        raise InvalidRequest(field, given, f"must be printable ASCII of at most {MAX_REQUEST_ID_CHARS} characters")
    return given


def _traceparent(request: Request) -> str:
    return valid_traceparent(request.headers.get("traceparent", ""))


def _json(value: Json, status: int = 200) -> Response:
    return Response(render(value), status, media_type="application/json")


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path[:_SHOWN_PATH]}: {error.detail}"
    body = error_body(message, "invalid_request_error", None, error.detail.lower().replace(" ", "_"))
    return Response(body, error.status_code, error.headers, media_type="application/json")


async def _on_fault(request: Request, error: Exception) -> Response:
    """A fault of ours outside of any answer; starlette raises it again, so that uvicorn logs it."""
    del request, error
    return error_response(InternalError("a fault of this server; see its log"))
