"""What `diptych top` draws: latencies with the last minute as a line of blocks, the workers, requests by stage: the last, the
slowest and the failed.

Values in, renderables of rich out; keeps the last minute. Does not know where they come from.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from dashboard.frames import Frame, Limits, RequestRow, Snapshot, Spread, Window, WorkerRow

_MINUTE = 60
_BLOCKS = "▁▂▃▄▅▆▇█"
_NUM_REQUESTS = 24
_LINES_BESIDE = 18  # that are no worker and no request
_LEAST = 3
_STATES = {"ready": "green", "starting": "yellow", "draining": "yellow", "silent": "yellow"}
STAGES = {
    "receive": "grey42",
    "admission": "grey50",
    "tokenise": "grey58",
    "route": "grey66",
    "retry": "magenta",
    "prefill_queue": "dark_cyan",
    "prefill_compute": "cyan",
    "notify": "wheat4",
    "emit": "grey74",
    "unexplained": "red",
    "transfer": "orange3",
    "commit": "dark_orange3",
    "decode_queue": "medium_purple4",
    "first_step": "medium_purple",
    "relay": "steel_blue",
    "recover": "magenta",
    "second_unexplained": "red",
}


def sparkline(values: Sequence[float | None]) -> str:
    """One block a value, the highest is full; a space where there is none."""
    top = max((v for v in values if v is not None), default=0.0)
    if top <= 0:
        return "".join(" " if v is None else _BLOCKS[0] for v in values)
    return "".join(" " if v is None else _BLOCKS[round(v / top * (len(_BLOCKS) - 1))] for v in values)


def shown_ms(value: float | None) -> str:
    """Milliseconds, or seconds where there are many, as the page writes them; a dash for none."""
    if value is None:
        return "–"
    if value >= 1000:
        return f"{value / 1000:.2f} s"
    digits = 0 if value >= 100 or value == 0 else 1 if value >= 1 else 2
    return f"{value:.{digits}f} ms"


def plain(said: str) -> str:
    """What a router says, without what a terminal would obey; rich takes it as it is, brackets too."""
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in said)


@dataclass(frozen=True, slots=True)
class Room:
    """A terminal, in columns and lines, and what of a picture there is room for."""

    width: int = 120
    height: int = 50

    @property
    def narrow(self) -> bool:
        """Epochs and numbers of tokens are left out."""
        return self.width < 100

    @property
    def seconds(self) -> int:
        """In a line of blocks."""
        return max(10, min(_MINUTE, self.width - 56))

    @property
    def bar(self) -> int:
        """Columns of a request's stages."""
        return max(10, min(48, self.width - (64 if self.narrow else 80)))

    @property
    def num_others(self) -> int:
        """Of the slowest, and of the failed."""
        return 3 if self.height >= 38 else 1 if self.height >= 30 else 0


ROOM = Room()


class Screen:
    """Of one router."""

    def __init__(self) -> None:
        self._title = ""
        self._limits = Limits()
        self._look_s = 10
        self._windows: deque[Window] = deque(maxlen=_MINUTE)
        self._workers: tuple[WorkerRow, ...] = ()
        self._troubles: tuple[str, ...] = ()
        self._requests: deque[RequestRow] = deque(maxlen=_NUM_REQUESTS)
        self._slowest: tuple[RequestRow, ...] = ()
        self._failed: tuple[RequestRow, ...] = ()

    def take(self, said: Frame | Snapshot) -> None:
        """What came."""
        if isinstance(said, Snapshot):
            self._title = f"{said.model} · Diptych {said.version}"
            self._limits, self._look_s = said.limits, said.look_s
            self._windows = deque(said.windows, maxlen=_MINUTE)
            self._requests = deque(reversed(said.requests[:_NUM_REQUESTS]), maxlen=_NUM_REQUESTS)
            self._slowest, self._failed = said.slowest, said.failed
        else:
            self._windows.append(said.window)
            self._requests.extend(reversed(said.requests))
            self._slowest = self._slowest if said.slowest is None else said.slowest
            self._failed = self._failed if said.failed is None else said.failed
        self._workers, self._troubles = said.workers, said.troubles

    def draw(self, link: str = "live", room: Room = ROOM) -> RenderableType:
        """All of it, as of now; `link` says how the connection is. The last requests get the lines that are left."""
        title = (plain(self._title), "bold")
        head = Text.assemble(title, "  ", (plain(link), "green" if link == "live" else "yellow"))
        if self._troubles:
            head.append("\n" + plain(" · ".join(self._troubles))[: room.width], "red")
        slowest, failed = self._slowest[: room.num_others], self._failed[: room.num_others]
        left = (
            room.height - _LINES_BESIDE - max(1, len(self._workers)) - len(slowest) - len(failed) - bool(self._troubles)
        )
        recent = list(reversed(self._requests))[: max(_LEAST, left)]
        legend = _legend((*recent, *slowest, *failed), room)
        return Group(head, "", self._numbers(room), "", self._crew(room), legend, _lists(recent, slowest, failed, room))

    def _numbers(self, room: Room) -> Table:
        table = Table(box=None, pad_edge=False, header_style="dim")
        for name in ("", "p50", "p90", "p99", "limit"):
            table.add_column(name, justify="left" if not name else "right", no_wrap=True)
        drawn = list(self._windows)[-room.seconds :]
        table.add_column(f"p99 of the last {room.seconds} s", no_wrap=True)
        named: tuple[tuple[str, Callable[[Window], Spread | None], float | None], ...] = (
            ("first token", lambda w: w.ttft, self._limits.ttft),
            ("between tokens", lambda w: w.itl, self._limits.itl),
            ("hand-off", lambda w: w.handoff, self._limits.itl),  # a part of the gap to the second token
            ("unexplained", lambda w: w.unexplained, None),
            ("  before token 2", lambda w: w.second_unexplained, None),
        )
        last = self._windows[-1] if self._windows else Window(0.0)
        for name, of, limit in named:
            spread = of(last)
            p99 = None if spread is None else spread.p99
            over = p99 is not None and limit is not None and p99 > limit
            line = sparkline([None if (s := of(w)) is None else s.p99 for w in drawn])
            table.add_row(
                name,
                shown_ms(None if spread is None else spread.p50),
                shown_ms(None if spread is None else spread.p90),
                Text(shown_ms(p99), style="red" if over else ""),
                "" if limit is None else shown_ms(limit),
                Text(line, style="cyan"),
            )
        lately = list(self._windows)[-self._look_s :]
        seconds = max(1, len(lately))
        finished, good = sum(w.finished for w in lately), sum(w.good for w in lately)
        judged = finished - sum(w.excused for w in lately)
        table.add_row("tokens/s", f"{sum(w.tokens for w in lately) / seconds:.0f}", "", "", "", _line(drawn))
        kept = f"{good * 100 // judged}% within limits" if judged else "–"  # all is 100 %, and nothing less
        table.add_row(
            "requests/s",
            f"{finished / seconds:.1f}",
            "",
            "",
            "",
            f"{last.running} running, {last.waiting} waiting",
        )
        table.add_row("goodput/s", f"{good / seconds:.1f}", "", "", "", kept)
        return table

    def _crew(self, room: Room) -> Table:
        table = Table(box=None, pad_edge=False, header_style="dim")
        names = ["worker", "pool", "state", "KV", "run", "wait", "queue", "up", "connectors"]
        for name in names if room.narrow else (*names, "epoch"):
            table.add_column(
                name, justify="right" if name in ("KV", "run", "wait", "queue", "up") else "left", no_wrap=True
            )
        for worker in self._workers:
            table.add_row(
                Text(plain(worker.id)),
                Text(plain(worker.pool)),
                Text(plain(worker.state), style=_STATES.get(worker.state, "bold red")),
                f"{worker.kv:.0%}",
                f"{worker.running}/{worker.slots}" if worker.slots else str(worker.running),
                str(worker.waiting),
                f"{_short(worker.queued_tokens)} tok",
                _age(time.time() - worker.epoch / 1e3),
                Text(plain(", ".join(worker.connectors))),
                *([] if room.narrow else [str(worker.epoch)]),
            )
        if not self._workers:
            table.add_row("no worker")
        return table


def _legend(rows: Sequence[RequestRow], room: Room) -> Text:
    """Which stage has which colour, in the order of time: of those that took longest, as many as fit on a line."""
    spent: Counter[str] = Counter()
    for row in rows:
        spent.update(_times(row))
    names: list[str] = []
    left = room.width
    for stage, time_ms in spent.most_common():
        left -= len(_named(stage))
        if left < 0 or time_ms <= 0:
            break
        names.append(stage)
    parts = ((_named(stage), style) for stage, style in STAGES.items() if stage in names)
    return Text.assemble(*parts, no_wrap=True)


def _named(stage: str) -> str:
    return f"█ {stage.replace('second_unexplained', 'unexplained').replace('_', ' ')}  "


def _lists(
    recent: Sequence[RequestRow], slowest: Sequence[RequestRow], failed: Sequence[RequestRow], room: Room
) -> Table:
    """The last requests, then the others under their names; each list has a scale of its own."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    names = ["ended", "outcome", "TTFT", "to token 2", "workers"]
    for name in names if room.narrow else (*names, "tokens"):
        table.add_column(name, justify="right" if name in ("TTFT", "tokens") else "left", no_wrap=True)
    for title, rows in (("", recent), ("slowest", slowest), ("failed", failed)):
        if title and rows:
            table.add_row(Text(title, style="dim"))
        longest = max((_drawn_ms(row) for row in rows), default=0.0)
        for row in rows:
            table.add_row(*_cells(row, longest, room))
    return table


def _cells(row: RequestRow, longest: float, room: Room) -> tuple[RenderableType, ...]:
    return (
        time.strftime("%H:%M:%S", time.localtime(row.t)),
        Text(plain(row.outcome.lower()), style="green" if row.good else "yellow" if row.ok else "red"),
        shown_ms(row.ttft),
        _waterfall(row, longest, room.bar),
        Text(plain(" → ".join(filter(None, (row.prefill, row.decode))))),
        *([] if room.narrow else [f"{row.prompt_tokens} → {row.output_tokens}"]),
    )


def _times(row: RequestRow) -> dict[str, float]:
    times = {**row.stages, "unexplained": row.unexplained, "second_unexplained": row.second_unexplained}
    return {stage: max(0.0, time_ms) for stage, time_ms in times.items()}


def _drawn_ms(row: RequestRow) -> float:
    return sum(_times(row).values())


def _line(windows: Sequence[Window]) -> Text:
    return Text(sparkline([float(w.tokens) for w in windows]), style="medium_purple")


def _waterfall(row: RequestRow, longest: float, width: int) -> Text:
    """Its stages, each as wide as its share of the longest of those that are shown."""
    times = _times(row)
    text, at = Text(), 0.0
    for stage, style in STAGES.items():
        begun = _place(at, longest, width)
        at += times.get(stage, 0.0)
        text.append("█" * (_place(at, longest, width) - begun), style=style)
    text.append(" " * (width - len(text)))
    return text


def _place(at_ms: float, longest_ms: float, width: int) -> int:
    return min(width, round(at_ms / longest_ms * width)) if longest_ms else 0


def _short(number: int) -> str:
    return str(number) if number < 10_000 else f"{number / 1000:.0f}k"


def _age(seconds: float) -> str:
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{int(seconds // size)} {unit}"
    return f"{max(0, int(seconds))} s"
