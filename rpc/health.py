"""grpc.health.v1 for all services of one server: either each of them serves or none does.

The library's own servicer holds a lock while it writes to one who watches: a caller that did not read kept the process from
saying anything more, and so from stopping. Here nobody waits for a watcher, and of them there is a limit: no key is asked.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from contracts.errors import Overloaded

_Check = grpc.aio.ServicerContext[health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse]
MAX_WATCHES = 1000


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc] # the package has no types
    """Answers for `names`; NOT_SERVING until told otherwise."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = frozenset(names)
        self._serving = False
        self._stopping = False
        self._changed = asyncio.Event()  # one for each change
        self._num_watches = 0

    @property
    def serving(self) -> bool:
        """What is answered."""
        return self._serving

    def say(self, serving: bool) -> None:
        """What is answered from now on; nothing changes any more after `stop`."""
        if self._stopping or serving is self._serving:
            return
        self._serving = serving
        self._changed.set()
        self._changed = asyncio.Event()

    def stop(self) -> None:
        """NOT_SERVING to the end."""
        self.say(False)
        self._stopping = True

    async def Check(self, request: health_pb2.HealthCheckRequest, context: _Check) -> health_pb2.HealthCheckResponse:
        """See the service's definition."""
        if request.service not in self._names:
            await context.abort(grpc.StatusCode.NOT_FOUND)
        return self._answer(request.service)

    async def Watch(
        self, request: health_pb2.HealthCheckRequest, context: _Check
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        """See the service's definition. Raises Overloaded when too many watch."""
        del context
        if self._num_watches >= MAX_WATCHES:
            raise Overloaded(f"health: got a watch beside {MAX_WATCHES}, which is the limit")
        self._num_watches += 1
        try:
            while True:
                changed = self._changed
                yield self._answer(request.service)
                await changed.wait()
        finally:
            self._num_watches -= 1

    def _answer(self, service: str) -> health_pb2.HealthCheckResponse:
        states = health_pb2.HealthCheckResponse
        if service not in self._names:
            return states(status=states.SERVICE_UNKNOWN)
        return states(status=states.SERVING if self._serving else states.NOT_SERVING)
