"""What a policy is given and what it owes: the one interface, also of plug-ins (docs/policies.md).

    PolicyContext ──factory──▶ Policy.choose(candidates, query) ──▶ one of the candidates

Does not know any policy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from contracts.block_hash import BlockHasher
from contracts.worker import WorkerInfo, WorkerKind, WorkerLoad, WorkerRef


@dataclass(frozen=True, slots=True)
class Candidate:
    """A worker that may be chosen: what it announced, and what this router has given it and not got back.

    `others` is the share of the announced load that is not this router's: what it had not given when that was announced.
    `ended` is the share that was this router's and has ended since.
    """

    info: WorkerInfo
    load: WorkerLoad
    num_inflight: int = 0  # requests
    num_inflight_tokens: int = 0  # prompt tokens whose first token has not come
    doubtful: bool = False  # its breaker is open: only where there is no other
    num_inflight_kv_tokens: int = 0  # tokens of the requests' contexts, computed or not
    others: float = 1.0
    ended: float = 0.0


@dataclass(frozen=True, slots=True)
class Query:
    """What a policy may know of the request. `session` is empty where the client named none."""

    prompt_token_ids: tuple[int, ...]
    session: str = ""
    hasher: BlockHasher | None = None
    _hashes: list[bytes] = field(default_factory=list, compare=False)

    @property
    def block_hashes(self) -> Sequence[bytes]:
        """The chained hashes of the prompt's full blocks, as the workers name them. Made when first asked for: 0.9 ms for 32k
        tokens. Empty while no worker is known that says how.
        """
        if self.hasher is not None:
            self.hasher.extend(self._hashes, self.prompt_token_ids)
        return self._hashes

    @property
    def hashed(self) -> bool:
        """Whether somebody has asked for the block hashes, so that they cost nothing any more."""
        return bool(self._hashes)


class Prefixes(Protocol):
    """Who has which blocks, as `router.choosing.prefix_index.PrefixIndex` tells it."""

    def cached_tokens(self, ref: WorkerRef, block_hashes: Sequence[bytes]) -> int:
        """How many leading tokens of the prompt this worker has; 0 for one that is not known."""
        ...

    def match(self, block_hashes: Sequence[bytes]) -> Mapping[WorkerRef, int]:
        """The same of every worker that has any."""
        ...


class NoPrefixes:
    """For policies that ask for none, and for tests: nobody has anything."""

    def cached_tokens(self, ref: WorkerRef, block_hashes: Sequence[bytes]) -> int:  # noqa: ARG002
        """See Prefixes."""
        return 0

    def match(self, block_hashes: Sequence[bytes]) -> Mapping[WorkerRef, int]:  # noqa: ARG002
        """See Prefixes."""
        return {}


@dataclass(frozen=True, slots=True)
class PolicyContext:
    """What a policy is made with: its pool, the index, and a seed for what it draws (None: another each time)."""

    kind: WorkerKind = WorkerKind.PREFILL
    prefixes: Prefixes = field(default_factory=NoPrefixes)
    seed: int | None = None


class Policy(Protocol):
    """One way to choose. Called on the event loop for every request that has a choice; must be quick and must not wait."""

    def choose(self, candidates: Sequence[Candidate], query: Query) -> Candidate:
        """One of `candidates`, which is never empty."""
        ...
