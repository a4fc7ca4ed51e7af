"""Which blocks travel, in which writes: coalesces neighbours and pushes them through a link as they are finished.

    advance(n, blocks) ─▶ full blocks below n are ready ─▶ push: writes of ready blocks, one connector call at a time, skipping
    those that the grant says are cached ─▶ finish(blocks): the partial last block is ready, too ─▶ HandoffStats

A partial block travels whole: its unused cells are written by decode before they are read. Chosen blocks are digested beside
their write, from the source's bytes. Where blocks travel in a narrow form, offsets are those of the narrow blocks, on both
sides, and the unused cells of the last one are cleared first: what they hold would have a say in its scales.
Does not know states or messages.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence

from contracts.errors import HandoffError, InternalError, TransferFailed
from contracts.kv_layout import KVLayout
from contracts.ticket import Grant
from kv_transfer.config import SenderConfig
from kv_transfer.connector import ByteRange, Write
from kv_transfer.digests import chosen_blocks, digester_for
from kv_transfer.endings import until_done, within
from kv_transfer.links import Link, Side
from observability.stages import HandoffStats


def block_ranges(block_ids: Sequence[int], layout: KVLayout) -> tuple[ByteRange, ...]:
    """Where these blocks lie in a region, as they travel."""
    size = layout.sent_block_bytes
    return tuple(ByteRange(block_id * size, size) for block_id in block_ids)


def coalesce(source_ids: Sequence[int], target_ids: Sequence[int], block_bytes: int) -> tuple[Write, ...]:
    """Writes that copy block i of `source_ids` to block i of `target_ids`; runs that are adjacent on both sides are one."""
    writes: list[Write] = []
    for source_id, target_id in zip(source_ids, target_ids, strict=True):
        source, target = source_id * block_bytes, target_id * block_bytes
        last = writes[-1] if writes else None
        if (
            last is not None
            and last.source_offset + last.length == source
            and last.target_offset + last.length == target
        ):
            writes[-1] = Write(last.source_offset, last.target_offset, last.length + block_bytes)
        else:
            writes.append(Write(source, target, block_bytes))
    return tuple(writes)


def key_for(link: Link, grant: Grant) -> int:
    """The key that `grant` gives the connector of `link`; TransferFailed when there is none."""
    for address, key in grant.windows:
        if address == link.address:
            return key
    raise TransferFailed(f"the grant has no window for {link.kind}:{link.address.address}")


class Pusher:
    """One hand-off's bytes. Used from one event loop; `push` runs once."""

    def __init__(self, side: Side, num_tokens: int, config: SenderConfig, handoff_id: str) -> None:
        self._handoff_id = handoff_id
        self._digester = digester_for(config.integrity, side.digester)
        self._digests: dict[int, bytes] = {}
        self._layout = side.layout
        self._blank = side.blank
        self._num_tokens = num_tokens
        self._clock = side.clock
        self._config = config
        self._num_blocks = side.layout.num_blocks_for(num_tokens)
        self._block_ids: tuple[int, ...] = ()
        self._num_ready = 0
        self._finished_at: float | None = None
        self._news = asyncio.Event()

    def advance(self, num_computed_tokens: int, block_ids: Sequence[int]) -> None:
        """The KV of so many tokens is finished; `block_ids` are the request's source blocks so far, in order."""
        full = min(num_computed_tokens // self._layout.block_size, self._num_blocks)
        if full > len(block_ids):
            raise InternalError(f"{num_computed_tokens} computed tokens need {full} blocks, got {len(block_ids)}")
        if full > self._num_ready:
            self._block_ids = tuple(block_ids)
            self._num_ready = full
            self._news.set()

    def finish(self, block_ids: Sequence[int]) -> None:
        """All tokens are computed: the last block may travel as it is."""
        if len(block_ids) < self._num_blocks:
            raise InternalError(f"{self._num_blocks} blocks to push, got {len(block_ids)}")
        self._block_ids = tuple(block_ids)
        self._num_ready = self._num_blocks
        self._finished_at = self._clock.now()
        self._news.set()

    def digests(self) -> tuple[bytes, ...]:
        """One for each block of the request in order, empty where none was taken; () when there is none at all."""
        return tuple(self._digests.get(i, b"") for i in range(self._num_blocks)) if self._digests else ()

    async def push(self, link: Link, grant: Grant) -> HandoffStats:
        """Write every block that is not cached at the target, as they get ready; returns when all have landed.

        Raises TransferFailed. No write is under way when this has returned or raised, also by cancellation.
        """
        key = self._window(link, grant)
        size = self._layout.sent_block_bytes
        at = first = grant.num_cached_tokens // self._layout.block_size
        at_once = max(1, self._config.max_write_bytes // size)
        num_writes, transfer_s, exposed_s = 0, 0.0, 0.0
        while at < self._num_blocks:
            if self._num_ready <= at:
                self._news.clear()
                await self._news.wait()
                continue
            end = min(self._num_ready, at + at_once)
            if end == self._num_blocks:
                await self._clear_unused()
            writes = coalesce(self._block_ids[at:end], grant.block_ids[at:end], size)
            began = self._clock.now()
            await self._digest_beside(self._write(link, key, writes), first, (at, end))
            ended = self._clock.now()
            transfer_s += ended - began
            if self._finished_at is not None:
                exposed_s += ended - max(began, self._finished_at)
            num_writes += len(writes)
            at = end
        sent = self._num_blocks - first
        return HandoffStats(link.kind, sent * size, num_writes, sent, first, transfer_s, exposed_s)

    async def _clear_unused(self) -> None:
        used = self._num_tokens % self._layout.block_size
        if self._blank is not None and used:
            await self._blank(self._block_ids[self._num_blocks - 1], used)

    async def _digest_beside(self, write: Coroutine[None, None, None], first: int, these: tuple[int, int]) -> None:
        """Await `write`, reading meanwhile those of the blocks `these` that are chosen; both are over afterwards."""
        chosen = chosen_blocks(self._config.integrity, self._handoff_id, first, self._num_blocks)
        indices = [i for i in chosen if these[0] <= i < these[1]]
        if self._digester is None or not indices:
            await write
            return
        ranges = block_ranges([self._block_ids[i] for i in indices], self._layout)
        reading = asyncio.ensure_future(self._digester.digests(ranges))
        try:
            await write
        finally:
            await until_done(reading)
        self._digests.update(zip(indices, reading.result(), strict=True))

    async def _write(self, link: Link, key: int, writes: Sequence[Write]) -> None:
        try:
            await within(self._clock, self._config.write_timeout_s, link.connector.write(link.address, key, writes))
        except TimeoutError as error:
            raise TransferFailed(f"{link.kind}: a write took longer than {self._config.write_timeout_s:g} s") from error

    def _window(self, link: Link, grant: Grant) -> int:
        """The key for our connector, after checking that the grant is one for this request."""
        cached = grant.num_cached_tokens
        whole = cached % self._layout.block_size == 0 and 0 <= cached <= self._num_blocks * self._layout.block_size
        if len(grant.block_ids) != self._num_blocks or not whole:
            raise HandoffError(
                f"a grant of {len(grant.block_ids)} blocks with {cached} tokens cached does not fit {self._num_blocks}"
            )
        return key_for(link, grant)
