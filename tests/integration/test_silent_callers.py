"""Callers of gRPC doors that are connected, answer pings, and say nothing more: for how long they hold what they hold."""

import asyncio
import time
from contextlib import suppress

import grpc

from engine.execution.fake import expected_tokens
from rpc.server import ServerConfig
from tests.integration.attacks_grpc import HALF, METHOD, call_once, head, hear
from tests.integration.http2_frames import DATA, END_STREAM, connected, frame
from tests.integration.pools import MODEL, Decoding, Setup, disaggregated, pools, request
from tests.integration.siege import besieged, run_attack

SMALL_DOOR = ServerConfig(port=0, max_connections=24, hello_s=1.0, stall_s=1.0, idle_s=1.0)

SILENT = {  # after which nothing is said any more, but answers to pings
    "hello": lambda method: b"",
    "a call": lambda method: head(1, method=method),
    "half a message": lambda method: head(1, method=method) + frame(DATA, 0, 1, HALF),
    "no message": lambda method: head(1, method=method) + frame(DATA, END_STREAM, 1),
}


async def stay(places, number, limit_s):
    """For how long the server at each of these ports lets so many silent connections of each kind stay, which call this method
    there; `limit_s` if it does so for ever. Those that are not let in try again.
    """

    async def one(port, begin):
        stayed_s = 0.0
        while stayed_s < 0.5:
            began = time.monotonic()
            with suppress(TimeoutError, OSError):
                async with asyncio.timeout(limit_s), connected(port) as (reader, writer):
                    writer.write(begin)
                    await hear(reader, writer, set(), asyncio.Semaphore(0))
            stayed_s = time.monotonic() - began
            await asyncio.sleep(0.01)
        return stayed_s

    begins = [(port, make(method)) for port, method in places for make in SILENT.values()]
    return await asyncio.gather(*(one(*begin) for begin in begins for _ in range(number)))


async def come_until(code, target):
    """Newcomers, one after another, until one of them is told this."""
    async with asyncio.timeout(15):
        while True:
            async with grpc.aio.insecure_channel(target, [("grpc.use_local_subchannel_pool", 1)]) as channel:
                if await call_once(channel) is code:
                    return
            await asyncio.sleep(0.02)


async def test_who_says_nothing_and_stays_loses_the_call_and_then_the_place(tmp_path):
    """They fill the door and never close: a newcomer has waited for a second or two, then is served as ever."""
    async with besieged(tmp_path, grpc=SMALL_DOOR) as siege:
        staying = asyncio.ensure_future(siege.attack(stay, [(siege.grpc, METHOD)], 8, 20.0))
        await come_until(grpc.StatusCode.UNAVAILABLE, siege.running.target)
        await come_until(grpc.StatusCode.OK, siege.running.target)
        assert max(await staying) < 15.0


async def test_at_workers_who_says_nothing_loses_the_place_and_answers_go_on():
    async with pools(Setup(step_s=0.005, server=SMALL_DOOR)) as workers:
        decoding, asked = Decoding(workers.decode[0]), request(24, 200)
        running = asyncio.create_task(disaggregated(workers, decoding, asked))
        prefill, decode = workers.prefill[0].server.port, workers.decode[0].server.port
        ours = ((prefill, "Prefill/Session"), (decode, "Handoff/Reserve"), (decode, "Decode/Session"))
        places = [(port, f"/diptych.v1.{method}") for port, method in ours]
        assert max(await run_attack(stay, places, 2, 20.0)) < 15.0
        assert (await running).token_ids == expected_tokens(asked, MODEL)
        await decoding.close()
        await workers.idle()
