"""`python -m kernels.cpu build`: build the native library now, for this machine or, into the package, for any.

build            what this CPU runs best, into the user's cache: the first start need not wait for it
build --ship     every instruction set, into kernels/cpu/built: for images whose last stage has no compiler
show             what would be used, and why
"""

from __future__ import annotations

import argparse
import platform
import sys

from contracts.errors import ConfigError
from kernels.cpu.build import SHIPPED, built_library, ship
from kernels.cpu.config import ISAS, compiler


def main(arguments: list[str]) -> int:
    """0, or 2 when the library could not be built."""
    parser = argparse.ArgumentParser(prog="python -m kernels.cpu", description="the native CPU kernels")
    parser.add_argument("what", choices=("build", "show"))
    parser.add_argument("--ship", action="store_true", help=f"build all of {', '.join(ISAS)} into {SHIPPED}")
    parsed = parser.parse_args(arguments)
    try:
        for line in _shipped() if parsed.ship else _mine(parsed.what == "build"):
            sys.stdout.write(f"{line}\n")
    except ConfigError as error:
        sys.stderr.write(f"{error.message}\n")
        return 2
    return 0


def _shipped() -> list[str]:
    if platform.machine() != "x86_64":
        return [f"nothing to ship for {platform.machine()}: torch is used there"]
    return [str(ship(isa)) for isa in ISAS if isa != "scalar"]


def _mine(build: bool) -> list[str]:
    # Not for --ship: torch, which loads the library, is not needed to build it.
    from kernels.cpu.library import supported_isas

    isas = supported_isas()
    if not isas:
        return ["this machine runs none of our CPU kernels; torch is used"]
    if build:
        return [f"{isas[0]}: {built_library(isas[0])}"]
    return [f"this CPU runs: {', '.join(isas)}", f"compiler: {compiler() or 'none'}"]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
