"""Requests' prompts as policies and the cost model ask for them: their blocks' hashes, and who has how much of them.

    query(progress) ──▶ Query, one per request, hashed once and only if somebody asks
    sent(progress, ref, tokens) ──▶ the index expects the prompt's blocks there ──▶ tokens that are left to compute

Does not know how a worker is chosen.
"""

from __future__ import annotations

from contracts.block_hash import BlockHasher
from contracts.kv_layout import KVLayout
from contracts.worker import WorkerKind, WorkerRef
from observability.policy_metrics import PolicyMetrics
from router.choosing.prefix_index import PrefixIndex
from router.policies import Query
from router.serving.progress import Progress


class Prompts:
    """Owns nothing but the hasher, which is as the workers' layout says."""

    def __init__(self, index: PrefixIndex, metrics: PolicyMetrics) -> None:
        self._index = index
        self._metrics = metrics
        self._hasher: BlockHasher | None = None
        self._layout: KVLayout | None = None

    def query(self, progress: Progress) -> Query:
        """What a policy may know of this request."""
        if progress.query is None:
            job = progress.job
            progress.query = Query(job.prompt_token_ids, job.session, self._hasher_now())
        return progress.query

    def cached_tokens(self, ref: WorkerRef, progress: Progress) -> int:
        """How many leading tokens of its prompt this worker has, as far as the index knows. Hashes the prompt."""
        return self._index.cached_tokens(ref, self.query(progress).block_hashes)

    def sent(self, progress: Progress, ref: WorkerRef, kind: WorkerKind, num_tokens: int) -> int:
        """The request goes to this worker; how many of its `num_tokens` tokens are not known to be there already.

        From now on its prompt's blocks are expected there. All of them count where nobody has asked for the hashes.
        """
        query = self.query(progress)
        if not query.hashed:
            return num_tokens
        cached = self._index.cached_tokens(ref, query.block_hashes)
        self._index.expect(ref, query.block_hashes)
        self._metrics.sent(kind.value, len(query.prompt_token_ids), cached)
        return max(1, num_tokens - cached)

    def _hasher_now(self) -> BlockHasher | None:
        layout = self._index.layout
        if layout is not self._layout and layout is not None:
            self._hasher = BlockHasher(layout.block_size, layout.hash_seed)
        self._layout = layout
        return self._hasher
