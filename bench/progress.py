"""How a long measurement tells what it is doing. Does not know what that is."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

Say = Callable[[str], None]


def say_on_stderr() -> Say:
    """Lines on stderr with the seconds since now."""
    begin = time.monotonic()

    def say(line: str) -> None:
        print(f"{time.monotonic() - begin:6.1f} s  {line}", file=sys.stderr, flush=True)

    return say
