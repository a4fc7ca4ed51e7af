"""One supervised process, with small scripts as children: real processes, real signals, readiness by a file."""

import asyncio
import os
import signal
import sys
from contextlib import asynccontextmanager

import psutil
import pytest

from cli.config import RestartPolicy
from cli.process import ProcessSpec, ProcessState, SupervisedProcess
from contracts.clock import MonotonicClock

QUICK = RestartPolicy(backoff_s=0.01, max_backoff_s=0.02, stable_s=60.0, max_deaths=3, start_timeout_s=20.0)
SERVE = "import pathlib, signal, sys; pathlib.Path(sys.argv[1]).touch(); signal.pause()"
STUBBORN = (
    "import pathlib, signal, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    "pathlib.Path(sys.argv[1]).touch(); [signal.pause() for _ in iter(int, 1)]"
)


RELUCTANT = """
import pathlib, signal, sys
asked = []
def on_signal(*_):
    asked.append(1)
    if len(asked) == 2:
        print("at once")
        sys.exit(0)
signal.signal(signal.SIGTERM, on_signal)
pathlib.Path(sys.argv[1]).touch()
while True:
    signal.pause()
"""


class Record:
    def __init__(self):
        self.states = []
        self.lines = []

    def changed(self, status):
        self.states.append(status.state)

    def line(self, name, text):
        self.lines.append((name, text))


@asynccontextmanager
async def supervised(tmp_path, script, policy=QUICK):
    ready = tmp_path / "ready"
    record = Record()

    async def probe():
        return ready.exists()

    spec = ProcessSpec("child-0", "stub", (sys.executable, "-c", script, str(ready)), "nowhere")
    process = SupervisedProcess(spec, probe, policy, MonotonicClock(), record)
    run = asyncio.create_task(process.run())
    try:
        yield process, record, ready
    finally:
        await process.stop(0.0)
        await run


async def until(condition, limit_s=20.0):
    async with asyncio.timeout(limit_s):
        while not condition():
            await asyncio.sleep(0.01)


async def test_it_becomes_ready_and_stops_on_sigterm(tmp_path):
    async with supervised(tmp_path, SERVE) as (process, record, _):
        status = await process.wait_settled()
        assert status.state is ProcessState.READY
        assert psutil.pid_exists(status.pid)
        await process.stop(10.0)
        assert not psutil.pid_exists(status.pid)
        assert record.states == [
            ProcessState.STARTING,
            ProcessState.READY,
            ProcessState.STOPPING,
            ProcessState.STOPPED,
        ]
        assert process.status.detail == ""


async def test_it_is_started_again_when_it_is_killed(tmp_path):
    async with supervised(tmp_path, SERVE) as (process, record, ready):
        first = await process.wait_settled()
        ready.unlink()
        os.kill(first.pid, signal.SIGKILL)
        await until(lambda: record.states.count(ProcessState.READY) == 2)
        assert process.status.pid != first.pid
        assert process.status.num_restarts == 1
        assert ProcessState.RESTARTING in record.states


async def test_it_gives_up_after_as_many_deaths_as_agreed_and_keeps_the_last_words(tmp_path):
    script = "import sys; print('one'); print('two', file=sys.stderr); sys.exit(7)"
    async with supervised(tmp_path, script) as (process, record, _):
        status = await process.wait_settled()
        assert status.state is ProcessState.DEAD
        assert record.states.count(ProcessState.STARTING) == QUICK.max_deaths
        assert sorted(status.last_lines) == ["one", "two"]
        assert "code 7" in status.detail
        assert not process.wrong_arguments


async def test_wrong_arguments_are_not_tried_again(tmp_path):
    script = "import sys; sys.exit(print('error: --port: no', file=sys.stderr) or 2)"
    async with supervised(tmp_path, script) as (process, record, _):
        status = await process.wait_settled()
        assert status.state is ProcessState.DEAD
        assert record.states.count(ProcessState.STARTING) == 1
        assert process.wrong_arguments
        assert status.detail == "--port: no"


async def test_one_that_ignores_sigterm_is_killed(tmp_path):
    async with supervised(tmp_path, STUBBORN) as (process, _, __):
        pid = (await process.wait_settled()).pid
        await process.stop(0.2, 0.2)
        assert not psutil.pid_exists(pid)
        assert "killed" in process.status.detail


async def test_one_that_takes_too_long_is_asked_again_before_it_is_killed(tmp_path):
    async with supervised(tmp_path, RELUCTANT) as (process, record, _):
        await process.wait_settled()
        await process.stop(0.2, 20.0)
        assert ("child-0", "at once") in record.lines
        assert process.status.state is ProcessState.STOPPED
        assert "hurried" in process.status.detail


async def test_a_start_that_takes_too_long_counts_as_a_death(tmp_path):
    policy = RestartPolicy(backoff_s=0.01, max_deaths=2, start_timeout_s=0.3)
    async with supervised(tmp_path, "import signal; signal.pause()", policy) as (process, record, _):
        status = await process.wait_settled()
        assert status.state is ProcessState.DEAD
        assert "not ready within 0.3 s" in status.detail
        assert record.states.count(ProcessState.STARTING) == 2


@pytest.mark.parametrize("moment", ["starting", "restarting"])
async def test_stop_at_any_moment_leaves_nothing(tmp_path, moment):
    slow = RestartPolicy(backoff_s=60.0, max_backoff_s=60.0)
    script = "import signal; signal.pause()" if moment == "starting" else "raise SystemExit(1)"
    async with supervised(tmp_path, script, slow) as (process, _, __):
        await until(lambda: process.status.state is ProcessState(moment))
        pid = process.status.pid
        async with asyncio.timeout(10.0):
            await process.stop(5.0)
        assert process.status.state is ProcessState.STOPPED
        assert pid is None or not psutil.pid_exists(pid)


async def test_long_and_unfinished_lines_come_through(tmp_path):
    script = "import sys; sys.stdout.write('x' * 100_000 + '\\n' + 'end'); sys.exit(7)"
    async with supervised(tmp_path, script) as (process, record, _):
        await process.wait_settled()
        assert ("child-0", "end") in record.lines
        assert sum(text.count("x") for _, text in record.lines) >= 8192
