"""A server of known delays, OpenAI over HTTP and ours over gRPC, in a process of its own, that notes when it really wrote.

A prompt is three numbers: its own, after how many microseconds its first token comes, and how many are between tokens.
`time.monotonic` is one clock for the processes of a machine, so what a client measured can be held against what was written.

    ports on stdout (one JSON line) ──▶ a line on stdin: notes since the last one on stdout (one JSON line) ──▶ stdin closes: end
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import grpc

from contracts.pb.diptych.v1 import inference_pb2 as pb
from contracts.pb.diptych.v1 import inference_pb2_grpc

WANTED = {"temperature": 0.0, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
NOTES: dict[int, list[float]] = {}  # by the number that a prompt begins with


@dataclass(frozen=True)
class Pace:
    """Of one answer, in seconds."""

    begin_s: float
    first_s: float
    gap_s: float

    async def wait(self, place: int) -> float:
        """For the time of a token; when it is written."""
        due_s = self.begin_s + self.first_s + place * self.gap_s
        await asyncio.sleep(max(0.0, due_s - time.monotonic()))
        return time.monotonic()


def pace_of(asked: Sequence[str | int]) -> tuple[int, Pace]:
    """The number of a prompt, and how its answer comes from now on."""
    number, first_us, gap_us = (int(part) for part in asked)
    return number, Pace(time.monotonic(), first_us / 1e6, gap_us / 1e6)


async def _read_request(reader: asyncio.StreamReader) -> dict[str, object]:
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    length = int(head.split(b"content-length:")[1].split(b"\r\n")[0]) if b"content-length:" in head else 0
    return json.loads(await reader.readexactly(length) or b"{}")


async def answer_http(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while True:
            body = await _read_request(reader)
            count = int(str(body["max_tokens"]))
            asked = body["messages"][0]["content"].split() if "messages" in body else body["prompt"]  # type: ignore[index]
            number, pace = pace_of(asked)  # type: ignore[arg-type]
            assert {key: body[key] for key in WANTED} == WANTED
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
            times = []
            for place in range(count):
                at_s = await pace.wait(place)
                _chunk(writer, {"choices": [{"text": "x", "delta": {"content": "x"}}]})
                times.append(at_s)
            _chunk(writer, {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": count}})
            writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
            NOTES[number] = times
            await writer.drain()
    except asyncio.IncompleteReadError:
        writer.close()


def _chunk(writer: asyncio.StreamWriter, event: dict[str, object]) -> None:
    data = b"data: " + json.dumps(event).encode() + b"\n\n"
    writer.write(b"%x\r\n%s\r\n" % (len(data), data))


class Inference(inference_pb2_grpc.InferenceServicer):
    async def Generate(self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext) -> None:
        times: list[float] = []
        number, pace = pace_of(request.token_ids.ids)
        assert request.sampling.ignore_eos and request.sampling.temperature == 0
        for place in range(request.sampling.max_tokens):
            times.append(await pace.wait(place))
            await context.write(pb.GenerateResponse(text="x", token_ids=[300]))
        await context.write(pb.GenerateResponse(usage=pb.Usage(prompt_tokens=5)))
        NOTES[number] = times


async def main() -> None:
    server = await asyncio.start_server(answer_http, "127.0.0.1", 0)
    ours = grpc.aio.server()
    inference_pb2_grpc.add_InferenceServicer_to_server(Inference(), ours)
    port = ours.add_insecure_port("127.0.0.1:0")
    await ours.start()
    print(json.dumps({"openai": server.sockets[0].getsockname()[1], "grpc": port}), flush=True)
    while await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline):
        print(json.dumps(NOTES), flush=True)
        NOTES.clear()
    await ours.stop(None)


if __name__ == "__main__":
    asyncio.run(main())
