"""What machine and which libraries the numbers are from, without anything that names the machine itself.

No host name, user or path is read: results are published. Does not know what is measured.
"""

from __future__ import annotations

import datetime
import platform
import time
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "asimd", "bf16")


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """Everything one needs to read a number rightly."""

    date: str  # UTC, to the minute
    cpu: str
    cpu_flags: tuple[str, ...]  # of CPU_FLAGS, those it has
    cores: int
    memory_gib: float
    system: str
    python: str
    libraries: dict[str, str]


@dataclass(frozen=True, slots=True)
class CpuSeconds:
    """CPU seconds up to one instant, of the whole machine and of this process with the children it has waited for."""

    at_s: float
    busy_s: float
    own_s: float


def cpu_seconds() -> CpuSeconds:
    """The counts now. Time that the hypervisor gave to others counts as busy."""
    every, own = psutil.cpu_times(), psutil.Process().cpu_times()
    not_busy = every.idle
    if psutil.LINUX:
        not_busy += every.iowait + every.guest + every.guest_nice  # guests' time is in user time, too
    own_s = own.user + own.system + own.children_user + own.children_system
    return CpuSeconds(time.monotonic(), sum(every) - not_busy, own_s)


def foreign_percent(begin: CpuSeconds, end: CpuSeconds, cores: int) -> float:
    """Per cent of all cores' time from `begin` to `end` that others than this process and its children took."""
    others_s = (end.busy_s - begin.busy_s) - (end.own_s - begin.own_s)
    cores_s = (end.at_s - begin.at_s) * cores
    return round(max(0.0, 100 * others_s / cores_s), 1) if cores_s > 0 else 0.0


def machine_facts() -> MachineFacts:
    """The facts now."""
    return MachineFacts(
        date=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        cpu=_cpuinfo("model name") or platform.processor() or platform.machine(),
        cpu_flags=tuple(flag for flag in CPU_FLAGS if flag in _cpuinfo("flags").split()),
        cores=psutil.cpu_count() or 1,
        memory_gib=round(psutil.virtual_memory().total / 2**30, 1),
        system=f"{platform.system()} {platform.machine()}",
        python=platform.python_version(),
        libraries={name: _version(name) for name in ("torch", "transformers", "grpcio", "uvicorn")},
    )


def _cpuinfo(key: str) -> str:
    path = Path("/proc/cpuinfo")
    if not path.exists():
        return ""
    for line in path.read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return ""


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
