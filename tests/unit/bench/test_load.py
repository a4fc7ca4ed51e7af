"""The load client understands what it read: events across chunks, usage, errors; and asks for what the plan says."""

import asyncio
import itertools

import httpx
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.load import LoadAnswer, LoadFailed, LoadPlan, LoadRequest, Protocol, Route, carry_out, sse_answer
from bench.stats import TokenTimes


def event(text):
    return b'data: {"choices":[{"text":"%s"}]}\n\n' % text


USAGE = b'data: {"choices":[],"usage":{"completion_tokens":%d}}\n\n'
DONE = b"data: [DONE]\n\n"


def test_each_event_is_a_token_at_the_time_its_last_byte_came():
    chunks = [event(b"a"), event(b"b")[:9], event(b"b")[9:] + event(b"c"), USAGE % 3 + DONE]
    answer = sse_answer(0.0, [1.0, 2.0, 3.0, 4.0], chunks)
    assert answer.times == TokenTimes(0.0, (1.0, 3.0, 3.0), (1, 1, 1))
    assert answer.num_tokens == 3


def test_a_last_event_without_a_token_brings_none():
    answer = sse_answer(0.0, [1.0, 2.0, 3.0], [event(b"a"), event(b""), USAGE % 1 + DONE])
    assert answer.times.num_tokens == (1, 0)


def test_tokens_without_an_event_of_their_own_came_with_the_last():
    answer = sse_answer(0.0, [1.0, 2.0, 3.0], [event(b"a"), event(b"b"), USAGE % 5 + DONE])
    assert answer.times.num_tokens == (1, 4)
    assert answer.times.ttft_s == 1.0


@pytest.mark.parametrize(
    ("stream", "message"),
    [
        (b'data: {"error":{"message":"worker lost"}}\n\n', "worker lost"),
        (event(b"a") + DONE, "without usage"),
        (USAGE % 0 + DONE, "without tokens"),
    ],
)
def test_a_stream_that_failed_is_not_measured(stream, message):
    with pytest.raises(LoadFailed, match=message):
        sse_answer(0.0, [1.0], [stream])


@given(cuts=st.lists(st.integers(0, 200), max_size=6), newline=st.sampled_from([b"\n", b"\r\n"]))
def test_where_the_network_cuts_the_stream_does_not_matter(cuts, newline):
    whole = (b": keep-alive\n\n" + event(b"a") + event(b"b") + USAGE % 2 + DONE).replace(b"\n", newline)
    at = sorted({0, len(whole), *(cut % len(whole) for cut in cuts)})
    chunks = [whole[a:b] for a, b in itertools.pairwise(at)]
    answer = sse_answer(0.0, [1.0 + i for i in range(len(chunks))], chunks)
    assert answer.num_tokens == 2
    assert answer.times.num_tokens == (1, 1)


def test_plans_and_answers_survive_the_pipe():
    plan = LoadPlan(Protocol.SSE, "http://127.0.0.1:1", "m", 2, (LoadRequest((1, 2), 3, Route.COLOCATED),))
    assert msgspec.json.decode(msgspec.json.encode(plan), type=LoadPlan) == plan
    answer = LoadAnswer(TokenTimes(0.0, (1.0,), (1,)), 1, 0, Route.DISAGGREGATED)
    assert msgspec.json.decode(msgspec.json.encode(answer), type=LoadAnswer) == answer


async def served(requests, concurrency, most):
    """Carry out a plan against an ASGI server in this process that notes how many requests it has at once."""

    async def app(scope, receive, send):
        body = msgspec.json.decode((await receive())["body"])
        app.now += 1
        most.append(app.now)
        await asyncio.sleep(0)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        stream = event(b"x") * body["max_tokens"] + USAGE % body["max_tokens"] + DONE
        await send({"type": "http.response.body", "body": stream})
        app.now -= 1

    app.now = 0
    return await carry_out(LoadPlan(Protocol.SSE, "http://test", "m", concurrency, requests), httpx.ASGITransport(app))


async def test_a_closed_loop_keeps_at_most_so_many_in_flight_and_answers_in_order():
    most = []
    requests = tuple(LoadRequest((1,), 1 + i % 3) for i in range(10))
    answers = await served(requests, 4, most)
    assert [answer.num_tokens for answer in answers] == [request.max_tokens for request in requests]
    assert max(most) <= 4
    assert len(most) == 10


async def test_an_answer_that_went_another_way_than_asked_is_a_failure():
    with pytest.raises(LoadFailed, match="asked for the disaggregated way"):
        await served((LoadRequest((1,), 1, Route.DISAGGREGATED),), 1, [])
