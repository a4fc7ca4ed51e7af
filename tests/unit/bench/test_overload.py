"""What an overloaded router answers is judged by what its clients saw; nothing is counted twice or left out."""

import asyncio
import contextlib

import pytest

from bench.overload import Capacity, Offered, OverloadBenchConfig, OverloadWorld, judged, overload_report
from bench.overload_client import OfferedAnswer, OfferedLoad, offer

GOOD = OfferedAnswer(1.0, 200, 0.2, 0.9, True)
WORLD = OverloadWorld("world", 4, 3, 2, 10.0)


def test_each_answer_is_one_thing():
    answers = [
        GOOD,
        OfferedAnswer(9.5, 200, 0.2, 0.9, True),  # good, and after the load
        OfferedAnswer(1.0, 200, 0.2, 2.5, True),  # whole, and too late
        OfferedAnswer(1.0, 200, 0.2, 1.9, False, error="request_timeout"),  # ended by a last event
        OfferedAnswer(1.0, 200, 0.2, 1.9, False, error="worker_lost"),
        OfferedAnswer(1.0, 200, 0.2, 1.9, False),  # broke off
        OfferedAnswer(1.0, 408, 2.0, 2.0, False),
        OfferedAnswer(1.0, 429, 0.1, 0.1, False, 3),
        OfferedAnswer(1.0, 429, 0.1, 0.1, False),  # nobody told it when to come back
        OfferedAnswer(1.0, 503, 0.1, 0.1, False),
        OfferedAnswer(1.0, 0, 0.1, 0.1, False),  # broke off
        OfferedAnswer(1.0, 0, 12.0, 12.0, False),
    ]
    run = judged(answers, timeout_s=2.0, duration_s=10.0)
    assert run.goodput == pytest.approx(0.1)
    assert (run.num_offered, run.num_refused, run.num_late, run.num_hung, run.num_unexplained) == (12, 2, 3, 1, 5)
    assert run.retry_after_s == (3,)


def test_the_bar_is_the_greatest_load_against_the_peak():
    config = OverloadBenchConfig(loads=(1.0, 3.0), rounds=3, worlds=(WORLD,))
    runs = {1.0: [_run(g) for g in (9.0, 10.0, 30.0)], 3.0: [_run(g) for g in (1.0, 8.5, 9.0)]}
    report = overload_report(config, {"world": Capacity(10.0, 1.0)}, {"world": runs})
    share, hung, unexplained = report.verdicts
    assert share.value == pytest.approx(0.85)
    assert not share.met
    assert hung.met and unexplained.met
    assert report.tables[0].rows[0][:5] == ("1", "30", "6", "3", "10.0")


def _run(goodput):
    return Offered(goodput, 10, 2, 1, 0, 0, (0.1, 0.2), (1, 4))


@contextlib.asynccontextmanager
async def server(answer):
    heard = []

    async def serve(reader, writer):
        head = await reader.readuntil(b"\r\n\r\n")
        heard.append(head)
        await answer(writer, len(heard))
        writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with listening:
        yield listening.sockets[0].getsockname()[1], heard


def load(port, **changes):
    sizes = {"port": port, "model": "m", "prompt_tokens": 3, "max_tokens": 2, "vocab_size": 100, "duration_s": 0.2}
    return OfferedLoad(**{**sizes, **changes})


async def test_an_open_loop_does_not_wait_for_answers():
    async def never(writer, number):
        await asyncio.sleep(0.6)

    async with server(never) as (port, heard):
        answers = await offer(load(port, rate=100.0, timeout_s=1.0))
        assert len(answers) == len(heard) > 5
        assert all(answer.status == 0 for answer in answers)
        assert b"X-Request-Timeout: 1\r\n" in heard[0]


async def test_answers_are_understood():
    async def answer(writer, number):
        refusal = b"HTTP/1.1 429 Too Many Requests\r\nretry-after: 7\r\n\r\n{}"
        stream = b'HTTP/1.1 200 OK\r\n\r\ndata: {"a": 1}\n\ndata: [DONE]\n\n'
        error = b'data: {"error": {"message": "\\"code\\": \\"x\\"", "type": "t", "code": "internal"}}'
        broken = b"HTTP/1.1 200 OK\r\n\r\n" + error + b"\n\ndata: [DONE]\n\n"
        writer.write((refusal, stream, broken)[number % 3])
        await writer.drain()

    async with server(answer) as (port, _):
        answers = await offer(load(port, concurrency=1))
    assert len(answers) >= 3
    assert [(a.status, a.whole, a.retry_after_s, a.error) for a in answers[:3]] == [
        (200, True, None, ""),
        (200, False, None, "internal"),
        (429, False, 7, ""),
    ]

    async with server(answer) as (port, heard):
        await offer(load(port, rate=30.0, timeout_s=1.0, says_time=False))
    assert heard and all(b"X-Request-Timeout" not in head for head in heard)
