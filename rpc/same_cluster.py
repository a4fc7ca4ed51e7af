"""Whether who answers at an address knows the secret that this process knows, or both know none.

Does not know workers, nor what a difference means.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeAlias

import grpc

from contracts.errors import NotOfThisCluster
from contracts.pb.diptych.v1 import cluster_pb2, cluster_pb2_grpc
from contracts.secret import new_nonce
from rpc.proving_channel import ProvingChannel

_TIMEOUT_S = 5.0
_RETRY_S = 1.0


# `check_same_cluster`, or another way to find out; see there.
Vet: TypeAlias = Callable[[grpc.aio.Channel, str], Awaitable[None]]


async def check_same_cluster(channel: grpc.aio.Channel, address: str) -> None:
    """Return once the server has shown that it is of our cluster; waits for it, and asks again when a call fails.

    Raises NotOfThisCluster when it is of another, or one of the two has a secret and the other none.
    """
    while True:
        await channel.channel_ready()
        try:
            if isinstance(channel, ProvingChannel):
                await channel.session()
            else:
                await _has_none(channel, address)
        except grpc.aio.AioRpcError:
            await asyncio.sleep(_RETRY_S)
        else:
            return


async def _has_none(channel: grpc.aio.Channel, address: str) -> None:
    request = cluster_pb2.ChallengeRequest(nonce=new_nonce())
    try:
        await cluster_pb2_grpc.ClusterStub(channel).Challenge(request, timeout=_TIMEOUT_S)
    except grpc.aio.AioRpcError as error:
        if error.code() is not grpc.StatusCode.UNIMPLEMENTED:
            raise
    else:
        said = "it has a cluster secret and we have none: both must be started with the same --cluster-secret-file"
        raise NotOfThisCluster(f"{address}: {said}")
