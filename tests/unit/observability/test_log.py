"""One event is one line, whatever is in it."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator

import pytest

from observability.log import LineFormatter, configure_logging, get_logger, render_value


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    stream = io.StringIO()
    configure_logging("prefill-0", "info", stream)
    yield stream
    root.handlers[:] = before
    root.setLevel(level)


def test_a_line_has_time_level_service_logger_event_and_facts(lines: io.StringIO) -> None:
    get_logger("a.b").info("handed off", handoff_id="h-1", kv_bytes=4096, share=0.25, why="two words")
    stamp, _, rest = lines.getvalue().partition(" ")
    assert len(stamp) == len("2026-01-01T00:00:00.000Z")
    assert rest == 'INFO prefill-0 a.b handed off handoff_id=h-1 kv_bytes=4096 share=0.25 why="two words"\n'


def test_tracebacks_and_line_ends_stay_on_the_line(lines: io.StringIO) -> None:
    try:
        raise ValueError("a\nb")
    except ValueError as error:
        get_logger("x").error("bad\nthing", error)
    assert lines.getvalue().count("\n") == 1
    assert "ValueError" in lines.getvalue()


def test_what_would_command_a_terminal_is_spelt_out() -> None:
    # Formatted here, not logged: half a surrogate pair is more than some test reporters can carry.
    record = logging.makeLogRecord({"name": "x", "msg": "hand-off %s é", "args": ("a\x00\x1b[2J\u2028\ud800",)})
    line = LineFormatter("prefill-0").format(record)
    assert line.endswith(r"hand-off a\x00\x1b[2J\u2028\ud800 é")


def test_below_the_level_nothing_is_written(lines: io.StringIO) -> None:
    get_logger("x").debug("quiet")
    assert lines.getvalue() == ""


def test_what_a_library_says_of_each_of_its_requests_is_for_debugging(lines: io.StringIO) -> None:
    of_request = logging.getLogger("httpx")
    of_request.info("HTTP Request: GET")
    of_request.warning("odd")
    assert lines.getvalue().count("\n") == 1
    configure_logging("x", "debug", lines)
    of_request.info("HTTP Request: GET")
    configure_logging("x", "error", lines)
    of_request.warning("odd")
    assert lines.getvalue().count("\n") == 2


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(ValueError, match="loud"):
        configure_logging("x", "loud")


@pytest.mark.parametrize(
    ("value", "shown"),
    [("", '""'), ('q"', '"q\\""'), (None, "None"), (True, "True"), (1e-9, "1e-09"), ("é", '"\\u00e9"')],
)
def test_values(value: str | float | bool | None, shown: str) -> None:
    assert render_value(value) == shown


def test_each_line_has_the_time_of_its_own_event() -> None:
    formatter = LineFormatter("s")
    stamps = []
    for created in (0.25, 0.75, 86_399.5, 0.5):
        record = logging.LogRecord("x", logging.INFO, "f", 1, "event", (), None)
        record.created, record.msecs = created, created % 1 * 1e3
        stamps.append(formatter.format(record).split()[0])
    day = "1970-01-01T"
    assert stamps == [f"{day}00:00:00.250Z", f"{day}00:00:00.750Z", f"{day}23:59:59.500Z", f"{day}00:00:00.500Z"]
