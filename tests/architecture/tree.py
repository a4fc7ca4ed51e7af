"""The product's source tree as the architecture tests see it."""

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = (
    "bench",
    "cli",
    "contracts",
    "dashboard",
    "decode_service",
    "diptych_client",
    "engine",
    "kernels",
    "kv_transfer",
    "observability",
    "offline",
    "prefill_service",
    "registry",
    "router",
    "rpc",
    "worker",
)


@cache
def sources() -> tuple[Path, ...]:
    """Every product module, without generated code."""
    found = (path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    return tuple(sorted(p for p in found if "pb" not in p.relative_to(ROOT).parts))


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))
