"""What the environment says about the native library; the only place of `kernels` that reads it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from contracts.errors import ConfigError

# Best first. `scalar` is for proving the others and is chosen by name only; `torch` leaves the library alone.
ISAS = ("avx512bf16", "avx512", "avx2", "scalar")
TORCH = "torch"
ENVIRONMENT = {
    "DIPTYCH_KERNELS": f"which CPU kernels to use: {', '.join(ISAS)}, or torch for none of ours; unset: the best this CPU has",
    "CXX": "the C++ compiler that builds our CPU kernels; g++, c++ or clang++ on PATH when not set",
}


def asked_for() -> str | None:
    """$DIPTYCH_KERNELS: one of ISAS, "torch", or None. Raises ConfigError for another word."""
    word = os.environ.get("DIPTYCH_KERNELS") or None  # noqa: TID251
    if word is not None and word not in (*ISAS, TORCH):
        raise ConfigError(f"DIPTYCH_KERNELS: got {word!r}, known: {', '.join((*ISAS, TORCH))}")
    return word


def compiler() -> str | None:
    """The C++ compiler's path: $CXX, else what PATH has. None: there is none."""
    own = os.environ.get("CXX")  # noqa: TID251
    names = (own,) if own else ("g++", "c++", "clang++")
    return next((found for name in names if (found := shutil.which(name))), None)


def built_dir() -> Path:
    """Where built libraries are kept: $XDG_CACHE_HOME/diptych/kernels, else ~/.cache/diptych/kernels. Not created here."""
    parent = os.environ.get("XDG_CACHE_HOME")  # noqa: TID251
    return (Path(parent).expanduser() if parent else Path.home() / ".cache") / "diptych" / "kernels"
