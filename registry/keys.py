"""Every name in Redis that the registry of workers uses; one database of one Redis serves one deployment.

    diptych:workers            set    ids of workers that were announced or left lately; who is not there any more is dropped
    diptych:worker:<id>        hash   epoch, address, kind, state, ttl (ms), word (AnnounceRequest), left; expires with its lease
    diptych:epoch:<id>         int    the last life that was begun
    diptych:suspect:<id>       int    a life that some router cannot reach: its name may be taken over; expires
    diptych:layout             WorkerInfo of which model and layout are set: what all have in common; expires with the last
    diptych:router:<id>        a router that looks on; expires

Elsewhere: diptych:limit:{key}:<kind> is `router.admission.shared_limits`'s, channel diptych:breakers (JSON) and the sorted set
diptych:warnings (the same messages) are `breaker_news`'s.

    channel diptych:announced  AnnounceRequest         channel diptych:left  LeaveRequest        (see RedisLink.channel)

Values are protobuf messages of diptych/v1/registry.proto. Does not know Redis.
"""

from __future__ import annotations

PREFIX = "diptych:"
WORKERS = f"{PREFIX}workers"
WORKER = f"{PREFIX}worker:"
LAYOUT = f"{PREFIX}layout"
ANNOUNCED = f"{PREFIX}announced"
LEFT = f"{PREFIX}left"


def worker(worker_id: str) -> str:
    """Its lease."""
    return WORKER + worker_id


def epoch(worker_id: str) -> str:
    """Its last life."""
    return f"{PREFIX}epoch:{worker_id}"


def suspect(worker_id: str) -> str:
    """The life that cannot be reached."""
    return f"{PREFIX}suspect:{worker_id}"


def router(router_id: str) -> str:
    """A router's own lease."""
    return f"{PREFIX}router:{router_id}"
