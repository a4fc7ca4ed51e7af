"""What strangers may do to the HTTP door: slow, endless, ambiguous or broken requests, and very many. Others notice nothing."""

import asyncio
import contextlib
import json
import re
import socket
import subprocess
import sys
from dataclasses import replace

import pytest

from router.config import AdmissionConfig, HttpConfig
from tests.integration.siege import ASK, ATTACKER, BOUND_S, MEMORY_MIB, PATH, besieged, memory_mib

BODY = json.dumps(ASK).encode()
STREAM = json.dumps({**ASK, "max_tokens": 400, "stream": True}).encode()
KEY = f"Authorization: Bearer {ATTACKER}\r\n"
DOOR = HttpConfig(port=0, stall_s=1.0, max_connections=100, max_body_bytes=100_000)


def post(body=BODY, *lines, path=PATH, length=True):
    head = [f"POST {path} HTTP/1.1", "Host: x", "Content-Type: application/json", *lines]
    if length:
        head.append(f"Content-Length: {len(body)}")
    return "\r\n".join(head).encode() + b"\r\n" + KEY.encode() + b"\r\n" + body


def chunked(*chunks):
    return post(b"", "Transfer-Encoding: chunked", length=False) + b"".join(
        b"%x\r\n%b\r\n" % (len(c), c) for c in chunks
    )


@contextlib.asynccontextmanager
async def connection(port):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def said(port, *pieces, limit_s=10.0, pause_s=0.0):
    """Everything that the server says until it closes; what it does not take of the pieces is kept."""
    async with connection(port) as (reader, writer):
        answer = asyncio.ensure_future(reader.read())
        with contextlib.suppress(OSError):
            for piece in pieces:
                if answer.done():
                    break
                writer.write(piece)
                async with asyncio.timeout(limit_s):
                    await writer.drain()
                if pause_s:
                    await asyncio.sleep(pause_s)
        async with asyncio.timeout(limit_s):
            try:
                return await answer
            except OSError:
                return b""


def statuses(answer):
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", answer)]


SLOW = {  # bytes at once, and bytes that come one by one
    "nothing": (b"", b""),
    "head": (b"", post()),
    "body": (post(b"", f"Content-Length: {50_000}", length=False), BODY),
    "empty lines": (b"", b"\r\n" * 200),
    "chunks": (chunked(), b"1\r\n \r\n" * 60),
}


async def send_slowly(port):
    answers = []
    for begin, slowly in SLOW.values():
        pieces = [begin, *(slowly[i : i + 1] for i in range(60))]
        answers += [said(port, *pieces, limit_s=5.0, pause_s=0.05) for _ in range(40)]
    return await asyncio.gather(*answers)


async def test_who_sends_slowly_holds_nothing_for_long(tmp_path):
    """Twice as many at once as may be: the newest half is cut after a second, those before it to make room."""
    async with besieged(tmp_path, http=DOOR) as siege:
        assert not any(await siege.attack(send_slowly, siege.http))


async def test_empty_lines_after_an_answer_keep_no_connection_open(tmp_path):
    async with besieged(tmp_path, http=DOOR) as siege, connection(siege.http) as (reader, writer):
        writer.write(post())
        await reader.readuntil(b"}")
        writer.write(b"\r\n")
        async with asyncio.timeout(5):
            await reader.read()


ENDLESS = {
    "body": (chunked(), b"8000\r\n" + b"x" * 0x8000 + b"\r\n"),
    "tiny chunks": (chunked(), b"1\r\nx\r\n" * 10_000),
    "a chunk's extension": (chunked() + b"1;", b"x" * 100_000),
    "a trailer": (chunked(BODY) + b"0\r\nx: ", b"y" * 100_000),
    "trailers": (chunked(BODY) + b"0\r\n", b"x: y\r\n" * 10_000),
    "a head": (b"POST / HTTP/1.1\r\nx: ", b"y" * 100_000),
    "heads": (b"POST / HTTP/1.1\r\n", b"x: y\r\n" * 10_000),
    "a path": (b"GET /", b"y" * 100_000),
    "a body for nobody": (
        post(b"", "Transfer-Encoding: chunked", path="/nowhere", length=False),
        b"1000\r\n" + b"x" * 4096 + b"\r\n",
    ),
}


async def send_endlessly(port, what):
    begin, more = ENDLESS[what]
    return await said(port, begin, *[more] * (300_000_000 // len(more)), limit_s=20.0)


async def test_what_does_not_end_is_ended_and_not_kept(tmp_path):
    """300 MB of each would be sent, if they were taken."""
    async with besieged(tmp_path, http=DOOR) as siege:
        for what in ENDLESS:
            answer = await siege.attack(send_endlessly, siege.http, what)
            assert statuses(answer)[:1] in ([], [400], [404], [413], [431]), what
            assert memory_mib() - siege.memory < MEMORY_MIB, what


AMBIGUOUS = {
    "two lengths": post(BODY, "Content-Length: 5"),
    "a length and chunks": post(BODY, "Transfer-Encoding: chunked"),
    "chunks twice": post(b"0\r\n\r\n", "Transfer-Encoding: chunked", "Transfer-Encoding: chunked", length=False),
    "chunks, but not last": post(b"0\r\n\r\n", "Transfer-Encoding: chunked, identity", length=False),
    "a hidden encoding": post(BODY, "Transfer-Encoding: xchunked"),
    "a space before the colon": post(BODY, "Transfer-Encoding : chunked"),
    "a folded line": post(BODY, "X: a\r\n Transfer-Encoding: chunked"),
    "a length that is none": post(b"", "Content-Length: 1e3", length=False),
    "a length below zero": post(b"", "Content-Length: -1", length=False),
    "a length with a sign": post(BODY, f"Content-Length: +{len(BODY)}", length=False),
    "a length over all": post(b"", "Content-Length: 99999999999999999999", length=False),
    "a chunk that is none": post(b"xyz\r\n", "Transfer-Encoding: chunked", length=False),
    "a chunk over all": post(b"fffffffffffffffff\r\n", "Transfer-Encoding: chunked", length=False),
    "a bare carriage return": post(BODY, "X: a\rTransfer-Encoding: chunked"),
    "a zero in a line": post(BODY, "X: a\x00b"),
    "no line ends": post(BODY).replace(b"\r\n", b"\n"),
}


async def test_what_may_be_read_in_two_ways_is_not_read(tmp_path):
    """A request behind it must not be answered: a proxy before us may have taken it for a part of the first."""
    async with besieged(tmp_path, http=DOOR) as siege:
        for what, request in AMBIGUOUS.items():
            answer = await said(siege.http, request + b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")
            assert statuses(answer) == [400], (what, answer[:500])


async def test_requests_in_one_go_are_answered_in_order(tmp_path):
    async with besieged(tmp_path, http=DOOR) as siege:
        last = b"GET /version HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
        answer = await said(siege.http, post() * 30 + post(path="/nowhere") + last)
        assert statuses(answer) == [200] * 30 + [404, 200], answer[-300:]


async def test_who_leaves_after_many_requests_in_one_go_holds_nothing(tmp_path):
    async with besieged(tmp_path, http=DOOR) as siege:
        for _ in range(20):
            async with connection(siege.http) as (reader, writer):
                writer.write(post(STREAM) * 200)
                await reader.read(10)


@pytest.mark.parametrize("when", ["at once", "in a stream"])
async def test_who_half_closes_holds_nothing(tmp_path, when):
    async with besieged(tmp_path, http=DOOR) as siege:

        async def half_close():
            async with connection(siege.http) as (reader, writer):
                writer.write(post(STREAM))
                if when == "in a stream":
                    await reader.read(10)
                writer.write_eof()
                async with asyncio.timeout(10):
                    await reader.read()

        await asyncio.gather(*(half_close() for _ in range(30)))


async def test_who_never_reads_holds_nothing_for_long(tmp_path):
    """Answers that are larger than what the sockets hold; the clients stay connected."""
    admission = AdmissionConfig(max_running=20, max_waiting=40)  # all of them theirs, until they are cut off
    async with besieged(tmp_path, work_s=10.0, http=DOOR, admission=admission) as siege:
        clients, loop = [], asyncio.get_running_loop()
        request = post(json.dumps({**ASK, "max_tokens": 900, "stream": True, "logprobs": 20}).encode())
        for _ in range(40):
            client = socket.socket()
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.setblocking(False)
            await loop.sock_connect(client, ("127.0.0.1", siege.http))
            await loop.sock_sendall(client, request)
            clients.append(client)
        await asyncio.sleep(2 * DOOR.stall_s)
        for client in clients:
            client.close()


HOSTILE_BODIES = {
    "no UTF-8": b'{"prompt": "\xff\xfe"}',
    "half a character": b'{"prompt": "\xe2\x82"}',
    "a lone surrogate": b'{"prompt": "\\ud800", "max_tokens": 4}',
    "deep lists": b"[" * 90_000,
    "deep objects": b'{"a":' * 18_000,
    "deep inside": b'{"prompt": "a", "logit_bias": ' + b'{"a":' * 10_000 + b"1" + b"}" * 10_001,
    "closed deep lists": b'{"prompt": ' + b"[" * 40_000 + b"]" * 40_000 + b"}",
    "a huge number": b'{"prompt": "a", "max_tokens": ' + b"9" * 90_000 + b"}",
    "a huge exponent": b'{"prompt": "a", "temperature": 1e999999999}',
    "a tiny exponent": b'{"prompt": "a", "seed": 1e-999999999}',
    "not a number": b'{"prompt": "a", "temperature": NaN}',
    "a key many times": b'{"prompt": "a", ' + b'"max_tokens": 4, ' * 5000 + b'"max_tokens": 4}',
    "many keys": b'{"prompt": "a", ' + b", ".join(b'"k%d": 1' % i for i in range(8000)) + b"}",
    "a zero byte": b'{"prompt": "a\x00b"}',
    "nothing": b"",
    "only white space": b" " * 90_000,
    "a list": b"[]",
    "null": b"null",
    "two values": b"{} {}",
    "many stops": json.dumps({**ASK, "stop": ["x"] * 9000}).encode(),
    "many prompts": json.dumps({**ASK, "prompt": ["x"] * 9000}).encode(),
    "huge token ids": json.dumps({**ASK, "prompt": [2**70, -5]}).encode(),
    "a byte order mark": b"\xef\xbb\xbf{}",
    "UTF-16": json.dumps(ASK).encode("utf-16"),
}


async def test_hostile_bodies_are_refused_by_name_and_soon(tmp_path):
    """On both paths; most are 400, none takes long, none is a fault of ours."""
    async with besieged(tmp_path, http=DOOR) as siege:
        for what, body in HOSTILE_BODIES.items():
            for path in (PATH, "/v1/chat/completions", "/tokenize", "/detokenize"):
                if path != PATH:
                    body = body.replace(b'"prompt"', b'"messages"')
                async with asyncio.timeout(5):
                    answer = await said(siege.http, post(body, "Connection: close", path=path))
                allowed = {400, 404, 405, 422} | (
                    {200} if what in ("a key many times", "a lone surrogate", "a zero byte") else set()
                )
                assert set(statuses(answer)) <= allowed, (what, path, answer[:500])
                assert len(answer) < 3000, (what, len(answer))


async def test_wrong_methods_and_paths(tmp_path):
    async with besieged(tmp_path, http=DOOR) as siege:
        for method in ("GET", "PUT", "DELETE", "TRACE", "CONNECT", "OPTIONS", "PATCH", "HEAD", "PRI"):
            for path in (
                PATH,
                "/",
                "//",
                "/v1/../v1/models",
                "/%00",
                "/%ff",
                "/v1/models/%2e%2e/x",
                "*",
                "x:1",
                "http://x/version",
            ):
                answer = await said(
                    siege.http, f"{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{KEY}\r\n".encode()
                )
                assert not any(status >= 500 for status in statuses(answer)), (method, path, answer[:300])


CONNECTIONS = """
import resource, socket, sys
port, number = int(sys.argv[1]), int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
kept = []
for _ in range(number):
    client = socket.create_connection(("127.0.0.1", port), 20)
    client.send(b"POST /v1/completions HTTP/1.1\\r\\nHost: ")
    kept.append(client)
print("there", flush=True)
sys.stdin.read()
"""


async def test_ten_thousand_connections(tmp_path):
    """Those that ask nothing make room for others, so that a newcomer is always let in."""
    async with besieged(tmp_path, http=DOOR) as siege:
        crowd = await asyncio.create_subprocess_exec(
            sys.executable, "-c", CONNECTIONS, str(siege.http), "10000", stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert crowd.stdin is not None and crowd.stdout is not None
        async with asyncio.timeout(60):
            assert await crowd.stdout.readline() == b"there\n"
        await siege.good()
        crowd.stdin.close()
        await crowd.wait()


async def test_more_streams_than_may_be_are_refused_with_a_time(tmp_path):
    """Every connection is being served: a newcomer hears 503, whoever is connected goes on."""
    door, admission = replace(DOOR, stall_s=30.0), AdmissionConfig(max_running=20, max_waiting=200)
    async with besieged(tmp_path, http=door, admission=admission) as siege:
        hold = [worker.faults.hold for worker in siege.running.cluster.workers]
        streams = [await asyncio.open_connection("127.0.0.1", siege.http) for _ in range(99)]
        for event in hold:
            event.clear()
        for _, writer in streams:
            writer.write(post(STREAM))
            await writer.drain()
        async with asyncio.timeout(BOUND_S):
            while siege.running.router._admission.num_waiting < 80:  # the other user's too
                await asyncio.sleep(0.02)
        refused = await said(siege.http, post())
        assert statuses(refused) == [503], refused
        assert b"server_error" in refused
        for event in hold:
            event.set()
        for _, writer in streams:
            writer.transport.abort()
