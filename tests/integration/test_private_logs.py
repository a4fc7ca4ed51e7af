"""What users send and are answered stands in no log of any process, at any level, whatever becomes of the request."""

import json
import logging
import os
import re
import signal
from pathlib import Path

import grpc
import httpx
import pytest

from contracts.pb.diptych.v1 import inference_pb2 as pb
from contracts.pb.diptych.v1 import inference_pb2_grpc, types_pb2
from observability.log import LineFormatter, render_value
from router.config import AccessConfig
from tests.chat_templates import template_of
from tests.integration.router_harness import MODEL, router_config, running_router
from tests.integration.test_up import STOP_S, TINY, until, up

MARKER = "ZAUNKOENIG4711"
IDS = [311, 97, 408, 215, 333, 96, 417, 208, 301, 99]
GOOD = {"max_tokens": 12, "seed": 5, "temperature": 0.7}

# Each repeats the marker somewhere: in a value, in a field's name, in a type that is wrong, in what is no JSON at all.
REFUSED = [
    ("/v1/completions", {"prompt": f"{MARKER} " * 4000}),
    ("/v1/completions", {"prompt": MARKER, "max_tokens": MARKER}),
    ("/v1/completions", {"prompt": MARKER, MARKER: 1}),
    ("/v1/completions", {"prompt": MARKER, "model": MARKER}),
    ("/v1/completions", {"prompt": {MARKER: MARKER}}),
    ("/v1/completions", {"prompt": MARKER, "stop": [MARKER * 200]}),
    ("/v1/completions", {"prompt": MARKER, "suffix": MARKER}),
    ("/v1/completions", {"prompt": MARKER, "logit_bias": {MARKER: 1}}),
    ("/v1/completions", {"prompt": [*IDS, 10**9]}),
    ("/v1/chat/completions", {"messages": [{"role": MARKER, "content": MARKER}]}),
    ("/v1/chat/completions", {"messages": MARKER}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": MARKER, "text": MARKER}]}]}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": MARKER}], "tools": [{"type": MARKER}]}),
    (f"/v1/{MARKER}", {}),
]

CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": json.dumps({"q": MARKER})}}
TOOL = {"type": "function", "function": {"name": MARKER, "description": MARKER, "parameters": {"type": "object"}}}
TALK = [
    {"role": "system", "content": MARKER},
    {"role": "user", "content": MARKER},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": MARKER},
]
# Answered or refused, as the model's template has it.
EITHER = [
    ("/v1/chat/completions", {"messages": TALK, "max_tokens": 4}),
    ("/v1/chat/completions", {"messages": TALK, "max_tokens": 4, "tools": [TOOL], "stream": True}),
    (
        "/v1/chat/completions",
        {"messages": TALK[:2], "max_tokens": 4, "chat_template": "{{ raise_exception('" + MARKER + "') }}"},
    ),
    ("/v1/chat/completions", {"messages": TALK[:2], "max_tokens": 4, "chat_template_kwargs": {MARKER: MARKER}}),
    ("/tokenize", {"messages": TALK, "tools": [TOOL]}),
    ("/tokenize", {"prompt": MARKER}),
    ("/detokenize", {"tokens": IDS}),
]


def ask_badly(http: httpx.Client) -> None:
    for path, body in REFUSED:
        response = http.post(path, json=body)
        assert 400 <= response.status_code < 500, (path, body, response.text)
    for raw in (
        f'{{"prompt": "{MARKER}',
        f"{MARKER}",
        f'{{"prompt": "{MARKER}\ud800"}}'.encode("utf-8", "surrogatepass"),
    ):
        headers = {"Content-Type": "application/json"}
        assert http.post("/v1/completions", content=raw, headers=headers).status_code == 400
    assert http.post("/v1/completions", content=MARKER, headers={"Content-Type": MARKER}).status_code == 415
    assert http.get(f"/v1/models/{MARKER}").status_code == 404


def ask_either(http: httpx.Client) -> None:
    """Tools, their calls and answers, templates of the request's own, and texts that are only counted."""
    statuses = [(path, http.post(path, json=body).status_code) for path, body in EITHER]
    assert all(200 <= status < 500 and status not in (401, 404) for _, status in statuses), statuses
    assert statuses[-2:] == [("/tokenize", 200), ("/detokenize", 200)]
    assert [status for _, status in statuses[:2]] == [200, 200], statuses
    assert 400 in [status for _, status in statuses[2:4]], "a template of the request's own refused it"


def ask_well(http: httpx.Client) -> list[str]:
    """The texts of the answers."""
    plain = http.post("/v1/completions", json={"prompt": f"{MARKER} is a truth", **GOOD}).json()
    ids = http.post("/v1/completions", json={"prompt": IDS, **GOOD}).json()
    with http.stream("POST", "/v1/completions", json={"prompt": MARKER, "stream": True, **GOOD}) as stream:
        events = [line.removeprefix("data: ") for line in stream.iter_lines() if line.startswith("data: {")]
    streamed = "".join(choice["text"] for event in events for choice in json.loads(event)["choices"])
    return [plain["choices"][0]["text"], ids["choices"][0]["text"], streamed]


def ask_over_grpc(address: str) -> None:
    with grpc.insecure_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        sampling = types_pb2.SamplingParams(max_tokens=8)
        assert list(stub.Generate(pb.GenerateRequest(text=MARKER, sampling=sampling), timeout=30))
        tools = pb.Chat(messages=[pb.ChatMessage(role="user", content=MARKER)], tools_json=[json.dumps(TOOL)])
        assert list(stub.Generate(pb.GenerateRequest(chat=tools, sampling=sampling), timeout=30))
        chat = pb.Chat(messages=[pb.ChatMessage(role=MARKER, content=MARKER)])
        for wrong in (
            pb.GenerateRequest(chat=chat),
            pb.GenerateRequest(text=MARKER, model=MARKER),
            pb.GenerateRequest(token_ids=pb.TokenIds(ids=[*IDS, 2**31])),
            pb.GenerateRequest(text=MARKER, stop=[MARKER * 200]),
        ):
            with pytest.raises(grpc.RpcError):
                list(stub.Generate(wrong, timeout=30))


def lose_a_worker(cluster, http: httpx.Client) -> None:
    """A decode worker dies in the middle of an answer, which ends as it may."""
    body = {"prompt": f"{MARKER} and so on", "max_tokens": 200, "stream": True, "ignore_eos": True}
    with http.stream("POST", "/v1/completions", json=body) as stream:
        lines = stream.iter_lines()
        next(line for line in lines if line.startswith("data: {"))
        os.kill(cluster.pid_of("decode-0"), signal.SIGKILL)
        for _ in lines:
            pass


def found_in(log: str, texts: list[str]) -> list[str]:
    """What of the requests stands in the log: the marker, ids that follow each other, words of an answer."""
    ids = re.compile(r"\D{1,3}".join(str(i) for i in IDS[:4]))
    words = [text for text in texts if len(text.strip()) > 12]
    assert words, "no answer is long enough to be looked for"
    return [*re.findall(f".*{MARKER}.*", log)[:5], *ids.findall(log), *(text for text in words if text.strip() in log)]


def with_tools(folder: Path) -> str:
    """The tiny model with a chat template that writes tools, calls and answers into the prompt."""
    folder.mkdir()
    for file in Path(TINY).iterdir():
        (folder / file.name).symlink_to(file.resolve())
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template_of("qwen2_5")}))
    return str(folder)


def test_no_log_has_what_users_send_or_are_answered(tmp_path):
    model = with_tools(tmp_path / "tiny-austen")
    with up(tmp_path, "--log-level", "debug", "--model", model, "--trust-request-chat-template") as cluster:
        with httpx.Client(base_url=cluster.facts["http"], trust_env=False, timeout=60) as http:
            texts = ask_well(http)
            ask_badly(http)
            ask_either(http)
            ask_over_grpc(cluster.facts["grpc"])
            lose_a_worker(cluster, http)
            until(lambda: "restarting" in cluster.log.read_text(), 10, "the death is seen")
        cluster.process.terminate()
        cluster.process.wait(STOP_S)
    log = cluster.log.read_text()
    assert log.count(" DEBUG ") > 0 and log.count("router.service request") > 5
    assert not found_in(log, texts)


async def test_it_is_logged_where_the_operator_asks_for_it(tmp_path, caplog):
    config = router_config(tmp_path, access=AccessConfig(log_prompts=True))
    with caplog.at_level(logging.INFO):
        async with running_router(config) as running:
            await running.cluster.pools(1, 1)
            body = {"model": MODEL, "prompt": MARKER, "max_tokens": 12, "seed": 3}
            answer = (await running.http.post("/v1/completions", json=body)).json()
    formatter = LineFormatter("router", private=False)
    log = "\n".join(formatter.format(record) for record in caplog.records)
    assert MARKER in log
    assert f"text={render_value(answer['choices'][0]['text'])}" in log


async def test_a_conversation_through_a_template_stands_in_no_log(tmp_path, caplog, capfd):
    """The template refuses tools' answers by an exception of its own, in a process of its own."""
    with caplog.at_level(logging.DEBUG):
        async with running_router(router_config(tmp_path)) as running:
            await running.cluster.pools(1, 1)
            for talk, status in ((TALK[:2], 200), (TALK, 400)):
                body = {"messages": talk, "max_tokens": 4}
                assert (await running.http.post("/v1/chat/completions", json=body)).status_code == status
    formatter = LineFormatter("router")
    log = "\n".join(formatter.format(record) for record in caplog.records)
    assert "outcome=" in log
    assert MARKER not in log + "".join(capfd.readouterr())
