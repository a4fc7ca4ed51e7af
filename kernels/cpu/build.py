"""Builds the native library for one instruction set, once per machine: compile every source in parallel, link, rename.

    shipped with the package?  kernels/cpu/built/<isa>-<sources>.so ──▶ used as it is, no compiler asked
    built here before?         <cache>/<isa>-<sources>-<compiler>.so ─▶ used
    neither                    file lock → g++ -c each src/*.cpp → link to a temporary name → rename

The name is a digest of contents, flags and compiler, so a stale library cannot be found, and whoever waits at the lock
finds what the other has built. Does not know what the sources do, nor what the CPU can run.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from logging import getLogger
from pathlib import Path

from filelock import FileLock

from contracts.errors import ConfigError
from kernels.cpu.config import ISAS, built_dir, compiler

_log = getLogger(__name__)
SOURCES = Path(__file__).parent / "src"
SHIPPED = Path(__file__).parent / "built"
# No contraction: a fused multiply-add stands where the source writes one, so that all compilers give the same bits.
_FLAGS = (
    "-std=c++17",
    "-O3",
    "-fno-math-errno",
    "-ffp-contract=off",
    "-fopenmp",
    "-fPIC",
    "-fvisibility=hidden",
)
_AVX2 = ("-mavx2", "-mfma", "-mf16c", "-mbmi", "-mbmi2")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512cd", "-mprefer-vector-width=512")
_ISA_FLAGS = {
    "avx512bf16": (*_AVX512, "-mavx512bf16", "-mavx512vnni", "-DDT_AVX512", "-DDT_BF16"),
    "avx512": (*_AVX512, "-DDT_AVX512"),
    "avx2": (*_AVX2, "-DDT_AVX2"),
    "scalar": (),
}


class BuildError(ConfigError):
    """The library cannot be built here; says why."""


def built_library(isa: str) -> Path:
    """The library for `isa` (one of ISAS), built if need be. Raises BuildError: no compiler, or what it complained about."""
    shipped = SHIPPED / f"{isa}-{_sources_digest(isa)}.so"
    if shipped.exists():
        return shipped
    path = compiler()
    if path is None:
        raise BuildError("no C++ compiler: none of g++, c++, clang++ is on PATH, and CXX names none")
    target = built_dir() / f"{isa}-{_sources_digest(isa)}-{_digest(_version(path))}.so"
    if not target.exists():
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(target.with_suffix(".lock")):
                if not target.exists():
                    build(isa, target, path)
        except OSError as error:
            raise BuildError(f"{target.parent}: {error.strerror or error}") from None
    return target


def build(isa: str, target: Path, path: str) -> None:
    """Compile and link for `isa` with the compiler at `path` into `target`, which appears whole or not at all."""
    begun = time.monotonic()
    # Said before, too: until it is done nothing else can be, and a worker waits for it.
    _log.info("building the %s kernels with %s, once for this machine: some seconds", isa, path)
    flags = (*_FLAGS, *_ISA_FLAGS[isa])
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".building-") as folder:
        # What is compiled is what was counted: whoever edits a source meanwhile would get it under the old name.
        copied = Path(folder, "src")
        shutil.copytree(SOURCES, copied)
        if _contents_digest(isa, copied) != _sources_digest(isa):
            raise BuildError(f"{SOURCES}: changed while this process ran; start it again")
        sources = sorted(copied.glob("*.cpp"))
        objects = [Path(folder, f"{source.stem}.o") for source in sources]
        commands = [(path, *flags, "-c", str(s), "-o", str(o)) for s, o in zip(sources, objects, strict=True)]
        with ThreadPoolExecutor(max(2, len(os.sched_getaffinity(0)))) as pool:
            list(pool.map(_run, commands))
        unfinished = Path(folder, target.name)
        # Linked without an OpenMP library: torch has loaded one, and a second would be a second pool of threads.
        _run((path, "-shared", *(str(o) for o in objects), "-o", str(unfinished)))
        unfinished.replace(target)
    _log.info("built the %s kernels in %.1f s with %s: %s", isa, time.monotonic() - begun, path, target)


def ship(isa: str) -> Path:
    """Build into the package itself, for machines that have no compiler. Returns the library's path."""
    path = compiler()
    if path is None:
        raise BuildError("no C++ compiler: none of g++, c++, clang++ is on PATH, and CXX names none")
    SHIPPED.mkdir(exist_ok=True)
    target = SHIPPED / f"{isa}-{_sources_digest(isa)}.so"
    build(isa, target, path)
    return target


def _run(command: tuple[str, ...]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildError(f"{' '.join(command)}: exit status {done.returncode}\n{done.stderr[-2000:]}")


@cache
def _sources_digest(isa: str) -> str:
    """Of all sources and flags: another digest, another library."""
    assert isa in ISAS, isa
    return _contents_digest(isa, SOURCES)


def _contents_digest(isa: str, folder: Path) -> str:
    parts = [f"{file.name}\0{file.read_text(encoding='utf-8')}" for file in sorted(folder.iterdir()) if file.is_file()]
    return _digest("\0".join((*_FLAGS, *_ISA_FLAGS[isa], *parts)))


@cache
def _version(path: str) -> str:
    done = subprocess.run((path, "--version"), capture_output=True, text=True, check=False)
    return f"{path}\n{done.stdout}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
