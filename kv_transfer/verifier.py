"""The decode side's look at what arrived: are the blocks of a hand-off those that its ticket describes?

    ticket comes ──▶ missing: has it a digest of every block that is compared here?    windows quiesced ──▶ damage: are they equal?

Owns nothing. Does not know states, leases or what becomes of a hand-off that fails here.
"""

from __future__ import annotations

from contracts.errors import DigestMismatch, HandoffError
from contracts.kv_layout import KVLayout
from contracts.ticket import Grant, Ticket
from kv_transfer.blocks import block_ranges
from kv_transfer.config import Integrity
from kv_transfer.digests import Digester, chosen_blocks, digester_for


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

    async def damage(self, ticket: Ticket, grant: Grant) -> DigestMismatch | None:
        """What is wrong with the bytes; None when nothing is. Called once nobody can write them any more."""
        if self._digester is None:
            return None
        chosen = self._chosen(grant)
        found = await self._digester.digests(block_ranges([grant.block_ids[i] for i in chosen], self._layout))
        wrong = [i for i, digest in zip(chosen, found, strict=True) if digest != ticket.block_digests[i]]
        if not wrong:
            return None
        return DigestMismatch(
            f"hand-off {ticket.handoff_id}: {len(wrong)} of {len(chosen)} blocks are not those that "
            f"{ticket.prefill.worker_id} sent, block {wrong[0]} first"
        )

    def _chosen(self, grant: Grant) -> tuple[int, ...]:
        first = grant.num_cached_tokens // self._layout.block_size
        return chosen_blocks(self._integrity, grant.handoff_id, first, len(grant.block_ids))
