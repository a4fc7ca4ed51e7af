"""A client that measures what it sees of a streamed answer: from its first byte sent to its first token, and to its second.

    python measuring_client.py PORT load STREAMS          streams that follow each other, until it is killed
    python measuring_client.py PORT ask ROUTE NUMBER      so many requests, each as a line of JSON

It is the kernel that says when bytes came, not this process, which gets its turn when others let it: on a busy machine that is many
milliseconds later. Where it has asked for those bytes so late that the next token's had come, the kernel's word is that of the
later ones; then nothing was measured, and it says so (`late`). It runs before all others where that is allowed.
"""

import contextlib
import json
import os
import socket
import struct
import sys
import threading
import time
from dataclasses import asdict, dataclass

_SO_TIMESTAMPNS = 35


@dataclass
class Seen:
    """Seconds, None for what did not come; `told` is the `diptych` object of the last event."""

    ttft_s: float
    gap_s: float | None
    told: dict
    late: bool = False


class MeasuringClient:
    """One connection, kept."""

    def __init__(self, port):
        self._sock = socket.create_connection(("127.0.0.1", port))
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sock.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._sock.close()

    def ask(self, **body):
        """One streamed completion."""
        raw = json.dumps({"stream": True, "diptych": {"stages": True}, **body}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: r\r\nContent-Type: application/json\r\nContent-Length: {len(raw)}\r\n\r\n"
        began = time.time_ns()
        self._sock.sendall(head.encode() + raw)
        data, at, late = b"", [], False
        while not data.endswith(b"0\r\n\r\n"):
            came, stamps, _, _ = self._sock.recvmsg(65536, 256)
            now = time.time_ns()  # in case: it begins to note times a moment after it is asked to
            assert came, data
            data += came
            new = data.count(b"data: {") - len(at)
            late |= new > 1 and len(at) < 2
            if stamps:
                seconds, nanoseconds = struct.unpack("qq", stamps[0][2])
                now = seconds * 10**9 + nanoseconds
            at += [now] * new
        assert data.startswith(b"HTTP/1.1 200"), data
        events = [json.loads(line[6:]) for line in data.split(b"\n") if line.startswith(b"data: {")]
        told = next(event["diptych"] for event in events if event.get("diptych"))
        return Seen((at[0] - began) / 1e9, (at[1] - at[0]) / 1e9 if len(at) > 1 else None, told, late)


def load(port, num_streams):
    """Streams that follow each other, for ever."""

    def stream(number):
        client = MeasuringClient(port)
        for turn in range(1_000_000):
            client.ask(
                prompt=[2 + (number * 7919 + turn * 31 + i) % 90 for i in range(40)], max_tokens=48, ignore_eos=True
            )

    threads = [threading.Thread(target=stream, args=(number,), daemon=True) for number in range(num_streams)]
    for thread in threads:
        thread.start()
    threads[0].join()


def measure(port, route, number):
    """Short answers to prompts of which no two are alike."""
    with contextlib.suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    with MeasuringClient(port) as client:
        for turn in range(number):
            prompt = [2 + (turn * 37 + i * 3) % 90 for i in range(100)]
            seen = client.ask(prompt=prompt, max_tokens=6, ignore_eos=True, diptych={"stages": True, "route": route})
            print(json.dumps(asdict(seen)))


if __name__ == "__main__":
    if sys.argv[2] == "load":
        load(int(sys.argv[1]), int(sys.argv[3]))
    else:
        measure(int(sys.argv[1]), sys.argv[3], int(sys.argv[4]))
