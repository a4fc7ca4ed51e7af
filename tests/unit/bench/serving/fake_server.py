"""A server of known delays, OpenAI over HTTP and ours over gRPC, in a process of its own, that notes when it really wrote.

It answers `output_len` tokens, the first after FIRST_S, the others GAP_S apart. `time.monotonic` is one clock for the processes
of a machine, so what a client measured can be held against what was written.

    ports on stdout (one JSON line) ── … ── stdin closes ──▶ notes on stdout (one JSON line), end
"""

from __future__ import annotations

import asyncio
import json
import sys
import time

import grpc

from contracts.pb.diptych.v1 import inference_pb2 as pb
from contracts.pb.diptych.v1 import inference_pb2_grpc

FIRST_S = 0.030
GAP_S = 0.010
NOTES: dict[str, dict[int, list[float]]] = {"openai": {}, "grpc": {}}  # by the number that a prompt begins with


async def _pace(number: int, begin_s: float) -> float:
    """Wait for the time of a token; when it is written."""
    await asyncio.sleep(max(0.0, begin_s + FIRST_S + number * GAP_S - time.monotonic()))
    return time.monotonic()


async def _read_request(reader: asyncio.StreamReader) -> dict[str, object]:
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    length = int(head.split(b"content-length:")[1].split(b"\r\n")[0]) if b"content-length:" in head else 0
    return json.loads(await reader.readexactly(length) or b"{}")


async def answer_http(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while True:
            body = await _read_request(reader)
            begin_s, count = time.monotonic(), int(str(body["max_tokens"]))
            asked = body["messages"][0]["content"].split() if "messages" in body else body["prompt"]  # type: ignore[index]
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
            times = []
            for number in range(count):
                at_s = await _pace(number, begin_s)
                _chunk(writer, {"choices": [{"text": "x", "delta": {"content": "x"}}]})
                times.append(at_s)
            _chunk(writer, {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": count}})
            writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
            NOTES["openai"][int(asked[0])] = times
            await writer.drain()
    except asyncio.IncompleteReadError:
        writer.close()


def _chunk(writer: asyncio.StreamWriter, event: dict[str, object]) -> None:
    data = b"data: " + json.dumps(event).encode() + b"\n\n"
    writer.write(b"%x\r\n%s\r\n" % (len(data), data))


class Inference(inference_pb2_grpc.InferenceServicer):
    async def Generate(self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext) -> None:
        begin_s, times = time.monotonic(), []
        for number in range(request.sampling.max_tokens):
            times.append(await _pace(number, begin_s))
            await context.write(pb.GenerateResponse(text="x", token_ids=[300]))
        await context.write(pb.GenerateResponse(usage=pb.Usage(prompt_tokens=5)))
        NOTES["grpc"][request.token_ids.ids[0]] = times


async def main() -> None:
    server = await asyncio.start_server(answer_http, "127.0.0.1", 0)
    ours = grpc.aio.server()
    inference_pb2_grpc.add_InferenceServicer_to_server(Inference(), ours)
    port = ours.add_insecure_port("127.0.0.1:0")
    await ours.start()
    print(json.dumps({"openai": server.sockets[0].getsockname()[1], "grpc": port}), flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    print(json.dumps(NOTES), flush=True)
    await ours.stop(None)


if __name__ == "__main__":
    asyncio.run(main())
