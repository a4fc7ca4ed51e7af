"""The door for OpenAI clients: routes, headers, bodies and their limits.

    POST /v1/chat/completions · /v1/completions · /tokenize · /detokenize
    GET /v1/models · /health · /ping · /version · /metrics · /dashboard

Everything that is refused here or deeper becomes {"error": {message, type, param, code}} with its status. Does not know
how answers are made, or the forms that they are sent in.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import time
from collections.abc import Awaitable, Callable, Mapping

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from contracts.errors import DiptychError, InternalError
from dashboard.files import EVENTS_PATH, PAGE_PATHS
from observability.exposition import Exposition
from observability.metrics import RouterMetrics
from router.admission.deadlines import wanted_timeout_s
from router.choosing.sessions import HEADER, session_of
from router.exchange import Ask, TextPrompt, valid_traceparent, valid_tracestate
from router.health import HealthReport
from router.http.answer import AnswerResponse, error_response
from router.http.body import FrontLimits, Refused, read_body
from router.http.dashboard import DashboardFront
from router.http.direct import Direct, Endpoint
from router.http.incoming import Incoming
from router.http.request_name import checked_name, given_name, named
from router.http.tokenize import TokenizeFront
from router.http.visit import visit_of
from router.key_door import caller_of
from router.openai.ask import Envelope, completion_ask
from router.openai.chat import ChatRules
from router.openai.format import ChatFormat, CompletionFormat, Echo, Format, Frame
from router.openai.json import Json, error_body, render
from router.openai.schema import ChatBody, CommonBody, CompletionBody, parse
from router.openai.toolformat import ToolChatFormat
from router.service import Inference
from router.text.background import Background

_SHOWN_PATH = 200  # characters


class HttpFront:
    """Owns the ASGI application `app`. `new_id` names requests whose clients did not."""

    def __init__(
        self,
        service: Inference,
        health: Callable[[], HealthReport],
        metrics: RouterMetrics,
        limits: FrontLimits,
        new_id: Callable[[], str],
        rules: ChatRules,
    ) -> None:
        self._service = service
        self._health_now = health
        self._limits = limits
        self._new_id = new_id
        self._rules = rules
        self._started_at = int(time.time())
        self._aside = Background(1)  # of its own: the tokenizer's is for what a first token waits for
        tokens = TokenizeFront(service, rules, limits)
        loaded = {
            "/v1/chat/completions": self._guarded(self._chat),
            "/v1/completions": self._guarded(self._completion),
        }
        self._rest = rest = Starlette(
            routes=[
                *(_route(path, endpoint, "POST") for path, endpoint in loaded.items()),  # for other methods
                _route("/v1/models", self._guarded(self._models)),
                _route("/v1/models/{name:path}", self._guarded(self._model)),
                _route("/tokenize", self._guarded(tokens.tokenize), "POST"),
                _route("/detokenize", self._guarded(tokens.detokenize), "POST"),
                _route("/health", self._guarded(self._health)),
                _route("/ping", self._guarded(self._health), "GET", "POST"),
                _route("/version", self._guarded(_version)),
                _route("/metrics", self._guarded(_showing(metrics))),
            ],
            exception_handlers={HTTPException: self._on_http_exception, Exception: self._on_fault},
        )
        self.app = Direct({("POST", path): endpoint for path, endpoint in loaded.items()}, rest, self._fault)

    def show(self, dashboard: DashboardFront) -> None:
        """Serve this one as well; once, before the door opens."""
        routes = [_route(path, self._guarded(dashboard.page)) for path in sorted(PAGE_PATHS)]
        self._rest.router.routes += [*routes, _route(EVENTS_PATH, self._guarded(dashboard.events))]

    async def _chat(self, request: Incoming, request_id: str) -> Response:
        body = parse(ChatBody, await read_body(request, self._limits))
        envelope = _envelope(request, body, request_id, self._service.began)
        asked = self._rules.ask(body, envelope)
        frame = self._frame(body, f"chatcmpl-{envelope.request_id}", logprobs=body.logprobs is True)
        form = ChatFormat(frame) if asked.tools is None else ToolChatFormat(frame, asked.tools)
        return self._answer(asked.ask, form, body, _chat_names(body))

    async def _completion(self, request: Incoming, request_id: str) -> Response:
        body = parse(CompletionBody, await read_body(request, self._limits))
        ask = completion_ask(body, self._service.card, _envelope(request, body, request_id, self._service.began))
        echo = _echo(ask) if body.echo else None
        frame = self._frame(body, f"cmpl-{ask.request_id}", body.logprobs is not None, echo, ask.n)
        return self._answer(ask, CompletionFormat(frame), body, _completion_names(body))

    def _answer(self, ask: Ask, form: Format, body: CommonBody, names: Mapping[str, str]) -> Response:
        pieces = self._service.answer(ask, self._limits.request_timeout_s)
        return AnswerResponse(pieces, form, body.stream is True, ask.request_id, names, self._aside)

    def _frame(
        self, body: CommonBody, response_id: str, logprobs: bool, echo: Echo | None = None, per_prompt: int = 1
    ) -> Frame:
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
            echo=echo,
            per_prompt=per_prompt,
            stop_token_ids=frozenset(body.stop_token_ids or ()),
            running_usage=body.wants_running_usage,
        )

    def _guarded(self, endpoint: Callable[[Incoming, str], Awaitable[Response]]) -> Endpoint:
        """An endpoint whose errors are said in OpenAI's way, and whose request has a name."""

        async def call(request: Incoming) -> Response:
            try:
                response = await endpoint(request, given_name(request.headers) or self._new_id())
            except Refused as refusal:
                response = refusal.response
            except DiptychError as error:
                response = error_response(error)
            except ClientDisconnect:
                return Response(status_code=499)  # nobody reads it
            return response if isinstance(response, AnswerResponse) else named(response, request.headers, self._new_id)

        return call

    async def _models(self, request: Incoming, request_id: str) -> Response:
        del request, request_id
        return _json({"object": "list", "data": [self._model_json()]})

    async def _model(self, request: Incoming, request_id: str) -> Response:
        del request_id
        self._service.check_model(request.scope["path_params"]["name"])
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

    async def _health(self, request: Incoming, request_id: str) -> Response:
        """200 only when a request can be served: the body says what there is, and what is missing."""
        del request, request_id
        report = self._health_now()
        return _json(report.as_json(), 200 if report.servable else 503)

    async def _on_http_exception(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        message = f"{request.method} {request.url.path[:_SHOWN_PATH]}: {error.detail}"
        body = error_body(message, "invalid_request_error", None, error.detail.lower().replace(" ", "_"))
        response = Response(body, error.status_code, error.headers, media_type="application/json")
        return named(response, request.headers, self._new_id)

    async def _on_fault(self, request: Request, error: Exception) -> Response:
        """Starlette's: it raises the error again, so that uvicorn logs it."""
        del error
        return self._fault(Incoming(request.scope, request.receive))

    def _fault(self, request: Incoming) -> Response:
        """What is said of a fault of ours outside of any answer."""
        said = error_response(InternalError("a fault of this server; see its log"))
        return named(said, request.headers, self._new_id)


async def _version(request: Incoming, request_id: str) -> Response:
    del request, request_id
    return _json({"version": importlib.metadata.version("diptych")})


def _showing(metrics: RouterMetrics) -> Callable[[Incoming, str], Awaitable[Response]]:
    exposition = Exposition(metrics.registry, time.monotonic, asyncio.sleep)

    async def show(request: Incoming, request_id: str) -> Response:
        del request, request_id
        return Response(await exposition.text(), media_type="text/plain; version=0.0.4")

    return show


def _completion_names(body: CompletionBody) -> Mapping[str, str]:
    """The same of a completion: with echo, log-probabilities are the prompt's too."""
    of_answers = body.echo and body.logprobs is not None and body.prompt_logprobs is None
    return {"prompt_logprobs": "logprobs"} if of_answers else {}


def _chat_names(body: ChatBody) -> Mapping[str, str]:
    """What a conversation calls the fields of an Ask."""
    names = {"prompt": "messages"}
    return names if body.max_completion_tokens is None else {**names, "max_tokens": "max_completion_tokens"}


def _route(path: str, endpoint: Endpoint, *methods: str) -> Route:
    async def call(request: Request) -> Response:
        return await endpoint(Incoming(request.scope, request.receive))

    return Route(path, call, methods=list(methods) or None)


def _envelope(request: Incoming, body: CommonBody, request_id: str, began: Callable[[float], float]) -> Envelope:
    """`request_id` is the header's name of it or, where there is none, one of ours, before which vLLM's field goes. It arrived with
    its first byte, whatever was read and understood since; `began` is that of the service.
    """
    headers = request.headers
    if body.request_id and not given_name(headers):
        request_id = checked_name("request_id", body.request_id)
    traceparent = valid_traceparent(headers.get("traceparent", ""))
    return Envelope(
        request_id=request_id,
        traceparent=traceparent,
        tracestate=valid_tracestate(headers.get("tracestate", ""), traceparent),
        caller=caller_of(request.scope),
        timeout_s=wanted_timeout_s(headers),
        session=session_of(headers.get(HEADER), body.prompt_cache_key, body.user),
        arrived=began(visit_of(request.scope).age_s),
    )


def _echo(ask: Ask) -> Echo:
    """Prompts as they were sent; those that came as tokens, or are cut, as what their tokens say."""
    cut = ask.truncate_prompt is not None
    texts = tuple(prompt.text if isinstance(prompt, TextPrompt) and not cut else None for prompt in ask.prompts)
    return Echo(texts, ask.skip_special_tokens)


def _json(value: Json, status: int = 200) -> Response:
    return Response(render(value), status, media_type="application/json")
