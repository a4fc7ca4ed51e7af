"""A client that measures what it sees of a streamed answer: from its first byte sent to its first token, and to its second.

A blocking socket in a thread that does nothing else, so that what it measures is the server's and not its own. `python
measuring_client.py PORT STREAMS` loads a router with streams that follow each other, until it is killed.
"""

import json
import socket
import sys
import threading
import time
from dataclasses import dataclass


@dataclass
class Seen:
    """Seconds, None for what did not come; `told` is the `diptych` object of the last event."""

    ttft_s: float
    gap_s: float | None
    told: dict


class MeasuringClient:
    """One connection, kept."""

    def __init__(self, port):
        self._sock = socket.create_connection(("127.0.0.1", port))
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._sock.close()

    def ask(self, **body):
        """One streamed completion."""
        raw = json.dumps({"stream": True, "diptych": {"stages": True}, **body}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: r\r\nContent-Type: application/json\r\nContent-Length: {len(raw)}\r\n\r\n"
        began = time.monotonic()
        self._sock.sendall(head.encode() + raw)
        data, at, events = b"", [], []
        while not data.endswith(b"0\r\n\r\n"):
            came = self._sock.recv(65536)
            now = time.monotonic()
            assert came, data
            data += came
            new = data.count(b"data: {") - len(at)
            at += [now] * new
        assert data.startswith(b"HTTP/1.1 200"), data
        events = [json.loads(line[6:]) for line in data.split(b"\n") if line.startswith(b"data: {")]
        told = next(event["diptych"] for event in events if event.get("diptych"))
        return Seen(at[0] - began, at[1] - at[0] if len(at) > 1 else None, told)


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


if __name__ == "__main__":
    load(int(sys.argv[1]), int(sys.argv[2]))
