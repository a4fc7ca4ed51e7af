"""Questions about the machine: cores, memory, what the shm connector needs, ports, caches, the environment.

Does not know what is installed.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import resource
import shutil
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import psutil

from cli.config import ENVIRONMENT, GIB, MIB, environment
from cli.doctor.finding import Finding, broken, ok, warning
from cli.ports import keep_port
from contracts.errors import ConfigError
from engine.models.store.config import default_cache_dir
from engine.placement.choice import written
from engine.placement.claims import CpuClaims, claims_folder
from engine.placement.topology import read_topology

USUAL_PORTS = (("--http-port", 8000), ("--grpc-port", 50051))
LEAST_MEMORY_BYTES = 2 * GIB
LEAST_DISK_BYTES = 1 * GIB
LEAST_FILES = 10_000


def check_cores() -> Iterator[Finding]:
    """Cores that we may use and who has some already, and thread settings that fight with --threads."""
    topology, present = read_topology(), os.cpu_count() or 1
    cores = topology.num_threads
    fact = f"{cores} usable" + (f" of {present} CPUs" if cores != present else "")
    fact += f" (a control group's time limit: {topology.quota:g})" if topology.quota is not None else ""
    fact += f", on memory nodes {written(topology.nodes)}" if len(topology.nodes) > 1 else ""
    held = _held_cpus()
    fact += f", kept by {', '.join(held)}" if held else ""
    if cores < 2:
        yield warning("cores", fact, "prefill and decode share one core; `diptych up --prefill 0` avoids that")
    else:
        yield ok("cores", fact)
    asked = environment().get("OMP_NUM_THREADS", "")
    if asked.isdecimal() and int(asked) > cores:
        yield warning("threads", f"OMP_NUM_THREADS={asked} on {cores} cores", "unset it, or set --threads")
    if environment().get("OMP_WAIT_POLICY", "").lower() == "active":
        yield warning("threads", "OMP_WAIT_POLICY=active: idle threads spin", "unset OMP_WAIT_POLICY")


def _held_cpus() -> list[str]:
    """Workers of this user that keep to CPUs, with these."""
    if not claims_folder().exists():
        return []
    holders: dict[str, list[int]] = {}
    for cpu, who in CpuClaims(claims_folder()).held().items():
        holders.setdefault(who, []).append(cpu)
    return [f"{who} ({written(tuple(cpus))})" for who, cpus in sorted(holders.items())]


def check_memory() -> Iterator[Finding]:
    """Free memory, and whether the process may lock and map enough."""
    memory = psutil.virtual_memory()
    fact = f"{memory.available / GIB:.1f} GiB available of {memory.total / GIB:.1f} GiB"
    if memory.available < LEAST_MEMORY_BYTES:
        yield warning("memory", fact, "two workers of the built-in model need about 2 GiB; lower --kv-memory")
    else:
        yield ok("memory", fact)


def check_shared_memory() -> Iterator[Finding]:
    """What the shm connector stands on: memfd, locks that belong to an open file, abstract sockets that carry them."""
    remedy = "use --connector tcp; shm needs Linux 3.17 or newer and a sandbox that allows memfd_create"
    try:
        fd = os.memfd_create("diptych-doctor", os.MFD_CLOEXEC)
    except (OSError, AttributeError) as error:
        yield broken("shm connector", f"memfd_create: {error}", remedy)
        return
    try:
        os.ftruncate(fd, mmap.PAGESIZE)
        mmap.mmap(fd, mmap.PAGESIZE).close()
        problem = _lock_problem(fd) or _socket_problem()
    except OSError as error:
        problem = str(error)
    finally:
        os.close(fd)
    if problem:
        yield broken("shm connector", problem, remedy)
    else:
        yield ok("shm connector", "memfd, open-file locks and abstract sockets work")


def _lock_problem(fd: int) -> str:
    """Whether a second open of the same memory sees the first one's lock, as the fencing of windows needs."""
    whole_first_byte = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0)
    second = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, whole_first_byte)
        try:
            fcntl.fcntl(second, fcntl.F_OFD_SETLK, whole_first_byte)
        except BlockingIOError:
            return ""
        return "open-file locks do not exclude each other"
    finally:
        os.close(second)


def _socket_problem() -> str:
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.bind(f"\0diptych-doctor-{os.getpid()}")
    except OSError as error:
        return f"abstract unix sockets: {error.strerror}"
    return ""


def check_files() -> Iterator[Finding]:
    """How many connections a router may have: each is an open file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    fact = f"{_count(soft)} now, {_count(hard)} at most; our processes raise the first to the second"
    if hard != resource.RLIM_INFINITY and hard < LEAST_FILES:
        yield warning("open files", fact, f"a router with many clients wants {LEAST_FILES}; raise `ulimit -Hn`")
    else:
        yield ok("open files", fact)


def _count(limit: int) -> str:
    return "any number" if limit == resource.RLIM_INFINITY else str(limit)


def check_ports() -> Iterator[Finding]:
    """Whether the ports that `up` takes by default are free."""
    for option, port in USUAL_PORTS:
        try:
            keep_port("127.0.0.1", port, option).release()
        except ConfigError as error:
            yield warning(f"port {port}", error.message, f"give `diptych up` another {option}, or 0")
        else:
            yield ok(f"port {port}", "free")


def check_model_cache() -> Iterator[Finding]:
    """Where models are kept, whether it can be written to, and room on its disk."""
    folder = default_cache_dir()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        yield warning("model cache", f"{folder} cannot be written to", "give --cache-dir a folder that can")
    elif free < LEAST_DISK_BYTES:
        yield warning("model cache", f"{folder}: {free / MIB:.0f} MiB free", "the built-in model needs 400 MiB")
    else:
        yield ok("model cache", f"{folder} (models: {_num_models(folder)}), {free / GIB:.0f} GiB free")


def _num_models(folder: Path) -> int:
    return sum(1 for _ in folder.glob("*/*/*/config.json")) if folder.is_dir() else 0


def check_environment() -> Iterator[Finding]:
    """Variables that change how things behave."""
    found = environment()
    for name, value in found.items():
        if name != "NO_PROXY":
            yield ok(f"${name}", f"{_without_password(value)} ({ENVIRONMENT[name]})")
    if "HTTP_PROXY" in found and "127.0.0.1" not in found.get("NO_PROXY", ""):
        yield warning("proxy", "HTTP_PROXY catches 127.0.0.1 as well", "export NO_PROXY=127.0.0.1,localhost")


def _without_password(value: str) -> str:
    """A proxy's address may carry a password, which is nobody's business."""
    scheme, separator, rest = value.partition("://")
    return f"{scheme}{separator}{rest.rpartition('@')[2]}" if separator else value


def check_cluster_secret() -> Iterator[Finding]:
    """Nothing of it is kept on a machine; what to know before processes are started by themselves."""
    yield ok(
        "cluster secret",
        "`diptych up` makes one; a router or worker started by itself authenticates no hand-off without --cluster-secret-file",
    )
