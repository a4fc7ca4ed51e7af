"""What was checked, how it came out and how long it took; printed as it happens and as a table at the end."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


class NotSo(Exception):
    """A check that did not hold, in words."""


@dataclass
class Line:
    """One check. `said` is what was measured, or what was wrong."""

    name: str
    good: bool = True
    took_s: float = 0.0
    said: str = ""


@dataclass
class Journal:
    """All checks of a run. One that fails does not keep the next ones from being made."""

    lines: list[Line] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)

    @contextmanager
    def check(self, name: str) -> Iterator[Line]:
        """One check: what is raised in it is its failure. Put what was measured into `said`."""
        line, began = Line(name), time.monotonic()
        try:
            yield line
        except (NotSo, AssertionError, TimeoutError, OSError) as error:
            line.good, line.said = False, f"{line.said} {type(error).__name__}: {error}".strip()
        finally:
            line.took_s = time.monotonic() - began
            self.lines.append(line)
            self.say(f"{'ok  ' if line.good else 'FAIL'} {name} ({line.took_s:.1f} s) {line.said}")

    def say(self, words: str) -> None:
        """One line on the screen, with the time since the begin."""
        print(f"[{time.monotonic() - self.began:4.0f}s] {words}", flush=True)

    @property
    def num_bad(self) -> int:
        """Checks that did not hold."""
        return sum(not line.good for line in self.lines)

    def table(self) -> str:
        """Markdown."""
        rows = [f"| {'ok' if x.good else 'FAIL'} | {x.name} | {x.took_s:.1f} | {x.said} |" for x in self.lines]
        return "\n".join(["| | check | s | measured |", "|---|---|---|---|", *rows])
