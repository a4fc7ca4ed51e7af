"""The examples do what they say, against a real router; what cannot run everywhere is at least what the proto takes."""

import asyncio
import json
import re
import shutil
import sys
from pathlib import Path

import pytest
from google.protobuf import json_format

from contracts.pb.diptych.v1 import inference_pb2 as pb
from tests.integration.router_harness import MODEL, router_config, running_router

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
async def served(tmp_path):
    async with running_router(router_config(tmp_path)) as running:
        await running.cluster.pools(1, 1)
        running.cluster.step_s = 0.001
        yield running


async def output(*command: str) -> str:
    run = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, cwd=EXAMPLES.parent
    )
    async with asyncio.timeout(60):
        out, err = await run.communicate()
    assert run.returncode == 0, err.decode()
    return out.decode()


async def test_the_grpc_client(served):
    said = await output(sys.executable, "examples/grpc_client.py", "--address", served.target)
    assert f"served: {MODEL}" in said
    assert "[24 tokens" in said
    assert "[length]" in said
    assert "sampling.top_p: got 7" in said
    assert "DEADLINE_EXCEEDED" in said
    await served.cluster.idle(timeout_s=3.0)


async def test_the_asyncio_client(served):
    said = await output(sys.executable, "examples/grpc_asyncio.py", "--address", served.target)
    assert all(f"{start}" in said for start in ("The sea is", "Rain in the morning"))
    assert re.search(r"left after \d+ tokens", said)
    await served.cluster.idle(timeout_s=3.0)


async def test_the_openai_client(served):
    said = await output(sys.executable, "examples/openai_client.py", "--url", f"{served.url}/v1")
    assert re.search(r"\[\d+ \+ 32 tokens\]", said)
    assert "best_of: " in said


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
async def test_curl(served):
    said = await output("bash", str(EXAMPLES / "curl.sh"), served.url)
    assert f'"id":"{MODEL}"' in said
    assert "data: [DONE]" in said
    assert '"stages"' in said
    assert '"param":"temperature"' in said


def test_what_grpcurl_sends_is_what_the_proto_takes():
    script = (EXAMPLES / "grpcurl.sh").read_text().replace("\\\n", " ")
    calls = re.findall(r"-d '(\{.*?\})'\s+\"\$address\" diptych\.v1\.Inference/(\w+)", script)
    assert len(calls) == 3
    methods = pb.DESCRIPTOR.services_by_name["Inference"].methods_by_name
    for body, method in calls:
        json_format.ParseDict(json.loads(body), pb.GenerateRequest())
        assert methods[method].input_type.name == "GenerateRequest"
    assert set(re.findall(r"diptych\.v1\.Inference/(\w+)", script)) <= set(methods)
    assert pb.DESCRIPTOR.message_types_by_name["GenerateRequest"].full_name in script


def test_every_example_is_in_the_readme():
    readme = (EXAMPLES / "README.md").read_text()
    files = {path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".sh")}
    assert files == set(re.findall(r"\]\((\w+\.\w+)\)", readme))
