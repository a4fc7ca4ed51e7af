"""Loads the native library and hands out its functions, typed by tables that stand beside each family of ops.

    FUNCTIONS = {"dt_silu_mul_bf16": (PTR, PTR, INT, INT, I32)}       in kernels/cpu/small.py
    call = load("avx2").bind(FUNCTIONS)["dt_silu_mul_bf16"]           → call(out, gate_up, rows, width, threads)

A call releases the GIL. Pointers are `tensor.data_ptr()`; shapes, dtypes and contiguity are the wrapper's to check.
The library's OpenMP is the one that torch has loaded already. Does not know ops.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TypeAlias

# Before our library is loaded: it brings the OpenMP library whose threads both use.
import torch

from kernels.cpu.build import BuildError, built_library
from kernels.cpu.config import ISAS

PTR, INT, I32, FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float
CType: TypeAlias = type[ctypes.c_void_p] | type[ctypes.c_int64] | type[ctypes.c_int32] | type[ctypes.c_float]
Functions: TypeAlias = Mapping[str, Sequence[CType]]
Function: TypeAlias = Callable[..., None]

# How a function's name ends that takes activations of a type.
SHORT = {torch.float32: "f32", torch.bfloat16: "bf16"}

# What /proc/cpuinfo must list for an instruction set.
_NEEDS = {
    "avx512bf16": frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512cd", "avx512_bf16", "avx512_vnni"}),
    "avx512": frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512cd"}),
    "avx2": frozenset({"avx2", "fma", "f16c", "bmi1", "bmi2"}),
    "scalar": frozenset[str](),
}


@dataclass(frozen=True)
class Library:
    """One loaded library; lives as long as the process."""

    isa: str
    path: Path
    handle: ctypes.CDLL

    def bind(self, functions: Functions) -> dict[str, Function]:
        """The named functions with their argument types; none returns anything."""
        bound: dict[str, Function] = {}
        for name, arguments in functions.items():
            function = self.handle[name]
            function.argtypes = list(arguments)
            function.restype = None
            bound[name] = function
        return bound


def supported_isas(cpuinfo: Path = Path("/proc/cpuinfo")) -> tuple[str, ...]:
    """Those of ISAS that this CPU runs, best first; none where the library is not at home (not Linux, not an x86)."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ()
    flags = {flag for line in lines if line.startswith("flags") for flag in line.partition(":")[2].split()}
    if not flags:
        return ()
    return tuple(isa for isa in ISAS if _NEEDS[isa] <= flags)


@cache
def load(isa: str) -> Library:
    """The library for `isa`, built if need be. Raises BuildError, which says why there is none."""
    if isa not in supported_isas():
        raise BuildError(f"this CPU ({platform.machine()}) does not run the {isa} kernels")
    path = built_library(isa)
    openmp = _openmp_library()
    try:
        # Our library names no OpenMP library: its symbols are found in the one made global here.
        ctypes.CDLL(openmp, mode=ctypes.RTLD_GLOBAL)
        return Library(isa, path, ctypes.CDLL(str(path)))
    except OSError as error:
        raise BuildError(f"{path}: cannot be loaded: {error}") from None


def mapped_openmp_libraries() -> tuple[str, ...]:
    """Paths of the GNU OpenMP libraries in this process; more than one would be more than one pool of threads."""
    with open("/proc/self/maps", encoding="utf-8") as maps:
        paths = {fields[5] for line in maps if len(fields := line.split(maxsplit=5)) == 6}
    return tuple(sorted(path.strip() for path in paths if Path(path.strip()).name.startswith("libgomp")))


def _openmp_library() -> str:
    found = mapped_openmp_libraries()
    if len(found) > 1:
        raise BuildError(f"two OpenMP libraries are loaded, with a pool of threads each: {', '.join(found)}")
    return found[0] if found else "libgomp.so.1"
