"""Who is in the engine, by id and by deadline. Does not know what they do here."""

from __future__ import annotations

import heapq

from contracts.errors import InvalidRequest
from engine.kv.lease import KVLease
from engine.request import Request, RequestStatus


class Roster:
    """Every request from its entry to its end. A deadline whose request left early costs nothing until it passes."""

    def __init__(self) -> None:
        self._requests: dict[str, Request] = {}
        self._deadlines: list[tuple[float, tuple[int, int], Request]] = []

    def __len__(self) -> int:
        return len(self._requests)

    def check_new(self, request_id: str) -> None:
        """Raise InvalidRequest if the id is in use: ids name one attempt for ever."""
        if request_id in self._requests:
            raise InvalidRequest("request_id", request_id, "must be new; a request with this id is being served")

    def find(self, request_id: str) -> Request | None:
        """The request of this id."""
        return self._requests.get(request_id)

    def enter(self, request: Request) -> None:
        """Take it in."""
        self._requests[request.request_id] = request
        if request.deadline_at_s is not None:
            heapq.heappush(self._deadlines, (request.deadline_at_s, request.order, request))

    def leave(self, request: Request) -> None:
        """Forget it."""
        del self._requests[request.request_id]

    def expired(self, now_s: float) -> list[Request]:
        """Requests whose deadline has passed; each is named once."""
        expired = []
        while (deadline_s := self.next_deadline_s()) is not None and deadline_s <= now_s:
            expired.append(heapq.heappop(self._deadlines)[2])
        return expired

    def next_deadline_s(self) -> float | None:
        """The nearest deadline, an instant of the engine's clock."""
        while self._deadlines and self._deadlines[0][2].status is RequestStatus.FINISHED:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def leases(self) -> frozenset[KVLease]:
        """The leases of those that run."""
        return frozenset(r.lease for r in self._requests.values() if r.status is RequestStatus.RUNNING)
