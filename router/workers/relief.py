"""Requests do not wait for a worker that does not move where another could take them.

    worker says STALLED ──▶ another takes work: every claim on it hears WorkerLost, and its request goes on elsewhere
                        └─▶ nobody else does: they stay, and go on when it moves

Does not know requests: a claim knows whom to tell.
"""

from __future__ import annotations

from contracts.errors import WorkerLost
from contracts.worker import WorkerKind, WorkerState
from observability.log import get_logger
from router.workers.pools import Pools
from router.workers.registry import Registry

log = get_logger(__name__)
_COULD_TAKE_IT = {
    WorkerKind.DECODE: (WorkerKind.DECODE,),
    WorkerKind.PREFILL: (WorkerKind.PREFILL, WorkerKind.DECODE),  # a decode worker computes prompts, too
}


def relieve(registry: Registry, pools: Pools) -> None:
    """Look at every worker once; to be called again and again. Each claim hears it once."""
    for worker in registry.workers():
        info = worker.info
        claims = tuple(pools.claims.get(info.ref, ()))
        if worker.load.state is not WorkerState.STALLED or not claims:
            continue
        if not any(pools.candidates(kind) for kind in _COULD_TAKE_IT[info.kind]):
            continue
        error = WorkerLost(f"{info.kind} worker {info.ref.worker_id} has work and makes no progress")
        told = sum(claim.stalled(error) for claim in claims)
        if told:
            log.warning("requests leave a stalled worker", worker_id=info.ref.worker_id, requests=told)
