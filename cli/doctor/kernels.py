"""Questions about our kernels: which would run each op here, built by what, and why not the best. Does not know models."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from cli.config import GIB
from cli.doctor.finding import Finding, broken, ok, warning
from contracts.errors import ConfigError
from kernels.cpu.config import compiler

if TYPE_CHECKING:
    import torch


def check_kernels() -> Iterator[Finding]:
    """One line for each dtype, op by op; builds the native library if that has not been done."""
    # Here, so that a broken torch is a finding of its own and not the end of the doctor.
    import torch

    from kernels.cpu.library import supported_isas
    from kernels.dispatch import candidates
    from kernels.interface import SUPPORTED_DTYPES

    isas = ", ".join(supported_isas()) or f"none of ours ({os.uname().machine})"
    yield ok("CPU kernels", f"this CPU runs {isas}; compiler: {compiler() or 'none'}")
    for dtype in SUPPORTED_DTYPES:
        subject = f"  {str(dtype).removeprefix('torch.')}"
        try:
            found = candidates("cpu", dtype)
        except ConfigError as error:
            yield broken(subject, error.message, "unset DIPTYCH_KERNELS, or give a C++ compiler")
            continue
        chosen = "; ".join(f"{', '.join(ops)}: {label}" for label, ops in _by_label(found.labels).items())
        yield ok(subject, chosen)
        for note in found.notes:
            yield warning(subject, note, "install g++, or set CXX; torch's kernels are slower")
    yield from _gpu(torch.float32)


def _gpu(dtype: torch.dtype) -> Iterator[Finding]:
    import torch

    from kernels.dispatch import candidates

    if not torch.cuda.is_available():
        yield ok("GPU", "none that torch sees; models run on the CPU")
        return
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        capability = f"sm_{properties.major}{properties.minor}"
        yield ok(f"GPU {index}", f"{properties.name}, {properties.total_memory / GIB:.0f} GiB, {capability}")
    try:
        found = candidates("cuda", dtype)
    except ConfigError as error:
        yield warning("  kernels", error.message, "pip install -c constraints.txt -e .[gpu], or run with --device cpu")
        return
    yield ok("  kernels", "; ".join(f"{', '.join(ops)}: {label}" for label, ops in _by_label(found.labels).items()))


def _by_label(labels: Mapping[str, str]) -> dict[str, list[str]]:
    grouped: dict[str, list[str]] = {}
    for op, label in labels.items():
        grouped.setdefault(label, []).append(op)
    return grouped
