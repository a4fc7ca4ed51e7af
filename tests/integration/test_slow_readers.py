"""A client that stops reading in the middle of its answer is cut off and holds nothing; one that reads slowly is served."""

import asyncio
import json
import socket
import time

import grpc
import pytest

from contracts.pb.diptych.v1 import inference_pb2 as pb
from contracts.pb.diptych.v1 import inference_pb2_grpc, types_pb2
from router.config import HttpConfig, RegistryConfig
from rpc.server import ServerConfig
from tests.integration.pools import Setup
from tests.integration.router_harness import MODEL, router_config
from tests.integration.test_router_pools import FAKE, PROMPT, served

STALL_S = 0.5
STEP_S = 0.04
NUM_TOKENS = 400  # 16 s of steps: who is cut off is free long before
HOLDS_LITTLE = [("grpc.http2.lookahead_bytes", 4096), ("grpc.http2.bdp_probe", 0)]
LOGPROBS = 20  # some 2 KiB a token, so that what the connection holds is soon full


def config(tmp_path):
    return router_config(
        tmp_path,
        http=HttpConfig(port=0, stall_s=STALL_S),
        grpc=ServerConfig(port=0, stall_s=STALL_S),
        registry=RegistryConfig(ttl_s=60.0),
    )


async def http_reader(running) -> socket.socket:
    """A streaming request on a connection that holds little."""
    running.router._doors._http._socket.setsockopt(
        socket.SOL_SOCKET, socket.SO_SNDBUF, 4096
    )  # accepted sockets inherit it
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(client, ("127.0.0.1", running.ports.http))
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": NUM_TOKENS, "ignore_eos": True, "stream": True}
    text = json.dumps(body | {"logprobs": LOGPROBS}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(text)}\r\n\r\n"
    await loop.sock_sendall(client, head.encode() + text)
    return client


def grpc_call(channel):
    message = pb.GenerateRequest(
        model=MODEL,
        token_ids=pb.TokenIds(ids=PROMPT),
        sampling=types_pb2.SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=LOGPROBS),
    )
    return inference_pb2_grpc.InferenceStub(channel).Generate(message)


async def computing(workers) -> None:
    async with asyncio.timeout(10):
        while not workers.decode[0].worker.load().num_running:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("surface", ["http", "grpc"])
async def test_who_stops_reading_is_cut_off_and_all_blocks_are_free(tmp_path, surface):
    async with served(tmp_path, Setup(model=FAKE, step_s=STEP_S), config(tmp_path)) as (running, workers):
        async with grpc.aio.insecure_channel(running.target, options=HOLDS_LITTLE) as channel:
            if surface == "http":
                client = await http_reader(running)
                await asyncio.get_running_loop().sock_recv(client, 100)
            else:
                call = grpc_call(channel)
                await call.read()
            await computing(workers)
            began, steps = time.monotonic(), workers.decode[0].worker.driver.num_steps
            await workers.idle()
            made = workers.decode[0].worker.driver.num_steps - steps
            print(f"{surface}: free after {time.monotonic() - began:.2f} s, {made} tokens")
            assert made < NUM_TOKENS - 50, "before its answer had come to its end"
            if surface == "http":
                client.close()
            else:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    while await call.read() is not grpc.aio.EOF:
                        pass
                assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert await running.metric("diptych_requests_running") == 0


async def test_who_reads_slowly_gets_all_of_it(tmp_path):
    """Slower than it is made, but never silent for as long as the limit."""
    async with served(tmp_path, Setup(model=FAKE), config(tmp_path)) as (running, workers):
        client, loop, got = await http_reader(running), asyncio.get_running_loop(), b""
        async with asyncio.timeout(30):
            while not got.endswith(b"0\r\n\r\n"):
                part = await loop.sock_recv(client, 16384)
                assert part, "cut off"
                got += part
                await asyncio.sleep(0.02)
        client.close()
        assert got.count(b'"token_logprobs"') > NUM_TOKENS // 100  # what waited for it came as one
        assert b"data: [DONE]" in got
        await workers.idle()
