"""Questions about what is installed: Python, our packages, what they need, and whether names mean what we think.

Does not know the machine.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from cli.doctor.finding import Finding, broken, ok, warning

OUR_PACKAGES = (
    "contracts",
    "decode_service",
    "engine",
    "kernels",
    "kv_transfer",
    "observability",
    "prefill_service",
    "router",
    "rpc",
)
GENERATED = ("types", "inference", "prefill", "decode", "handoff", "registry")
LEAST_PYTHON = (3, 11)
_REQUIREMENT = re.compile(r"([A-Za-z0-9_.-]+)\s*(?:>=\s*([0-9.]+))?")


def check_python() -> Iterator[Finding]:
    """The interpreter's version."""
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info < LEAST_PYTHON:
        yield broken("python", f"{version} at {sys.executable}", "use Python 3.11 or newer")
    elif not sys.platform.startswith("linux"):
        yield warning("python", f"{version} on {sys.platform}", "only Linux is tested; shm and --exit-with need it")
    else:
        yield ok("python", f"{version} at {sys.executable}")


def check_packages() -> Iterator[Finding]:
    """Each of our package names leads into this installation, and no distribution called `kernels` is there."""
    root = Path(__file__).resolve().parents[2]
    strangers = []
    for name in OUR_PACKAGES:
        spec = importlib.util.find_spec(name)
        origin = Path(spec.origin).resolve() if spec is not None and spec.origin is not None else None
        if origin is None or origin != root / name / "__init__.py":
            strangers.append(f"{name} is {origin or 'not there'}")
    if strangers:
        remedy = f"each should be in {root}; look for folders of these names on PYTHONPATH and in the current folder"
        yield broken("our packages", "; ".join(strangers), remedy)
    else:
        yield ok("our packages", f"all in {root}")
    try:
        foreign = importlib.metadata.distribution("kernels")
    except importlib.metadata.PackageNotFoundError:
        yield ok("the name kernels", "no other distribution of this name is installed")
    else:
        fact = f"the distribution kernels {foreign.version} is installed; it and our package `kernels` hide each other"
        yield broken("the name kernels", fact, "pip uninstall kernels, then install diptych again")


def check_requirements() -> Iterator[Finding]:
    """What pyproject.toml asks for is installed and new enough."""
    try:
        wanted = importlib.metadata.requires("diptych") or []
    except importlib.metadata.PackageNotFoundError:
        yield broken("requirements", "the distribution diptych is not installed", "pip install -e . in its folder")
        return
    problems = []
    checked = 0
    for line in wanted:
        match = _REQUIREMENT.match(line)
        if match is None or "extra ==" in line:
            continue
        checked += 1
        problem = _missing_or_old(match.group(1), match.group(2) or "0")
        if problem:
            problems.append(problem)
    if problems:
        yield broken("requirements", "; ".join(problems), "pip install -c constraints.txt -e . in the project's folder")
    else:
        yield ok("requirements", f"all {checked} are installed")


def _missing_or_old(name: str, least: str) -> str:
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return f"{name} is missing"
    return f"{name} {version} is older than {least}" if _numbers(version) < _numbers(least) else ""


def _numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version; what follows (rc1, +cpu) does not matter here."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in match.group().split(".")) if match else ()


def check_generated_code() -> Iterator[Finding]:
    """The generated gRPC code runs on the installed grpc and protobuf, which must not be older than its generator."""
    versions = f"grpcio {importlib.metadata.version('grpcio')}, protobuf {importlib.metadata.version('protobuf')}"
    try:
        for name in GENERATED:
            importlib.import_module(f"contracts.pb.diptych.v1.{name}_pb2_grpc")
    except (RuntimeError, ImportError, TypeError) as error:
        # What their own version checks raise: grpc RuntimeError, protobuf VersionError or TypeError by version.
        reason = str(error).split("\n")[0]
        yield broken("generated code", f"{versions}: {reason}", "pip install -U grpcio protobuf, or `make proto`")
    else:
        yield ok("generated code", f"loads on {versions}")


def check_torch() -> Iterator[Finding]:
    """torch, its build and what this CPU can do with it."""
    try:
        torch = importlib.import_module("torch")
    except (ImportError, OSError) as error:
        yield broken("torch", f"cannot be imported: {error}", "pip install -c constraints.txt torch")
        return
    build = "CPU build" if torch.version.cuda is None else f"CUDA {torch.version.cuda} build"
    capability = torch.backends.cpu.get_cpu_capability()
    yield ok("torch", f"{torch.__version__} ({build}), {capability}, {torch.get_num_threads()} threads by default")
    if not torch.backends.mkldnn.is_available():
        yield warning("oneDNN", "torch was built without it", "use the official CPU build of torch; it is much faster")
    elif torch.ops.mkldnn._is_mkldnn_bf16_supported():
        yield ok("bfloat16", "this CPU computes it in hardware")
    else:
        remedy = "--dtype float32 is faster here; bfloat16 still halves the memory"
        yield warning("bfloat16", "this CPU has no AVX-512 BF16 or AMX; it is emulated", remedy)
