"""What the router's load asks is what a router takes, in each shape; what is said to be another each time is."""

import msgspec
import pytest

from bench.router import Found, RouterBenchConfig, router_report
from bench.router_load import Door, RouterPlan
from bench.router_requests import Asked, Manner, Shape, grpc_messages, http_requests, metadata
from contracts.pb.diptych.v1 import inference_pb2 as pb
from router.openai.schema import ChatBody, CompletionBody, parse


def asked(shape: Shape = Shape.TEXT, **manner) -> Asked:
    return Asked("h", "one two three", 8, Manner(shape, **manner))


def parts(request: bytes) -> tuple[list[str], bytes]:
    head, _, body = request.partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    assert f"Content-Length: {len(body)}" in lines
    return lines, body


@pytest.mark.parametrize("shape", Shape)
def test_each_shape_is_a_request_that_both_doors_take(shape):
    lines, body = parts(http_requests(asked(shape))(0))
    chat = shape is Shape.CHAT
    assert lines[0].split()[1] == ("/v1/chat/completions" if chat else "/v1/completions")
    read = parse(ChatBody if chat else CompletionBody, body)
    assert (read.max_tokens, read.stream, read.ignore_eos) == (8, True, True)
    message = pb.GenerateRequest.FromString(grpc_messages(asked(shape))(0))
    assert message.sampling.max_tokens == 8
    assert message.WhichOneof("input") == {Shape.IDS: "token_ids", Shape.CHAT: "chat"}.get(shape, "text")
    assert message.sampling.HasField("prompt_logprobs") == (shape is Shape.ECHO)
    if shape is Shape.IDS:
        assert list(message.token_ids.ids) == read.prompt == [300, 301, 302]


def test_varied_requests_are_all_different_and_some_are_refused_or_left():
    varied = asked(varied=True, api_key="k")
    bodies = [parts(http_requests(varied)(number)) for number in range(64)]
    assert len({body for _, body in bodies}) == len(set(map(grpc_messages(varied), range(64)))) == 64
    assert len({value for number in range(64) for name, value in metadata(varied, number) if name[0] == "x"}) == 128
    assert all("authorization: Bearer k" in lines for lines, _ in bodies)
    refused = [number for number in range(64) if varied.manner.refused(number)]
    left = [number for number in range(64) if varied.manner.left(number)]
    assert len(refused) == len(left) == 4
    for number, (_, body) in enumerate(bodies):
        read = parse(CompletionBody, body)
        assert (read.top_p == 7.0) == (number in refused)
        assert (read.max_tokens > 8) == (number in left)


def test_the_same_request_is_rendered_once():
    assert http_requests(asked())(0) is not http_requests(asked())(0)
    of = http_requests(asked())
    assert of(0) is of(1)


def test_a_plan_survives_its_way_to_the_clients_process():
    plan = RouterPlan(Door.SSE, "h", 1, "a", 3, 1, 1, manner=Manner(Shape.CHAT, True, "k", "/ca", 7))
    assert msgspec.json.decode(msgspec.json.encode(plan), type=RouterPlan) == plan


def test_what_has_no_bar_is_reported_beside_what_has_one():
    found = Found()
    found.shapes.ttft = {"sse, chat": [(0.003, 0.009, 0.002)]}
    found.shapes.gaps = {"sse streams alone": [(0.02, 0.021)]}
    report = router_report(found, RouterBenchConfig())
    assert report.verdicts == ()
    assert {m.name: m.runs for m in report.measures} == {
        "TTFT p50, sse, chat": (3.0,),
        "TTFT p99, sse, chat": (9.0,),
        "CPU per request, sse, chat": (2.0,),
        "gap p50, sse streams alone": (20.0,),
        "gap p99, sse streams alone": (21.0,),
    }
