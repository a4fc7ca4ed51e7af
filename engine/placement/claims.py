"""Which cores other processes of this user hold, by locks on files that end with the process, however it ends.

    with claims.turn():                    # one process looks and takes at a time
        claims.held() ─▶ {cpu: who}        claims.take(cpus, who)

A file a CPU, in a folder of the user's own under the temporary directory; who takes a CPU writes its name there and keeps the
file locked. Processes that see different temporary directories (containers) do not see each other's claims: there the control
group says who has which cores. Does not know why a CPU is taken.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock


def claims_folder() -> Path:
    """Where the processes of this user leave their claims."""
    return Path(tempfile.gettempdir()) / f"diptych-cpus-{os.getuid()}"


class CpuClaims:
    """Holds what it has taken until `close`, or the end of the process. Raises OSError where the folder cannot be used."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(mode=0o700, exist_ok=True)
        if folder.is_symlink() or folder.stat().st_uid != os.getuid():
            raise PermissionError(f"{folder} belongs to somebody else")
        self._folder = folder
        self._fds: dict[int, int] = {}

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Nobody else looks and takes meanwhile."""
        with FileLock(self._folder / "turn.lock"):
            yield

    def held(self) -> dict[int, str]:
        """CPUs that other holders have locked, and the names that they go by."""
        found = {}
        for path in self._folder.glob("cpu-*"):
            number = path.name.removeprefix("cpu-")
            if not number.isdecimal() or int(number) in self._fds:
                continue
            fd = self._open(int(number))
            try:
                fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                found[int(number)] = os.pread(fd, 256, 0).decode("utf-8", "replace") or "a process without a name"
            finally:
                os.close(fd)
        return found

    def take(self, cpus: Iterable[int], who: str) -> dict[int, str]:
        """Hold those of `cpus` that nobody holds; those that somebody does, with his name."""
        others = self.held()
        for cpu in cpus:
            if cpu in others or cpu in self._fds:
                continue
            fd = self._open(cpu)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                # Taken since we looked, by somebody who did not wait for his turn.
                os.close(fd)
                continue
            os.ftruncate(fd, 0)
            os.pwrite(fd, who.encode(), 0)
            self._fds[cpu] = fd
        return {cpu: others[cpu] for cpu in cpus if cpu in others}

    def close(self) -> None:
        """Let go of all. Idempotent."""
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()

    def _open(self, cpu: int) -> int:
        return os.open(self._folder / f"cpu-{cpu}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
