"""The dashboard's page and its events.

    GET /dashboard ─▶ the page, /dashboard/FILE ─▶ what it is made of       open: they say nothing of this cluster
    GET /dashboard/events ─▶ a snapshot, then a frame a second              a key that may, where there are keys

The browser gives the key in a header, as every client does: it is in no address, and so in no log or history. Nothing is
loaded from elsewhere, and the page's own policy forbids it. Does not know what the events say.
"""

from __future__ import annotations

import asyncio

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from contracts.errors import PermissionDenied
from dashboard.feed import Watcher
from dashboard.files import INDEX, PAGE, PageFile, load_files
from router.board import Board
from router.http.incoming import Incoming
from router.http.visit import visit_of
from router.key_door import caller_of

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
_EVENTS_TYPE = "text/event-stream"
_EVENTS_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}


class DashboardFront:
    """Answers for everything at and under /dashboard."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._files: dict[str, PageFile] = {}

    async def page(self, request: Incoming, request_id: str) -> Response:
        """The page, or one of its files; 304 where the browser has it."""
        del request_id
        if not self._files:
            self._files = load_files()
        name = request.scope["path"].removeprefix(PAGE).strip("/") or INDEX
        file = self._files[name]
        headers = {**_HEADERS, "ETag": file.tag}
        if request.headers.get("if-none-match", "") == file.tag:
            return Response(status_code=304, headers=headers)
        return Response(file.content, headers=headers, media_type=file.media_type)

    async def events(self, request: Incoming, request_id: str) -> Response:
        """The stream. Raises PermissionDenied for a key that is not for this, Overloaded where too many watch."""
        del request_id
        if not caller_of(request.scope).dashboard:
            raise PermissionDenied("this API key does not open the dashboard")
        if request.scope["method"] == "HEAD":  # it has no body: whoever asks so would watch without seeing anything
            return Response(media_type=_EVENTS_TYPE, headers=_EVENTS_HEADERS)
        return EventsResponse(self._board, self._board.watch())


class EventsResponse(Response):
    """Sends a watcher its events until one of both leaves. Owns the watcher."""

    def __init__(self, board: Board, watcher: Watcher) -> None:
        super().__init__(media_type=_EVENTS_TYPE, headers=_EVENTS_HEADERS)
        del self.headers["content-length"]
        self._board = board
        self._watcher = watcher

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI. The browser's leaving ends the wait for the next event."""
        del receive
        visit = visit_of(scope)
        sending = asyncio.current_task()
        assert sending is not None
        try:
            if visit.gone:
                return
            visit.watch(sending.cancel)
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async for event in self._watcher:
                await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except asyncio.CancelledError:
            if not visit.gone or sending.uncancel():  # the server stops as well
                raise
        finally:
            visit.unwatch()
            self._board.leave(self._watcher)
