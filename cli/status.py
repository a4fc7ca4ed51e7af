"""What the person in front of `diptych up` sees: one line a process, its log lines, its end.

On a terminal the processes stand in a table at the bottom that is redrawn in place and log lines scroll above it;
elsewhere each change is a line. Status goes to stdout, log lines to stderr. Does not know why a state changed.
"""

from __future__ import annotations

import time
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from cli.process import COMPLAINT, ProcessState, ProcessStatus

STYLES = {
    ProcessState.STARTING: "yellow",
    ProcessState.READY: "green",
    ProcessState.RESTARTING: "yellow",
    ProcessState.DEAD: "bold red",
    ProcessState.STOPPING: "yellow",
    ProcessState.STOPPED: "dim",
}


class ClusterDisplay(Protocol):
    """Shows a cluster; a context manager around its life. Also a ProcessListener."""

    def __enter__(self) -> ClusterDisplay:
        """Begin to draw."""
        ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave the last state standing."""
        ...

    def changed(self, status: ProcessStatus) -> None:
        """A process entered another state."""
        ...

    def line(self, name: str, text: str) -> None:
        """A process wrote a line."""
        ...

    def say(self, text: str) -> None:
        """One line of our own."""
        ...


def describe(status: ProcessStatus) -> str:
    """One line: name, state, where, process id, and what is known beside."""
    parts = [f"{status.name:<10} {status.state.value:<10} {status.address:<21}"]
    if status.pid is not None:
        parts.append(f"pid {status.pid}")
    if status.num_restarts:
        parts.append(f"restarts {status.num_restarts}")
    if status.detail:
        parts.append(f"({status.detail})")
    return "  ".join(parts)


class PlainDisplay:
    """Lines only: for pipes, files and service managers."""

    def __init__(self, out: Console, err: Console) -> None:
        self._out = out
        self._err = err

    def __enter__(self) -> Self:
        """Nothing to prepare."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing to put back."""

    def changed(self, status: ProcessStatus) -> None:
        """The process's line."""
        self.say(describe(status))
        _show_death(self._err, status)

    def line(self, name: str, text: str) -> None:
        """The line with its process's name before it."""
        _show_line(self._err, name, text)

    def say(self, text: str) -> None:
        """The text as it is."""
        self._out.print(Text(text), soft_wrap=True)


class LiveDisplay:
    """A table that is redrawn in place, for terminals."""

    def __init__(self, out: Console) -> None:
        self._out = out
        self._statuses: dict[str, ProcessStatus] = {}
        self._since: dict[str, float] = {}
        self._live = Live(console=out, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)

    def __enter__(self) -> Self:
        """Begin to draw."""
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave the last table standing."""
        self._live.stop()

    def changed(self, status: ProcessStatus) -> None:
        """Redraw the table."""
        self._statuses[status.name] = status
        self._since[status.name] = time.time()
        _show_death(self._out, status)
        self._live.update(self._table(), refresh=True)

    def line(self, name: str, text: str) -> None:
        """The line scrolls above the table."""
        _show_line(self._out, name, text)

    def say(self, text: str) -> None:
        """The text scrolls above the table."""
        self._out.print(Text(text), soft_wrap=True)

    def _table(self) -> Table:
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
        for column in ("process", "state", "since", "address", "pid", "restarts", ""):
            table.add_column(column, no_wrap=column != "")
        for name, status in self._statuses.items():
            since = time.strftime("%H:%M:%S", time.localtime(self._since[name]))
            table.add_row(
                name,
                Text(status.state.value, STYLES[status.state]),
                since,
                status.address,
                str(status.pid or "-"),
                str(status.num_restarts),
                status.detail,
            )
        return table


def _show_line(console: Console, name: str, text: str) -> None:
    if not text.startswith(COMPLAINT):  # the one line of a refused start; whoever ends because of it says it
        console.print(Text(f"{name:<10} | {text}"), soft_wrap=True)


def _show_death(console: Console, status: ProcessStatus) -> None:
    if status.state is not ProcessState.DEAD or not status.last_lines or status.last_lines[-1].startswith(COMPLAINT):
        return
    console.print(Text(f"{status.name} is dead: {status.detail}. Its last lines:", "bold red"), soft_wrap=True)
    for text in status.last_lines:
        console.print(Text(f"    {text}"), soft_wrap=True)


def make_display(*, plain: bool = False) -> PlainDisplay | LiveDisplay:
    """The table on a terminal, lines elsewhere or when `plain`."""
    out = Console(highlight=False)
    if out.is_terminal and not plain:
        return LiveDisplay(out)
    return PlainDisplay(out, Console(stderr=True, highlight=False))
