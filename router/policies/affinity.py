"""The policy that keeps a session's requests on one worker, without asking any index.

Whose session it is: what the client says (`X-Session-Id`, gRPC metadata `x-session-id`, OpenAI's `prompt_cache_key` or
`user`), else the prompt's first SESSION_BLOCKS blocks, which a conversation keeps while it grows. Workers are ordered by
rendezvous hashing (Thaler and Ravishankar, 1998), so a worker that joins or leaves moves only the sessions that it gets or
had. The first in order that is not overloaded is chosen: at most MOST_OVER times the mean burden, and a little, as in
consistent hashing with bounded loads (Mirrokni et al., 2018). A session that has to give way goes to the second in its
order, always the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import xxhash

from router.policies.burden import burden
from router.policies.interface import Candidate, PolicyContext, Query
from router.policies.load import worker_id

SESSION_BLOCKS = 8
MOST_OVER = 1.25
_SLACK_TOKENS = 512  # so that idle workers are not called overloaded for one request


class SessionAffinity:
    """Has no state: any router with the same workers chooses the same order."""

    def __init__(self, context: PolicyContext | None = None) -> None:
        del context

    def choose(self, candidates: Sequence[Candidate], query: Query) -> Candidate:
        """See Policy."""
        key = _session_key(query)
        ordered = sorted(candidates, key=lambda c: xxhash.xxh3_64_intdigest(key + worker_id(c).encode()), reverse=True)
        burdens = [burden(c) for c in ordered]
        most = MOST_OVER * sum(burdens) / len(burdens) + _SLACK_TOKENS + len(query.prompt_token_ids)
        return next(c for c, tokens in zip(ordered, burdens, strict=True) if tokens <= most)


def _session_key(query: Query) -> bytes:
    if query.session:
        return b"s" + query.session.encode("utf-8", "surrogatepass")
    hashes = query.block_hashes[:SESSION_BLOCKS]
    return b"p" + (hashes[-1] if hashes else repr(query.prompt_token_ids[:64]).encode())
