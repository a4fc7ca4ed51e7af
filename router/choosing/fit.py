"""Which workers are large enough for a request: their context, and the KV memory that all of it needs.

Workers may be set to different sizes. A request is offered to those that can hold all of it, prompt and answer; what no decode
worker can ever hold is refused at the door. One worker that says it is tiny makes nobody else smaller. Does not know who is
busy.
"""

from __future__ import annotations

from collections.abc import Sequence

from contracts.worker import WorkerInfo, WorkerKind
from router.choosing.route import Route
from router.serving.progress import Progress


def fits(info: WorkerInfo, progress: Progress) -> bool:
    """Whether this worker can take the request as it is now. A prefill worker holds the KV of what is known so far only."""
    num_prompt, max_tokens = len(progress.job.prompt_token_ids), progress.job.sampling.max_tokens
    if num_prompt + max_tokens > info.max_model_len:  # every worker checks the whole, whatever its part of it
        return False
    in_prefill = num_prompt + len(progress.token_ids)
    # The last token's KV is never computed.
    return (in_prefill if info.kind is WorkerKind.PREFILL else num_prompt + max_tokens - 1) <= kv_tokens(info)


def kv_tokens(info: WorkerInfo) -> int:
    """Tokens whose KV a worker can hold."""
    return info.num_blocks * info.layout.block_size


def max_model_len(model: int, workers: Sequence[WorkerInfo], route: Route | None = None) -> int:
    """Tokens of the longest prompt and answer that some worker, or pair of workers, takes; the model's where none is known.

    A decode worker can always run a request alone, unless the `route` says that two must.
    """
    kinds = tuple(WorkerKind) if route is Route.DISAGGREGATED else (WorkerKind.DECODE,)
    longest = [max((w.max_model_len for w in workers if w.kind is kind), default=model) for kind in kinds]
    return min(model, *longest)


def most_tokens(context: int, workers: Sequence[WorkerInfo]) -> int:
    """Tokens of the longest prompt and answer that some decode worker takes and has the memory for."""
    decode = [w for w in workers if w.kind is WorkerKind.DECODE]
    return max((min(context, w.max_model_len, kv_tokens(w)) for w in decode), default=context)


def kv_capacity(num_tokens: int, workers: Sequence[WorkerInfo]) -> int | None:
    """Tokens whose KV the largest decode worker holds whose context takes `num_tokens`; None where there is none."""
    decode = [w for w in workers if w.kind is WorkerKind.DECODE and w.max_model_len >= num_tokens]
    return max(map(kv_tokens, decode), default=None)
