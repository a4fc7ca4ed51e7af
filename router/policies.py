"""Which worker of a pool gets the next request. A policy sees candidates as data and returns one of them.

    round_robin    each in turn
    least_loaded   fewest tokens still to compute (prefill) or fewest requests (decode), as announced or as known here,
                   whichever is more: announcements are late, and our own count does not see other routers

Does not know addresses, connections or why a worker is not among the candidates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from contracts.errors import ConfigError
from contracts.worker import WorkerInfo, WorkerKind, WorkerLoad


@dataclass(frozen=True, slots=True)
class Candidate:
    """A worker that may be chosen: what it announced, and what this router has given it and not got back."""

    info: WorkerInfo
    load: WorkerLoad
    num_inflight: int = 0  # requests
    num_inflight_tokens: int = 0  # prompt tokens whose first token has not come
    doubtful: bool = False  # its breaker is open: only where there is no other


@dataclass(frozen=True, slots=True)
class Query:
    """What a policy may know of the request."""

    prompt_token_ids: tuple[int, ...]


class Policy(Protocol):
    """One way to choose. Called on the event loop; must be quick and must not wait."""

    def choose(self, candidates: Sequence[Candidate], query: Query) -> Candidate:
        """One of `candidates`, which is never empty."""
        ...


class RoundRobin:
    """Each worker in turn, by worker id, so that those who come and go do not disturb the order of the others."""

    def __init__(self) -> None:
        self._last = ""

    def choose(self, candidates: Sequence[Candidate], query: Query) -> Candidate:  # noqa: ARG002
        """See Policy."""
        ordered = sorted(candidates, key=_worker_id)
        chosen = next((c for c in ordered if _worker_id(c) > self._last), ordered[0])
        self._last = _worker_id(chosen)
        return chosen


class LeastLoaded:
    """The worker with the least to do; among equals, each in turn."""

    def __init__(self) -> None:
        self._ties = RoundRobin()

    def choose(self, candidates: Sequence[Candidate], query: Query) -> Candidate:
        """See Policy."""
        least = min(map(_work, candidates))
        return self._ties.choose([c for c in candidates if _work(c) == least], query)


def _worker_id(candidate: Candidate) -> str:
    return candidate.info.ref.worker_id


def _work(candidate: Candidate) -> tuple[int, int]:
    tokens = max(candidate.load.num_queued_tokens, candidate.num_inflight_tokens)
    requests = max(candidate.load.num_running + candidate.load.num_waiting, candidate.num_inflight)
    return (tokens, requests) if candidate.info.kind is WorkerKind.PREFILL else (requests, tokens)


POLICIES: dict[str, Callable[[], Policy]] = {"least_loaded": LeastLoaded, "round_robin": RoundRobin}


def make_policy(name: str) -> Policy:
    """A new policy of this name. Raises ConfigError with the known names."""
    if name not in POLICIES:
        raise ConfigError(f"policy: got {name!r}, must be one of {', '.join(sorted(POLICIES))}")
    return POLICIES[name]()
