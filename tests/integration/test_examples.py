"""The examples do what they say, against a real router; a stand-in for grpcurl does what the example's flags ask of it."""

import asyncio
import re
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.integration.router_harness import MODEL, router_config, running_router

EXAMPLES = Path(__file__).parents[2] / "examples"
GRPCURL = Path(__file__).parents[1] / "grpcurl.py"


@pytest.fixture
async def served(tmp_path):
    async with running_router(router_config(tmp_path)) as running:
        await running.cluster.pools(1, 1)
        running.cluster.step_s = 0.001
        yield running


async def output(*command: str, more: Mapping[str, str]) -> str:
    with_more = ["env", *(f"{name}={value}" for name, value in more.items()), *command]
    run = await asyncio.create_subprocess_exec(
        *with_more, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, cwd=EXAMPLES.parent
    )
    try:
        async with asyncio.timeout(60):
            out, err = await run.communicate()
    finally:
        if run.returncode is None:
            run.kill()
            await run.wait()
    assert run.returncode == 0, err.decode()
    return out.decode() + err.decode()


async def examples_say(served, url: str, options: tuple[str, ...] = (), environment: Mapping[str, str] | None = None):
    """Run every example at once, as its own words say, and look at what each prints."""
    environment = environment or {}
    python = [
        ("grpc_client.py", ("--address", served.target), the_grpc_client),
        ("grpc_asyncio.py", ("--address", served.target), the_asyncio_client),
        ("openai_client.py", ("--url", f"{url}/v1"), the_openai_client),
    ]
    runs = [
        (output(sys.executable, f"examples/{name}", *where, *options, more=environment), look)
        for name, where, look in python
    ]
    if shutil.which("curl") is not None:
        runs.append((output("bash", "examples/curl.sh", url, more=environment), curl))
    with tempfile.TemporaryDirectory() as folder:
        stand_in = Path(folder) / "grpcurl"
        stand_in.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{GRPCURL}" "$@"\n')
        stand_in.chmod(0o755)
        in_path = ["sh", "-c", 'PATH="$0:$PATH" exec bash examples/grpcurl.sh "$1"', folder, served.target]
        runs.append((output(*in_path, more=environment), grpcurl))
        async with asyncio.TaskGroup() as together:
            saying = [(together.create_task(run), look) for run, look in runs]
    for said, look in saying:
        look(said.result())
    await served.cluster.idle(timeout_s=3.0)


def the_grpc_client(said: str) -> None:
    assert f"served: {MODEL}" in said
    assert "[24 tokens" in said
    assert "[length]" in said
    assert "sampling.top_p: got 7" in said
    assert "DEADLINE_EXCEEDED" in said


def the_asyncio_client(said: str) -> None:
    assert all(f"{start}" in said for start in ("The sea is", "Rain in the morning"))
    assert re.search(r"left after \d+ tokens", said)


def the_openai_client(said: str) -> None:
    assert re.search(r"\[\d+ \+ 32 tokens\]", said)
    assert "best_of: " in said


def curl(said: str) -> None:
    assert f'"id":"{MODEL}"' in said
    assert "data: [DONE]" in said
    assert '"stages"' in said
    assert '"param":"temperature"' in said
    assert '"missing":[]' in said


def grpcurl(said: str) -> None:
    assert {"diptych.v1.Inference", "grpc.health.v1.Health"} <= set(said.splitlines())
    assert "token_ids = " in said, "the fields of a request"
    assert f'"name": "{MODEL}"' in said
    assert said.count("FINISH_REASON_LENGTH") == 2, "a text and a conversation"
    assert '"status": "SERVING"' in said
    assert "Code: INVALID_ARGUMENT" in said
    assert "google.rpc.BadRequest" in said
    assert "sampling.temperature" in said


async def test_every_example_says_what_it_should(served):
    await examples_say(served, served.url)


def test_every_example_is_in_the_readme():
    readme = (EXAMPLES / "README.md").read_text()
    files = {path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".sh")}
    assert files == set(re.findall(r"\]\((\w+\.\w+)\)", readme))
