"""The client's options are the proto's fields: none is missing, none is made up, and none is set that was not given."""

import inspect

import pytest

from contracts.pb.diptych.v1 import inference_pb2 as pb
from contracts.pb.diptych.v1 import types_pb2
from diptych_client import AsyncClient, AsyncStream, Client, Options, Stream, build_request, system, user

INPUTS = {field.name for field in pb.GenerateRequest.DESCRIPTOR.oneofs_by_name["input"].fields}
VALUES = {
    "model": "m",
    "stop": ["\n", "END"],
    "request_id": "mine",
    "priority": -3,
    "route": pb.ROUTE_COLOCATED,
    "skip_special_tokens": False,
    "n": 2,
    "include_stop": True,
    "logit_bias": {7: -1.5},
    "stop_token_ids": [1, 2],
    "ignore_eos": True,
}


def value_of(name: str) -> object:
    return VALUES.get(name, 1)


def test_every_field_is_an_option_and_every_option_a_field():
    request = set(pb.GenerateRequest.DESCRIPTOR.fields_by_name) - INPUTS - {"sampling"}
    sampling = set(types_pb2.SamplingParams.DESCRIPTOR.fields_by_name)
    assert set(Options.__annotations__) == request | sampling


@pytest.mark.parametrize("name", sorted(Options.__annotations__))
def test_an_option_sets_its_field_and_no_other(name):
    request = build_request("text", **{name: value_of(name)})
    where = request.sampling if name in types_pb2.SamplingParams.DESCRIPTOR.fields_by_name else request
    got = getattr(where, name)
    assert (dict(got) if name == "logit_bias" else list(got) if isinstance(value_of(name), list) else got) == value_of(
        name
    )
    assert {f.name for f, _ in request.ListFields()} == {"text", "sampling", *({name} if where is request else ())}
    assert {f.name for f, _ in request.sampling.ListFields()} == (set() if where is request else {name})


def test_a_prompt_is_text_ids_or_a_conversation():
    assert build_request("").WhichOneof("input") == "text"
    assert list(build_request([3, 1, 2]).token_ids.ids) == [3, 1, 2]
    assert build_request([]).WhichOneof("input") == "token_ids"  # the server says what is wrong with it
    chat = build_request([system("be brief"), user("hello")]).chat
    assert [(turn.role, turn.content) for turn in chat.messages] == [("system", "be brief"), ("user", "hello")]
    assert build_request(chat).chat == chat


def test_an_unknown_option_and_a_wrong_type_are_said_at_once():
    with pytest.raises(TypeError, match="temprature is no option, did you mean temperature"):
        build_request("text", temprature=1)
    with pytest.raises(TypeError, match="max_token is no option, did you mean max_tokens"):
        build_request("text", max_token=1)
    for name in ("sampling", "text", "zzz"):
        with pytest.raises(TypeError, match=f"{name} is no option$"):
            build_request("text", **{name: 1})
    with pytest.raises(TypeError):
        build_request("text", max_tokens="many")
    with pytest.raises(ValueError, match="-1"):
        build_request("text", max_tokens=-1)


@pytest.mark.parametrize("pair", [(Client, AsyncClient), (Stream, AsyncStream)])
def test_both_clients_have_the_same_names(pair):
    names, signatures = [], []
    for kind in pair:
        members = {name: m for name, m in vars(kind).items() if not name.startswith("_") and inspect.isfunction(m)}
        names.append(set(members))
        signatures.append({name: list(inspect.signature(m).parameters) for name, m in members.items()})
    assert names[0] == names[1]
    assert signatures[0] == signatures[1]
