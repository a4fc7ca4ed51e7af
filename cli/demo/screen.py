"""Shows several answers as they are written: a panel each on a terminal, whole lines with the question's number elsewhere.

While they grow, panels show the end of their text, so that all of them fit the terminal; at the end each stands in full.
Does not know where text comes from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from cli.demo.questions import Question

FRAME_LINES = 2
REFRESH_PER_S = 8
LINE_CHARS = 100


class PanelScreen:
    """For terminals. `writer(i)` is where the text of question i goes."""

    def __init__(self, questions: Sequence[Question], console: Console) -> None:
        self._questions = questions
        self._console = console
        self._texts = [""] * len(questions)
        self._live = Live(console=console, refresh_per_second=REFRESH_PER_S, transient=True, get_renderable=self._group)

    def __enter__(self) -> Self:
        """Begin to draw."""
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave every answer standing in full."""
        self._live.stop()
        for index, text in enumerate(self._texts):
            self._console.print(self._panel(index, text.rstrip()))

    def writer(self, index: int) -> Callable[[str], None]:
        """Appends to answer `index`."""

        def write(text: str) -> None:
            self._texts[index] += text

        return write

    def _group(self) -> Group:
        rows = max(1, self._console.height // len(self._questions) - FRAME_LINES)
        width = max(10, self._console.width - 4)
        panels = []
        for index, text in enumerate(self._texts):
            lines = Text(text.rstrip()).wrap(self._console, width)
            panels.append(self._panel(index, Text("\n").join(lines[-rows:])))
        return Group(*panels)

    def _panel(self, index: int, content: str | Text) -> Panel:
        question = self._questions[index]
        title = Text(f"{index + 1}  {question.title}", "bold")
        subtitle = Text(f"{question.protocol}, {question.sampling_words}", "dim")
        shown = content if isinstance(content, Text) else Text(content)
        return Panel(shown, title=title, subtitle=subtitle, title_align="left", subtitle_align="right")


class LineScreen:
    """For pipes and logs: text comes out in lines, each with the number of its question."""

    def __init__(self, questions: Sequence[Question], console: Console) -> None:
        self._console = console
        self._rest = [""] * len(questions)
        for index, question in enumerate(questions):
            self._say(index, f"? {question.title}  ({question.protocol}, {question.sampling_words})")

    def __enter__(self) -> Self:
        """Nothing to prepare."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Say what is left of unfinished lines."""
        for index, rest in enumerate(self._rest):
            if rest.strip():
                self._say(index, rest)

    def writer(self, index: int) -> Callable[[str], None]:
        """Appends to answer `index`."""

        def write(text: str) -> None:
            *lines, rest = (self._rest[index] + text).split("\n")
            while len(rest) > LINE_CHARS and " " in rest[:LINE_CHARS]:
                line, _, after = rest[:LINE_CHARS].rpartition(" ")
                lines.append(line)
                rest = after + rest[LINE_CHARS:]
            for line in lines:
                if line.strip():
                    self._say(index, line)
            self._rest[index] = rest

        return write

    def _say(self, index: int, text: str) -> None:
        self._console.print(Text(f"[{index + 1}] {text}"), soft_wrap=True)


def make_screen(questions: Sequence[Question], console: Console) -> PanelScreen | LineScreen:
    """Panels on a terminal that is high enough for one line of each, lines elsewhere."""
    if console.is_terminal and console.height >= len(questions) * (FRAME_LINES + 1):
        return PanelScreen(questions, console)
    return LineScreen(questions, console)
