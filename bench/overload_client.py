"""An open loop over HTTP: requests at random times, whether others have ended or not, and what became of each.

    OfferedLoad ──(a process of its own: `python -m bench.overload_client`)──▶ OfferedAnswer per request

Each request is a connection of its own, as from a user of its own, and may say how long it waits (`X-Request-Timeout`). Nothing
is sent again. Does not know what is measured with it.
"""

from __future__ import annotations

import asyncio
import random
import re
import subprocess
import sys
import time
from dataclasses import dataclass

import msgspec

from bench.load import LoadFailed

PATIENCE_S = 10.0  # with the server, beyond the request's own time: who is not answered by then hangs
_FIRST_ORDINARY_TOKEN = 16
_CODE = re.compile(rb'"code": ?"(\w+)"')  # of an error, wherever it stands in an answer


@dataclass(frozen=True, slots=True)
class OfferedLoad:
    """`rate` requests per second for `duration_s`; with `rate` 0 `concurrency` of them in flight all the time.

    Each has `prompt_tokens` random tokens of `vocab_size`, and wants `max_tokens` within `timeout_s`, None for the server's time.
    `says_time` False keeps that to itself, as clients do that name no time.
    """

    port: int
    model: str
    prompt_tokens: int
    max_tokens: int
    vocab_size: int
    duration_s: float
    rate: float = 0.0
    concurrency: int = 0
    timeout_s: float | None = None
    seed: int = 0
    says_time: bool = True


@dataclass(frozen=True, slots=True)
class OfferedAnswer:
    """What became of one request; seconds since it was sent. Status 0: no answer came, or it broke off.

    `whole` says that the stream came to its good end, `retry_after_s` what a refusal said, `error` the code of what it ended with.
    """

    sent_s: float  # since the load began
    status: int
    first_s: float
    end_s: float
    whole: bool
    retry_after_s: int | None = None
    error: str = ""


def run_offered(load: OfferedLoad) -> tuple[OfferedAnswer, ...]:
    """Offer it from a process of its own. Raises LoadFailed when that fails."""
    command = [sys.executable, "-m", "bench.overload_client"]
    done = subprocess.run(command, input=msgspec.json.encode(load), capture_output=True, check=False)
    if done.returncode != 0:
        raise LoadFailed(done.stderr.decode("utf-8", "replace").strip()[-2000:])
    return msgspec.json.decode(done.stdout, type=tuple[OfferedAnswer, ...])


async def offer(load: OfferedLoad) -> tuple[OfferedAnswer, ...]:
    """Offer it from this process; returns when every request has ended, or was given up."""
    chance, began = random.Random(load.seed), time.monotonic()
    if not load.rate:
        return await _closed_loop(load, chance, began)
    asks, due_s = [], 0.0
    while (due_s := due_s + chance.expovariate(load.rate)) < load.duration_s:
        await asyncio.sleep(began + due_s - time.monotonic())
        asks.append(asyncio.ensure_future(_ask(load, _request(load, chance), began)))
    return tuple(await asyncio.gather(*asks))


async def _closed_loop(load: OfferedLoad, chance: random.Random, began: float) -> tuple[OfferedAnswer, ...]:
    answers: list[OfferedAnswer] = []

    async def work() -> None:
        while time.monotonic() - began < load.duration_s:
            answers.append(await _ask(load, _request(load, chance), began))

    await asyncio.gather(*(work() for _ in range(load.concurrency)))
    return tuple(answers)


def _request(load: OfferedLoad, chance: random.Random) -> bytes:
    prompt = [chance.randrange(_FIRST_ORDINARY_TOKEN, load.vocab_size) for _ in range(load.prompt_tokens)]
    wish = {"model": load.model, "prompt": prompt, "max_tokens": load.max_tokens, "ignore_eos": True, "stream": True}
    body = msgspec.json.encode(wish)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\nConnection: close\r\n"
    if load.timeout_s is not None and load.says_time:
        head += f"X-Request-Timeout: {load.timeout_s:g}\r\n"
    return head.encode() + b"Content-Type: application/json\r\n\r\n" + body


async def _ask(load: OfferedLoad, request: bytes, began: float) -> OfferedAnswer:
    sent, first, got = time.monotonic(), 0.0, b""
    try:
        async with asyncio.timeout((load.timeout_s or 0.0) + PATIENCE_S + (0.0 if load.timeout_s else load.duration_s)):
            reader, writer = await asyncio.open_connection("127.0.0.1", load.port)
            try:
                writer.write(request)
                while chunk := await reader.read(65536):
                    got += chunk
                    first = first or (time.monotonic() if b"data: " in got else 0.0)
            finally:
                writer.transport.abort()
    except (OSError, TimeoutError):
        got = got if got.endswith(b"0\r\n\r\n") else b""
    now, codes = time.monotonic(), _CODE.findall(got) if b'"error":' in got else []
    return OfferedAnswer(
        sent_s=sent - began,
        status=_status(got),
        first_s=(first or now) - sent,
        end_s=now - sent,
        whole=b"data: [DONE]" in got and b'"error":' not in got,
        retry_after_s=_retry_after(got),
        error=codes[-1].decode() if codes else "",
    )


def _status(answer: bytes) -> int:
    words = answer.split(b" ", 2)
    return int(words[1]) if len(words) > 1 and words[1].isdigit() else 0


def _retry_after(answer: bytes) -> int | None:
    for line in answer.partition(b"\r\n\r\n")[0].split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.lower() == b"retry-after" and value.strip().isdigit():
            return int(value)
    return None


def main() -> None:
    """The client process: a load on stdin, answers on stdout."""
    load = msgspec.json.decode(sys.stdin.buffer.read(), type=OfferedLoad)
    import uvloop

    sys.stdout.buffer.write(msgspec.json.encode(uvloop.run(offer(load))))


if __name__ == "__main__":
    main()
