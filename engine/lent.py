"""Leases that the engine has given out: reserved for KV that is to come, retained with KV that is to go on elsewhere.

    reserve ─▶ reserved ─ adopt ─▶ a running request's own          release ─▶ given back, once
    last step of a retaining request ─▶ retained ─────────────────▶ release ─▶ given back, once

Does not know who holds them or for how long: expiry is the holder's business.
"""

from __future__ import annotations

from contracts.errors import InvalidRequest
from engine.kv.lease import KVLease, LeaseError


class LentLeases:
    """The engine's list of what it lent; a lease that is not on it cannot be given back here."""

    def __init__(self) -> None:
        self._reserved: set[KVLease] = set()
        self._retained: set[KVLease] = set()

    def __len__(self) -> int:
        return len(self._reserved) + len(self._retained)

    @property
    def num_reserved(self) -> int:
        """Reservations, which will become running requests."""
        return len(self._reserved)

    def leases(self) -> list[KVLease]:
        """All of them."""
        return [*self._reserved, *self._retained]

    def check_new(self, holder: str) -> None:
        """Raise InvalidRequest if a lease is lent under this id: the two could not be told apart."""
        if any(lease.holder == holder for lease in self.leases()):
            raise InvalidRequest("request_id", holder, "must be new; a lease with this id is lent out")

    def reserve(self, lease: KVLease) -> None:
        """Lent for KV that will come."""
        self._reserved.add(lease)

    def retain(self, lease: KVLease) -> None:
        """Lent with the KV that is in it."""
        self._retained.add(lease)

    def check_reserved(self, lease: KVLease) -> None:
        """Raise LeaseError unless it is a reservation of this engine."""
        if lease not in self._reserved:
            raise LeaseError(f"the lease of {lease.holder} is not reserved here")

    def take_back(self, lease: KVLease) -> KVLease:
        """The lease, not lent any more. Raises LeaseError if it was not, or was taken back before."""
        for lent in (self._reserved, self._retained):
            if lease in lent:
                lent.remove(lease)
                return lease
        raise LeaseError(f"the lease of {lease.holder} is not lent out by this engine")
