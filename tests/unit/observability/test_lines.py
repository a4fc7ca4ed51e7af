"""A log that nobody reads costs lines, never time."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator

import pytest

from observability.lines import LineHandler


class Pipe:
    """A log into a pipe whose other end reads when it is told to."""

    def __init__(self, patience_s: float = 0.05) -> None:
        self.reader, self.writer = os.pipe()
        os.set_blocking(self.reader, False)
        self.logger = logging.Logger("piped")
        self.handler = LineHandler(self.writer, max_held=100, patience_s=patience_s)
        self.logger.addHandler(self.handler)

    def read(self) -> list[str]:
        """All that is there now."""
        found = b""
        while True:
            try:
                chunk = os.read(self.reader, 1 << 20)
            except BlockingIOError:
                return found.decode().splitlines()
            if not chunk:
                return found.decode().splitlines()
            found += chunk


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    pipe = Pipe()
    yield pipe
    for end in (pipe.reader, pipe.writer):
        os.close(end)


def test_lines_go_out_as_they_come(pipe: Pipe) -> None:
    pipe.logger.warning("one")
    pipe.logger.warning("zwei \u00fc")
    assert pipe.read() == ["one", "zwei \u00fc"]


def test_nobody_reads_and_nobody_waits(pipe: Pipe) -> None:
    """64 KiB fit the pipe, a hundred lines are held, of the rest only the number is kept."""
    total = 5000
    for i in range(total):
        pipe.logger.warning("%d %s", i, "x" * 90)
    seen = []
    for _ in range(4):  # the log goes on while it is read: what was held comes before what is new
        seen += pipe.read()
        pipe.handler.flush()
    seen += pipe.read()
    pipe.logger.warning("after")
    *old, loss, after = seen + pipe.read()
    assert after == "after"
    assert [int(line.split()[0]) for line in old] == list(range(len(old)))
    assert all(len(line) == len(f"{i} ") + 90 for i, line in enumerate(old))
    assert loss == f"{total - len(old)} lines of this log are lost: nobody read it"
    assert 100 < len(old) < total


def test_a_line_longer_than_the_pipe_does_not_wait_either(pipe: Pipe) -> None:
    pipe.logger.warning("y" * 300_000)
    seen = "".join(pipe.read())
    assert set(seen) == {"y"}
    for _ in range(10):
        pipe.handler.flush()
        seen += "".join(pipe.read())
    assert len(seen) == 300_000


def test_at_the_end_a_reader_that_reads_gets_what_is_left() -> None:
    pipe = Pipe(patience_s=60.0)
    for i in range(1000):
        pipe.logger.warning("%d %s", i, "x" * 90)
    seen: list[str] = []
    reading = threading.Thread(target=lambda: seen.extend(read_all(pipe.reader)))
    reading.start()
    pipe.handler.close()
    os.close(pipe.writer)
    reading.join()
    os.close(pipe.reader)
    assert seen[-1].endswith("lines of this log are lost: nobody read it")
    assert len(seen) > 700


def test_at_the_end_a_reader_that_stands_still_is_not_waited_for(pipe: Pipe) -> None:
    for i in range(1000):
        pipe.logger.warning("%d %s", i, "x" * 90)
    began = time.monotonic()
    pipe.handler.close()
    assert time.monotonic() - began < 5.0


def read_all(descriptor: int) -> list[str]:
    os.set_blocking(descriptor, True)
    found = b""
    while chunk := os.read(descriptor, 1 << 16):
        found += chunk
    return found.decode().splitlines()


def test_a_reader_that_has_gone_is_no_error() -> None:
    reader, writer = os.pipe()
    logger = logging.Logger("orphan")
    logger.addHandler(LineHandler(writer))
    os.close(reader)
    logger.warning("one")
    logger.warning("two")
    os.close(writer)
