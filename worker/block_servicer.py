"""The gRPC door for who wants to know what a worker's prefix cache has. Does not know engines or routers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing

import grpc

from contracts import wire_handoff
from contracts.pb.diptych.v1 import blocks_pb2, blocks_pb2_grpc
from contracts.worker import WorkerRef, check_life
from worker.block_feed import BlockFeed, Changes, Snapshot

SERVICE_NAME: str = blocks_pb2.DESCRIPTOR.services_by_name["BlockEvents"].full_name
_Context = grpc.aio.ServicerContext[blocks_pb2.WatchRequest, AsyncIterator[blocks_pb2.WatchResponse]]


class BlockEventsServicer(blocks_pb2_grpc.BlockEventsServicer):
    """Serves BlockEvents on the worker `ref`."""

    def __init__(self, ref: WorkerRef, feed: BlockFeed) -> None:
        self._ref = ref
        self._feed = feed

    async def Watch(
        self, request: blocks_pb2.WatchRequest, context: _Context
    ) -> AsyncIterator[blocks_pb2.WatchResponse]:
        """See the service's definition."""
        del context
        check_life(self._ref, wire_handoff.worker_ref_from_pb(request.worker))
        ours, number = wire_handoff.worker_ref_to_pb(self._ref), 0
        async with aclosing(self._feed.watch()) as messages:
            async for message in messages:
                number += 1
                match message:
                    case Snapshot(blocks, more):
                        snapshot = blocks_pb2.BlockSnapshot(blocks=blocks, more=more)
                        yield blocks_pb2.WatchResponse(worker=ours, number=number, snapshot=snapshot)
                    case Changes(stored, removed):
                        changes = blocks_pb2.BlockChanges(stored=stored, removed=removed)
                        yield blocks_pb2.WatchResponse(worker=ours, number=number, changes=changes)
