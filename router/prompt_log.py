"""What users ask and are answered, in the log, where the operator wants that (`--log-prompts`); nowhere else is it logged.

    Ask, pieces ──heard──▶ the same pieces; "asked" before the first, "answered" after the last, however it ends

Does not know how an answer is made.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from observability.log import get_logger
from router.exchange import Ask, Piece

log = get_logger(__name__)
Pieces = AsyncGenerator[Piece, None]
Listener = Callable[[Ask, Pieces], Pieces]


def unheard(ask: Ask, pieces: Pieces) -> Pieces:
    """Nobody listens."""
    del ask
    return pieces


async def heard(ask: Ask, pieces: Pieces) -> Pieces:
    """Each answer's text is one line, with how far it came."""
    log.info("asked", request_id=ask.request_id, caller=ask.caller.name, prompt=repr(ask.prompt))
    texts: dict[int, list[str]] = {}
    try:
        async with aclosing(pieces):
            async for piece in pieces:
                texts.setdefault(piece.index, []).append(piece.text)
                yield piece
    finally:
        for index, parts in texts.items():
            log.info("answered", request_id=ask.request_id, index=index, text="".join(parts))
