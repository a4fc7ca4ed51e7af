"""Shows that something is being worked on: a spinner with the elapsed time on a terminal, lines elsewhere.

    with working("Fetching the model") as say:
        resolve_model(…, progress=say)

Everything goes to stderr, so that stdout stays the command's result. Does not know what is being done.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

PATIENCE_S = 1.0
TERSE_S = 2.0


@contextmanager
def working(what: str, console: Console | None = None) -> Iterator[Callable[[str], None]]:
    """Show `what` until the block ends; the callable that is handed out takes a word on how far it is."""
    console = console if console is not None else Console(stderr=True, highlight=False)
    if console.is_terminal:
        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        with Progress(*columns, console=console, transient=True) as progress:
            task = progress.add_task(escape(what))
            yield lambda text: progress.update(task, description=f"{escape(what)}: {escape(text)}")
        return
    say = Lines(what, console)
    try:
        yield say
        say.finish()
    finally:
        say.close()


class Lines:
    """The same for pipes and logs: a line once it takes a while, one every few seconds after that, one at the end.

    Owns a timer, which `close` stops; what is over at once leaves no line.
    """

    def __init__(self, what: str, console: Console) -> None:
        self._what = what
        self._console = console
        self._began = time.monotonic()
        self._timer = threading.Timer(PATIENCE_S, self._print, (f"{what} …",))
        self._timer.daemon = True
        self._quiet_until = 0.0
        self._timer.start()

    def __call__(self, text: str) -> None:
        """A word on how far it is."""
        self._timer.cancel()
        now = time.monotonic()
        if now >= self._quiet_until:
            self._quiet_until = now + TERSE_S
            self._print(f"{self._what}: {text}")

    def finish(self) -> None:
        """Say how long it took, if that was long enough to wonder."""
        took_s = time.monotonic() - self._began
        if took_s >= TERSE_S:
            self._print(f"{self._what}: done in {took_s:.1f} s")

    def close(self) -> None:
        """Nothing is said any more. Idempotent."""
        self._timer.cancel()

    def _print(self, text: str) -> None:
        self._console.print(escape(text), soft_wrap=True)
