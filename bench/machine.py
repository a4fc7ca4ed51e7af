"""What machine and which libraries the numbers are from, without anything that names the machine itself.

No host name, user or path is read: results are published. Does not know what is measured.
"""

from __future__ import annotations

import datetime
import platform
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
    load_average: float  # of the last minute, when the bench began: other work on the machine


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
        load_average=round(psutil.getloadavg()[0], 2),
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
