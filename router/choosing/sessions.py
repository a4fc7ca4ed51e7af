"""Which session a request belongs to, as its client says it: a hint for policies that keep a conversation in one place.

    HTTP   `X-Session-Id`, else OpenAI's `prompt_cache_key`, else `user`
    gRPC   metadata `x-session-id`

Any words do. Long ones are kept as their digest, so that a hint costs nothing. Does not know policies.
"""

from __future__ import annotations

import xxhash

HEADER = "x-session-id"
_KEPT_CHARS = 64


def session_of(*said: str | None) -> str:
    """The first of what was said that says anything; empty when nothing does."""
    session = next((words for words in said if words), "")
    return (
        session if len(session) <= _KEPT_CHARS else xxhash.xxh3_128_hexdigest(session.encode("utf-8", "surrogatepass"))
    )
