"""Signals, bounds, exit codes and the metrics port of a worker process."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading

import pytest

from contracts.errors import ConfigError
from rpc.process import FatalError, StopSignals, in_daemon_thread, run_process


async def test_the_first_signal_asks_and_the_second_hurries() -> None:
    async with StopSignals() as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(signals.wait(), 5)
        drain = asyncio.create_task(signals.bounded(_for_ever(), 60, "drain"))
        os.kill(os.getpid(), signal.SIGINT)
        assert await asyncio.wait_for(drain, 5) is False


async def test_work_that_ends_in_time_or_fails_says_so() -> None:
    async with StopSignals() as signals:
        assert await signals.bounded(asyncio.sleep(0), 60, "nothing") is True
        with pytest.raises(ValueError, match="inside"):
            await signals.bounded(_raise(ValueError("inside")), 60, "failing")
        assert await signals.bounded(_for_ever(), 0, "never") is False


async def test_work_that_a_signal_overtakes_is_none() -> None:
    async with StopSignals() as signals:
        assert await signals.unless_asked(in_daemon_thread(lambda: 5, "five")) == 5
        with pytest.raises(ConfigError):
            await signals.unless_asked(in_daemon_thread(lambda: _refuse(), "refuse"))
        block = threading.Event()
        os.kill(os.getpid(), signal.SIGTERM)
        assert await signals.unless_asked(in_daemon_thread(block.wait, "slow")) is None
        block.set()


def _refuse() -> None:
    raise ConfigError("no")


async def _for_ever() -> None:
    await asyncio.Event().wait()


async def _raise(error: Exception) -> None:
    raise error


def test_exit_codes(capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    async def main(error: Exception | None) -> None:
        if error is not None:
            raise error

    assert run_process(lambda: main(None)) == 0
    assert run_process(lambda: main(FatalError("engine died"))) == 1
    assert run_process(lambda: main(ConfigError("cannot listen on h:1"))) == 2
    assert capsys.readouterr().err == "error: cannot listen on h:1\n"
    assert "fatal" in caplog.text


def test_ends_with_its_parent() -> None:
    """A grandchild whose parent ends is told to stop, whether that happens before or after it asked for it."""
    child = (
        "import subprocess, sys, os\n"
        "code = 'import os, signal, sys; from rpc.process import end_with_parent;'"
        " 'print(os.getpid(), flush=True); end_with_parent(int(sys.argv[1])); signal.pause()'\n"
        "p = subprocess.Popen([sys.executable, '-c', code, str(os.getpid())], stdout=subprocess.PIPE)\n"
        "print(p.stdout.readline().decode().strip(), flush=True)\n"
    )
    done = subprocess.run([sys.executable, "-c", child], capture_output=True, text=True, timeout=60, check=True)
    grandchild = int(done.stdout)
    deadline = os.times().elapsed + 20
    while _alive(grandchild):
        assert os.times().elapsed < deadline, "the grandchild outlived its parent"


def _alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] not in ("Z", "X")
    except (FileNotFoundError, ProcessLookupError):
        return False
