"""The native library that processes here will want, built before any test: none of them may wait as long as building takes."""

from __future__ import annotations

from kernels.cpu.build import built_library
from kernels.cpu.config import TORCH, asked_for, compiler
from kernels.cpu.library import supported_isas


def build_native_library() -> None:
    """Called where tests that start processes are collected: no test's limit counts then. Quick when it is there."""
    asked = asked_for()
    wanted = (asked,) if asked else tuple(isa for isa in supported_isas() if isa != "scalar")
    if wanted and wanted[0] != TORCH and compiler():
        built_library(wanted[0])
