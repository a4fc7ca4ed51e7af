"""The router's load client understands what comes, however it is cut; the report says what was found and nothing else."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.http2 import Http2Connection
from bench.load import LoadFailed
from bench.router import Carried, Found, RouterBenchConfig, gaps, prompt_of, router_report
from bench.router_load import Door, RouterAnswer, RouterPlan, Stream, _sse_answer

PLAN = RouterPlan(Door.SSE, "h", 1, "a prompt", 3, 1, 1)


class Wire(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.sent = b""

    def write(self, data) -> None:
        self.sent += data


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload


def message(data: bytes) -> bytes:
    return b"\0" + len(data).to_bytes(4, "big") + data


@settings(deadline=None)
@given(st.lists(st.binary(max_size=20), max_size=6), st.integers(1, 40))
def test_messages_are_read_however_the_bytes_are_cut(messages, cut):
    async def read() -> tuple[list[bytes], bytes]:
        wire, connection = Wire(), Http2Connection("h:1")
        connection.connection_made(wire)
        stream = connection.call("/s/m", b"ask")
        before = len(wire.sent)
        data = frame(4, 0, 0, b"") + frame(1, 4, 1, b"headers") + frame(6, 0, 0, b"pingpong")
        data += b"".join(frame(0, 0, 1, message(m)) for m in messages) + frame(1, 5, 1, b"trailers")
        for at in range(0, len(data), cut):
            assert not stream.ended.done()
            connection.data_received(data[at : at + cut])
        await stream.ended
        return stream.messages(), wire.sent[before:]

    got, said = asyncio.run(read())
    assert got == messages
    assert said == frame(4, 1, 0, b"") + frame(6, 1, 0, b"pingpong")  # acknowledged, as a peer wants


async def test_a_lost_connection_ends_its_streams():
    connection = Http2Connection("h:1")
    connection.connection_made(Wire())
    stream = connection.call("/s/m", b"ask")
    connection.connection_lost(None)
    with pytest.raises(Exception, match="closed"):
        await stream.ended


async def test_a_request_that_would_need_flow_control_is_refused():
    connection = Http2Connection("h:1")
    connection.connection_made(Wire())
    with pytest.raises(ValueError, match="flow control"):
        connection.call("/s/m", bytes(20_000))


async def sse(body: str, head: str = "HTTP/1.1 200 OK\r\n\r\n") -> RouterAnswer:
    stream = Stream(0.0, asyncio.get_running_loop().create_future())
    stream.arrivals_s, stream.parts = [1.0], [(head + body + "0\r\n\r\n").encode()]
    return _sse_answer(stream, PLAN)


async def test_an_sse_answer_counts_events_and_the_tokens_that_usage_says():
    events = (
        'data: {"choices":[1]}\n\n' * 2 + 'data: {"choices":[],"usage":{"completion_tokens":3}}\n\ndata: [DONE]\n\n'
    )
    answer = await sse(events)
    assert (answer.num_messages, answer.num_tokens, answer.ttft_s) == (2, 3, 1.0)


@pytest.mark.parametrize(
    ("body", "head"),
    [
        ('data: {"choices":[1]}\n\ndata: [DONE]\n\n', "HTTP/1.1 200 OK\r\n\r\n"),
        ('data: {"error":{"message":"gone"}}\n\ndata: [DONE]\n\n', "HTTP/1.1 200 OK\r\n\r\n"),
        ('{"error":{"message":"no"}}', "HTTP/1.1 429 Too Many Requests\r\n\r\n"),
        ('data: {"usage":{"completion_tokens":2}}\n\ndata: [DONE]\n\n', "HTTP/1.1 200 OK\r\n\r\n"),
    ],
)
async def test_a_bad_answer_stops_the_measurement(body, head):
    with pytest.raises(LoadFailed):
        await sse(body, head)


def test_gaps_are_between_what_came_of_one_answer():
    answers = (RouterAnswer(0.0, (1.0, 1.5, 3.0), 3, 3), RouterAnswer(0.0, (2.0,), 1, 1))
    assert gaps(answers) == [0.5, 1.5]


def test_a_prompt_has_the_words_asked_for():
    assert len(prompt_of(1234).split()) == 1234


def test_the_report_has_a_bar_for_each_part_that_was_measured():
    config, found = RouterBenchConfig(), Found()
    assert router_report(found, config).verdicts == ()
    run = Carried(16_000.0, 20_000.0, 1.5, 0.8, 0.02)
    for door in (Door.SSE, Door.GRPC):
        found.carried[door].append(run)
        found.ttft[door].append((0.003, 0.009))
        found.cpu_per_request_s[door].append(0.001)
    found.ttft[Door.DIRECT].append((0.0005, 0.001))
    found.rss_bytes = [100, *[101] * 9]
    found.gaps = {"alone": [(0.02, 0.021)], "beside long prompts": [(0.02, 0.051)]}
    found.long_per_s, found.long_ttft_s = [10.0], [0.1]
    verdicts = {v.name: v for v in router_report(found, config).verdicts}
    assert verdicts["streamed tokens, grpc"].met
    assert not verdicts["added to TTFT, p50, sse"].met
    assert verdicts["added to TTFT, p99, sse"].met
    assert verdicts["growth of memory"].value == 0.0  # from a fifth of the requests on
    assert not verdicts["added by long prompts to the gap's p99"].met
