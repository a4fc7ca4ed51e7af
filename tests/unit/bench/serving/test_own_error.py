"""The benchmark's own error: what it measures of a server of known delays is within 2 ms of what that server really wrote.

Medians of many requests are compared: one that another process delayed says nothing about the tool.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from bench.serving.drive import LoadPlan, LoadRun, drive
from bench.serving.grpc_target import GrpcTarget
from bench.serving.measures import measure
from bench.serving.openai_target import OpenAIConfig, OpenAITarget
from bench.serving.requests import BenchRequest, Prompt, Target, Turn
from tests.unit.bench.serving import fake_server
from tests.unit.bench.serving.fake_server import FIRST_S, GAP_S

MOST_ERROR_S = 0.002
TOKENS = 6
REQUESTS = 40
ROOT = Path(__file__).parents[4]


@pytest.fixture
def server() -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", fake_server.__name__]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        yield process
        process.kill()


def target_of(protocol: str, port: int) -> Target:
    if protocol == "grpc":
        return GrpcTarget(f"127.0.0.1:{port}", model="fake")
    return OpenAITarget(OpenAIConfig(f"http://127.0.0.1:{port}", "fake", chat=protocol == "chat"))


@pytest.mark.parametrize("protocol", ["grpc", "completions", "chat"])
async def test_what_is_measured_is_what_was_written(protocol: str, server: subprocess.Popen[str]) -> None:
    assert server.stdout is not None and server.stdin is not None
    ports = json.loads(server.stdout.readline())
    noted = "grpc" if protocol == "grpc" else "openai"
    target = target_of(protocol, ports[noted])
    prompts: list[Prompt] = [(number, 301) for number in range(REQUESTS)]
    if protocol == "chat":
        prompts = [(Turn("user", f"{number} times"),) for number in range(REQUESTS)]
    requests = [BenchRequest(prompt, TOKENS, 2) for prompt in prompts]
    every_s = 0.02  # so that some are under way at once
    run = await drive(requests, LoadPlan(tuple(index * every_s for index in range(REQUESTS))), target)
    await target.close()
    server.stdin.close()
    notes = json.loads(server.stdout.readline())[noted]
    assert [outcome.error for outcome in run.outcomes] == [""] * REQUESTS
    check(run, [notes[str(number)] for number in range(REQUESTS)])


def check(run: LoadRun, written: list[list[float]]) -> None:
    arrived = [outcome.answered.arrivals_s for outcome in run.outcomes]
    due = [outcome.scheduled_s for outcome in run.outcomes]
    late = [got - wrote for pair in zip(arrived, written, strict=True) for got, wrote in zip(*pair, strict=True)]
    assert min(late) >= 0, "read before it was written"
    assert statistics.median(late) < MOST_ERROR_S

    true_ttft = [times[0] - at_s for times, at_s in zip(written, due, strict=True)]
    true_e2el = [times[-1] - at_s for times, at_s in zip(written, due, strict=True)]
    true_gaps = [later - earlier for times in written for earlier, later in pairwise(times)]
    true_tpot = [(times[-1] - times[0]) / (TOKENS - 1) for times in written]
    fields = measure(run)
    for name, true in (("ttft", true_ttft), ("e2el", true_e2el), ("itl", true_gaps), ("tpot", true_tpot)):
        measured_s = float(str(fields[f"median_{name}_ms"])) / 1e3
        assert abs(measured_s - statistics.median(true)) < MOST_ERROR_S, name
    assert min(true_ttft) >= FIRST_S and statistics.median(true_gaps) >= GAP_S * 0.9  # as slow as it was told to be
