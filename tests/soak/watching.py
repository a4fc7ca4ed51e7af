"""What the operating system knows of the cluster's processes: memory, descriptors, abstract sockets, shared memory.

Linux only: it reads /proc. Does not know what is too much.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

GONE = (FileNotFoundError, ProcessLookupError, PermissionError)
MIB = 2**20
_PAGE = os.sysconf("SC_PAGE_SIZE")
_SOCKET = re.compile(r"socket:\[(\d+)\]")
_MEMFD = re.compile(r" (\d+) +/memfd:(diptych\S*)")


@dataclass(frozen=True, slots=True)
class Footprint:
    """One process at one time. `memfds` are inodes of our shared memory that it maps, `named` its abstract sockets' names,
    `shm_files` what it has open or mapped below /dev/shm.
    """

    rss_mib: float
    private_mib: float  # not shared with others, and not of a file
    fds: Counter[str]
    memfds: frozenset[int] = frozenset()
    named: frozenset[str] = frozenset()
    shm_files: frozenset[str] = frozenset()


@dataclass(slots=True)
class Seen:
    """Everything of ours that ever was, to be looked for when all should be gone."""

    pids: set[tuple[int, float]] = field(default_factory=set)
    named: set[str] = field(default_factory=set)
    shm_files: set[str] = field(default_factory=set)
    memfds: set[int] = field(default_factory=set)

    def note(self, pid: int, footprint: Footprint) -> None:
        """One more footprint of process `pid`."""
        with suppress(psutil.NoSuchProcess):
            self.pids.add((pid, psutil.Process(pid).create_time()))
        self.named |= footprint.named
        self.shm_files |= footprint.shm_files
        self.memfds |= footprint.memfds


def memory_of(pid: int) -> tuple[float, float] | None:
    """(resident, private) MiB of a process; None when it has gone."""
    try:
        _, resident, shared, *_ = Path(f"/proc/{pid}/statm").read_text().split()
    except GONE:
        return None
    return int(resident) * _PAGE / MIB, (int(resident) - int(shared)) * _PAGE / MIB


def footprint_of(pid: int) -> Footprint | None:
    """Everything; some milliseconds. None when it has gone."""
    memory = memory_of(pid)
    try:
        links = _links(f"/proc/{pid}/fd")
        maps = Path(f"/proc/{pid}/maps").read_text()
    except GONE:
        return None
    if memory is None:
        return None
    names = abstract_names()
    inodes = {int(m[1]) for link in links if (m := _SOCKET.match(link))}
    return Footprint(
        rss_mib=memory[0],
        private_mib=memory[1],
        fds=Counter(_kind(link) for link in links),
        memfds=frozenset(int(m[1]) for m in _MEMFD.finditer(maps)),
        named=frozenset(name for inode in inodes for name in names.get(inode, ())),
        shm_files=frozenset(re.findall(r"/dev/shm/\S+", "\n".join([maps, *links]))),
    )


def _links(folder: str) -> list[str]:
    """What each descriptor is; one that is closed while we look is none."""
    links = []
    for fd in os.listdir(folder):
        with suppress(FileNotFoundError):
            links.append(os.readlink(f"{folder}/{fd}"))
    return links


def _kind(link: str) -> str:
    if link.startswith("/memfd:"):
        return "memfd"
    return link.split(":")[0] if ":" in link else "file"


def abstract_names() -> dict[int, list[str]]:
    """Names of abstract Unix sockets of this network namespace by inode."""
    names: dict[int, list[str]] = {}
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        *front, path = line.split()
        if path.startswith("@"):
            names.setdefault(int(front[-1]), []).append(path)
    return names


def left_over(seen: Seen) -> list[str]:
    """What of `seen` is still there."""
    found = []
    for pid, created in sorted(seen.pids):
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            if process.create_time() == created and process.status() != psutil.STATUS_ZOMBIE:
                found.append(f"process {pid}")
    alive = {name for names in abstract_names().values() for name in names}
    found += [f"abstract socket {name}" for name in sorted(seen.named & alive)]
    found += [f"shared memory {name}" for name in sorted(seen.shm_files) if Path(name).exists()]
    mapped = frozenset[int]().union(*(_mapped(int(pid)) for pid in os.listdir("/proc") if pid.isdigit()))
    found += [f"shared memory segment, inode {inode}" for inode in sorted(seen.memfds & mapped)]
    return found


def _mapped(pid: int) -> frozenset[int]:
    try:
        maps = Path(f"/proc/{pid}/maps").read_text()
    except GONE:
        return frozenset()
    return frozenset(int(m[1]) for m in _MEMFD.finditer(maps))
