"""What the operator may set about hand-offs, times in seconds, and the one variable that is set for UCX beneath NIXL."""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import StrEnum

from contracts.errors import ConfigError

# What it does, for `diptych doctor`.
ENVIRONMENT = {
    "UCX_KEEPALIVE_INTERVAL": "how often UCX beneath NIXL looks for dead peers; our workers set inf, see kv_transfer/config.py"
}


def find_dead_peers_ourselves() -> None:
    """UCX does not look for dead peers, unless the user said otherwise. It reads this when an agent is made.

    On one host its look marks the dead peer's endpoint as failed, and what is being sent there at that moment ends the process
    that NIXL has ("Fatal: unexpected error: Endpoint timeout"). Without it that happens, too, but the control connection hears of a
    death at once.
    """
    os.environ.setdefault("UCX_KEEPALIVE_INTERVAL", "inf")  # noqa: TID251


class Integrity(StrEnum):
    """Which of the blocks that travel are digested before and compared after; see `kv_transfer.digests`."""

    OFF = "off"
    SAMPLED = "sampled"
    FULL = "full"


@dataclass(frozen=True, slots=True)
class SenderConfig:
    """The prefill side's patience."""

    reserve_timeout_s: float = 10.0  # how long to ask for room before the hand-off fails with NoRoom
    reserve_backoff_s: float = 0.01  # first pause between two askings; doubles
    max_backoff_s: float = 0.25
    call_timeout_s: float = 5.0  # one message and its answer
    commit_timeout_s: float = 10.0  # how long a commit is repeated when no answer comes
    write_timeout_s: float = 10.0  # one write of at most max_write_bytes
    renew_every_s: float = 2.0
    max_handoff_s: float = 600.0  # what has not ended by then is given up; sooner where the request has a deadline
    max_write_bytes: int = 64 << 20  # bounds how long an abort waits for a copy
    integrity: Integrity = Integrity.OFF  # which blocks' digests the ticket carries

    def __post_init__(self) -> None:
        for name in ("reserve_timeout_s", "call_timeout_s", "commit_timeout_s", "write_timeout_s", "renew_every_s"):
            _positive(name, getattr(self, name))
        _positive("reserve_backoff_s", self.reserve_backoff_s)
        _positive("max_handoff_s", self.max_handoff_s)
        if not self.max_backoff_s >= self.reserve_backoff_s:
            raise ConfigError(f"max_backoff_s: got {self.max_backoff_s}, must be at least reserve_backoff_s")
        _positive("max_write_bytes", self.max_write_bytes)
        _known(self.integrity)


@dataclass(frozen=True, slots=True)
class ReceiverConfig:
    """The decode side's patience."""

    lease_s: float = 10.0  # room is kept so long without a renewal
    sweep_every_s: float = 0.25  # how often leases are looked at
    quiesce_poll_s: float = 0.01  # first pause before a closed window is asked again; doubles to sweep_every_s
    retry_after_s: float = 0.02  # said with NoRoom
    max_remembered: int = 65_536  # finished hand-offs whose late messages are answered as before
    integrity: Integrity = Integrity.OFF  # which blocks' digests are compared; a ticket without them is refused

    def __post_init__(self) -> None:
        for name in ("lease_s", "sweep_every_s", "quiesce_poll_s", "retry_after_s", "max_remembered"):
            _positive(name, getattr(self, name))
        _known(self.integrity)


def _positive(name: str, value: float) -> None:
    if not value > 0:
        raise ConfigError(f"{name}: got {value}, must be above 0")


def _known(integrity: Integrity) -> None:
    if integrity not in tuple(Integrity):
        raise ConfigError(f"integrity: got {integrity!r}, must be one of {', '.join(Integrity)}")
