"""The other process of the connector contract: `writer KIND ADDRESS KEY BYTES` or `target KIND BYTES`."""

import asyncio
import os
import sys

import numpy as np

from contracts.errors import TransferFailed
from contracts.worker import ConnectorAddress
from kv_transfer.connector import ByteRange, Write
from kv_transfer.listener import TargetLimits
from kv_transfer.nixl import NixlConnector
from kv_transfer.region import SharedRegion
from kv_transfer.shm import ShmConnector
from kv_transfer.tcp import TcpConnector

SMALL_PIECES = 64 << 10  # many looks at the key in one write
FILL = 0x77


def connector_of(kind):
    return {
        "shm": lambda: ShmConnector(piece_bytes=SMALL_PIECES),
        "tcp": TcpConnector,
        "nixl": lambda: NixlConnector(limits=TargetLimits(stall_s=2.0)),
    }[kind]()


async def writer(kind, address, key, num_bytes):
    """Says "ready", waits for a line, writes everything, says how it went."""
    with SharedRegion(num_bytes) as region:
        np.frombuffer(region.buffer, dtype=np.uint8)[:] = FILL
        connector = connector_of(kind)
        connector.expose(region)
        where = ConnectorAddress(kind, address)
        try:
            await connector.connect(where)
            print("ready", flush=True)
            await asyncio.to_thread(sys.stdin.readline)
            await connector.write(where, key, [Write(0, 0, num_bytes)])
            print("landed", flush=True)
        except TransferFailed as error:
            print("failed", error, flush=True)
        await connector.close()


async def target(kind, num_bytes):
    """Says its address and a key to everything, and lives until its stdin ends."""
    with SharedRegion(num_bytes) as region:
        connector = connector_of(kind)
        connector.expose(region)
        key = connector.open_window([ByteRange(0, num_bytes)])
        print(connector.address().address, key, flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        await connector.close()


if __name__ == "__main__":
    # What libraries print goes to stderr: stdout is what the test reads.
    sys.stdout = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    role, kind, *rest = sys.argv[1:]
    if role == "writer":
        asyncio.run(writer(kind, rest[0], int(rest[1]), int(rest[2])))
    else:
        asyncio.run(target(kind, int(rest[0])))
