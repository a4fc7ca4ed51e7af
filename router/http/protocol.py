"""uvicorn's HTTP/1.1 on one connection, with what a stranger may try settled before any request exists.

    a head that never ends      ──▶ 431, closed       (httptools takes any number of bytes)
    chunks of nearly nothing,   ──▶ 431, closed       (it keeps trailers, and reads extensions, of any size)
    extensions, trailers
    bytes that are not HTTP     ──▶ 400, closed       in the error form of everything else here
    Upgrade: h2c, websocket, …  ──▶ not heard         RFC 9110 lets a server ignore it; httptools would drop the body. Java's
                                                      HTTP client asks for h2c with its first request
    a request behind another    ──▶ waits, and what   uvicorn would read nothing meanwhile, not even that the client has
    that is being answered          follows is held   left; only from _MAX_HELD_BYTES on nothing is read here either

Does not know routes, bodies or their limits.
"""

from __future__ import annotations

import re
from http import HTTPStatus

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from router.openai.json import error_body

MAX_HEAD_BYTES = 64 * 1024
_MAX_HELD_BYTES = 64 * 1024
_CHUNK_BYTES = 16  # that may surround each byte of a body in chunks: a size, line ends, a short extension
_HEAD_END = b"\r\n\r\n"
_UPGRADE = re.compile(rb"(?<=\r\n)upgrade(?=:)", re.IGNORECASE)


class BoundedHttp(HttpToolsProtocol):
    """One connection: between requests ─▶ in a head, whose bytes are counted ─▶ in a body ─▶ between requests."""

    _head_bytes: int | None = None  # of the head that has begun, None outside of one
    _in_body = False
    _around_body = 0  # bytes of a body's chunks, extensions and trailers, less those that are allowed for it
    _held = b""  # that came while a request was waiting behind another

    def data_received(self, data: bytes) -> None:
        """asyncio's: some bytes. A head that comes in pieces may have its Upgrade line cut in two; then it is heard."""
        if self.pipeline:
            self._held += data
            if len(self._held) > _MAX_HELD_BYTES:
                self.flow.pause_reading()
            return
        if not self._in_body:
            head, end, rest = data.partition(_HEAD_END)
            data = _UPGRADE.sub(b"x-not-upgraded", head) + end + rest
        if self._in_body:
            self._around_body += len(data)
        super().data_received(data)
        if self._head_bytes is not None:
            self._head_bytes += len(data)
        if max(self._head_bytes or 0, self._around_body) > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, f"headers: at most {MAX_HEAD_BYTES} bytes")
        if self.pipeline:
            self.flow.resume_reading()

    def on_response_complete(self) -> None:
        """uvicorn's: the last byte of an answer is written, and the next request has its turn: what was held belongs to it."""
        super().on_response_complete()
        if self._held and not self.pipeline and not self.transport.is_closing():
            held, self._held = self._held, b""
            self.data_received(held)

    def on_message_begin(self) -> None:
        """The parser's: the first byte of a head."""
        self._head_bytes = 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """The parser's: what follows is the body."""
        self._head_bytes, self._in_body, self._around_body = None, True, 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """The parser's: some of the body."""
        self._around_body = max(0, self._around_body - _CHUNK_BYTES * len(body))
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The parser's: the request is whole."""
        self._in_body, self._around_body = False, 0
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """uvicorn's: the parser gave up."""
        self.refuse(HTTPStatus.BAD_REQUEST, msg)

    def refuse(self, status: HTTPStatus, message: str) -> None:
        """Say so and close: nothing that comes on this connection is heard any more."""
        kind = "server_error" if status.value >= HTTPStatus.INTERNAL_SERVER_ERROR else "invalid_request_error"
        body = error_body(message, kind, None, status.phrase.lower().replace(" ", "_"))
        head = (
            f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n"
        )
        head += "retry-after: 1\r\n\r\n" if kind == "server_error" else "\r\n"
        self.transport.write(head.encode() + body)
        self.transport.close()
