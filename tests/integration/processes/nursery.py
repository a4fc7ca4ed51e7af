"""A process that has imported everything once and forks real worker and router processes from that: each is there at once.

    stdin  ◀── {"start": kind, "config": base64 pickle, "log": path}       one line of JSON each
    stdout ──▶ {"started": pid}      {"ended": pid, "code": exit code, negative for a signal}

A child runs what the `diptych` command runs, from the configuration on: log, end with the parent, event loop, exit code.
Started as a script, with nothing computed and no thread made before the forks: a fork of a process that has computed waits
for ever for OpenMP's threads, which it believes to have. Kills its children when stdin ends.
"""

from __future__ import annotations

import base64
import gc
import json
import os
import pickle
import select
import signal
import sys
import traceback
from types import ModuleType

import cli.commands.flags
import decode_service.main
import engine.execution.torch_runner
import engine.execution.warm_up
import engine.models.loader
import prefill_service.main
import router.main

_MAINS: dict[str, ModuleType] = {"prefill": prefill_service.main, "decode": decode_service.main, "router": router.main}
_PRELOADED = (engine.execution.torch_runner, engine.execution.warm_up, engine.models.loader)
_THREADS = len(os.listdir("/proc/self/task"))  # numpy has some, and ends them before a fork


def child(kind: str, config: object, log: str) -> int:
    """One process of the cluster, from its configuration to its exit code."""
    null = os.open(os.devnull, os.O_RDWR)
    written = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for fd, to in ((null, 0), (written, 1), (written, 2)):
        os.dup2(fd, to)
    serve = _MAINS[kind].serve
    return cli.commands.flags.run_service(kind, "info", os.getppid(), lambda: serve(config))


def say(word: dict[str, object]) -> None:
    """One line to whoever started the nursery."""
    sys.stdout.write(json.dumps(word) + "\n")
    sys.stdout.flush()


def start(order: dict[str, str], woken: tuple[int, int]) -> int:
    """Fork one child. Only the parent returns, with its id."""
    if (num_threads := len(os.listdir("/proc/self/task"))) > _THREADS:
        raise RuntimeError(f"{num_threads} threads, {_THREADS} after the imports: somebody has computed here")
    pid = os.fork()
    if pid:
        say({"started": pid})
        return pid
    code = 70
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for fd in woken:
            os.close(fd)
        code = child(order["start"], pickle.loads(base64.b64decode(order["config"])), order["log"])
    except BaseException:  # noqa: BLE001 - the child's last word; it must not go on as the parent
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def reap(children: set[int]) -> None:
    """Tell of every child that has ended."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        children.discard(pid)
        say({"ended": pid, "code": os.waitstatus_to_exitcode(status)})


def main() -> None:
    """Serve until stdin ends, then kill what still runs, or is stopped."""
    children: set[int] = set()
    woken = os.pipe()
    for fd in woken:
        os.set_blocking(fd, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(woken[1])
    gc.freeze()
    say({"ready": os.getpid()})
    rest = b""
    while True:
        ready, _, _ = select.select([0, woken[0]], [], [])
        if woken[0] in ready:
            os.read(woken[0], 4096)
            reap(children)
        if 0 in ready:
            read = os.read(0, 1 << 20)
            if not read:
                break
            *lines, rest = (rest + read).split(b"\n")
            for line in lines:
                children.add(start(json.loads(line), woken))
    for pid in children:
        os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
