"""The decode side's look at what arrived: are the blocks of a hand-off those that its ticket describes?

    ticket comes ──▶ missing: has it a digest of every block that is compared here?    windows quiesced ──▶ look: are they equal?

A block that did not travel because the prefix cache has it is not compared with prefill's: KV that was computed in another
batch may differ in its last bits and be right. With integrity full it is compared with itself: its digest is kept as a seal
when it is adopted (or first shared), and must be the same whenever it is shared again.

Owns nothing. Does not know states, leases or what becomes of a hand-off that fails here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from contracts.errors import DigestMismatch, HandoffError
from contracts.kv_layout import KVLayout
from contracts.ticket import Grant, Ticket
from kv_transfer.blocks import block_ranges
from kv_transfer.config import Integrity
from kv_transfer.digests import Digester, chosen_blocks, digester_for


@dataclass(frozen=True, slots=True)
class Findings:
    """`damage`: what is wrong, if anything; `spoiled`: positions of cached blocks that changed; `seals`: of all blocks, or none."""

    damage: DigestMismatch | None = None
    spoiled: tuple[int, ...] = ()
    seals: tuple[bytes, ...] = ()


class Verifier:
    """For all hand-offs of one worker. With integrity off it finds nothing wrong and reads nothing."""

    def __init__(self, layout: KVLayout, integrity: Integrity, digester: Digester | None) -> None:
        self._layout = layout
        self._integrity = integrity
        self._digester = digester_for(integrity, digester)

    def missing(self, ticket: Ticket, grant: Grant) -> HandoffError | None:
        """Why this ticket cannot be verified here; None when it can."""
        carried = dict(enumerate(ticket.block_digests))
        for index in self._chosen(grant):
            if not carried.get(index):
                return HandoffError(
                    f"ticket of {ticket.handoff_id} has no digest of block {index}; --integrity is "
                    f"{self._integrity.value} here and must be as strict on the prefill side"
                )
        return None

    async def look(self, ticket: Ticket, grant: Grant, cached_seals: Sequence[bytes | None]) -> Findings:
        """Compare the bytes. Called once nobody can write them any more."""
        if self._digester is None:
            return Findings()
        whole = self._integrity is Integrity.FULL
        sent, kept = self._chosen(grant), range(len(cached_seals)) if whole else ()
        looked = (*kept, *sent)
        found = await self._digester.digests(block_ranges([grant.block_ids[i] for i in looked], self._layout))
        now = dict(zip(looked, found, strict=True))
        wrong = [i for i in sent if now[i] != ticket.block_digests[i]]
        spoiled = tuple(i for i in kept if cached_seals[i] not in (None, now[i]))
        complaints = []
        if wrong:
            complaints.append(
                f"{len(wrong)} of {len(sent)} blocks are not those that {ticket.prefill.worker_id} sent, "
                f"block {wrong[0]} first"
            )
        if spoiled:
            complaints.append(f"{len(spoiled)} blocks of the prefix cache have changed, block {spoiled[0]} first")
        if complaints:
            return Findings(DigestMismatch(f"hand-off {ticket.handoff_id}: {'; '.join(complaints)}"), spoiled)
        return Findings(seals=found if whole else ())

    def _chosen(self, grant: Grant) -> tuple[int, ...]:
        first = grant.num_cached_tokens // self._layout.block_size
        return chosen_blocks(self._integrity, grant.handoff_id, first, len(grant.block_ids))
