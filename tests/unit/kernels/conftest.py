"""The native libraries that this machine can run, for tests that hold each of them to the same truth."""

from __future__ import annotations

import pytest

from kernels.cpu.build import built_library
from kernels.cpu.config import compiler
from kernels.cpu.library import Library, load, supported_isas

# What runs here; nothing where there is no compiler (there the torch path is all that there is, and tested as such).
ISAS = supported_isas() if compiler() else ()
# Built before any test, because building them takes a busy machine longer than a test may.
for _isa in ISAS:
    built_library(_isa)


@pytest.fixture(params=ISAS or [pytest.param("none", marks=pytest.mark.skip("no compiler, or not Linux"))])
def library(request: pytest.FixtureRequest) -> Library:
    return load(request.param)


@pytest.fixture
def libraries() -> list[Library]:
    """All of them, for tests that compare them with each other."""
    if not ISAS:
        pytest.skip("no compiler, or not Linux")
    return [load(isa) for isa in ISAS]
