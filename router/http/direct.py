"""The two ways in that carry the load, without a framework around them; every other request goes through the framework.

    POST /v1/chat/completions, /v1/completions ──▶ endpoint ──▶ its response
    anything else                              ──▶ the application behind: routes, redirects, 404, 405

The framework's part of a request, two error handlers, a router and two wrappers around each message, was a tenth of the time to
its first token. What it does for a request that reaches its route is done here as well. Does not know what endpoints do.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from router.http.answer import AnswerResponse
from router.http.incoming import Incoming

Endpoint = Callable[[Incoming], Awaitable[Response]]


class Direct:
    """An ASGI application in front of another, `rest`."""

    def __init__(
        self, ways: Mapping[tuple[str, str], Endpoint], rest: ASGIApp, on_fault: Callable[[Incoming], Response]
    ) -> None:
        """`ways` are endpoints by method and path; `on_fault` is what a client is told of a fault that an endpoint has."""
        self._ways = ways
        self._rest = rest
        self._on_fault = on_fault

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI. A fault is answered and raised, so that the server logs it."""
        endpoint = self._ways.get((scope["method"], scope["path"])) if scope["type"] == "http" else None
        if endpoint is None:
            await self._rest(scope, receive, send)
            return
        request = Incoming(scope, receive)
        response: Response | None = None
        try:
            response = await endpoint(request)
            await response(scope, receive, send)
        except Exception:
            begun = response is not None and (response.begun if isinstance(response, AnswerResponse) else True)
            if not begun:
                await self._on_fault(request)(scope, receive, send)
            raise
