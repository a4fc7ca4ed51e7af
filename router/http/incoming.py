"""An HTTP request as our endpoints take it: its headers, read once, and its ASGI scope and messages.

Does not know what the headers mean.
"""

from __future__ import annotations

from collections.abc import Mapping

from starlette.types import Receive, Scope


class Incoming:
    """`headers` has lower-case names; of one that comes several times the first counts."""

    __slots__ = ("headers", "receive", "scope")

    def __init__(self, scope: Scope, receive: Receive) -> None:
        self.scope = scope
        self.receive = receive
        self.headers: Mapping[str, str] = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in reversed(scope["headers"])
        }
