"""One event, one line: `time level service logger event key=value …`, on stderr, through the standard library's logging.

    log = get_logger(__name__)
    log.info("handed off", handoff_id="h-1", kv_bytes=4096)

`configure_logging` is called once by a process; a library or a test that never calls it keeps the standard behaviour.
Values are quoted when they have spaces; a traceback becomes one quoted field, so that a line is always one event.
Prompts, answers and token ids are never logged, unless a person asks for it: callers pass ids, counts, and errors as they are,
of which only what may be said is written (`observability.private`). Does not know metrics or traces.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, TextIO

from observability.lines import LineHandler
from observability.private import private_traceback, reason

LogValue = str | int | float | bool | BaseException | None
_ExcInfo = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]
_FIELDS = "diptych_fields"
_TALKATIVE = ("httpx",)  # libraries that at info tell of each request that they make
_PLAIN = re.compile(r"[-a-zA-Z0-9_.:/@+,\[\]()<>*%]+")


class Log:
    """A named logger that takes an event's facts as keyword arguments. Owns nothing; safe to use from any thread."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger

    def debug(self, event: str, **fields: LogValue) -> None:
        """For somebody who reads the code beside the log."""
        self._emit(logging.DEBUG, event, fields)

    def info(self, event: str, **fields: LogValue) -> None:
        """A change of state that an operator wants to see."""
        self._emit(logging.INFO, event, fields)

    def warning(self, event: str, **fields: LogValue) -> None:
        """Something went wrong and was dealt with."""
        self._emit(logging.WARNING, event, fields)

    def error(self, event: str, error: BaseException | None = None, **fields: LogValue) -> None:
        """Something is broken; `error` adds its traceback."""
        self._emit(logging.ERROR, event, fields, error)

    def _emit(self, level: int, event: str, fields: dict[str, LogValue], error: BaseException | None = None) -> None:
        if not self._logger.isEnabledFor(level):
            return
        exc: tuple[type[BaseException], BaseException, TracebackType | None] | None = None
        if error is not None:
            exc = (type(error), error, error.__traceback__)
        self._logger.log(level, "%s", event, extra={_FIELDS: fields}, exc_info=exc)


def get_logger(name: str) -> Log:
    """The logger of one module; pass `__name__`."""
    return Log(logging.getLogger(name))


def configure_logging(service: str, level: str = "info", stream: TextIO | None = None, *, private: bool = True) -> None:
    """Send every log of this process to `stream`, one line per event, named `service`.

    Without `stream` it is stderr, and nobody waits for its reader. `level` is debug, info, warning or error; raises ValueError
    for another. Calling again replaces the former set-up. Unless `private`, errors are written with all that they say.
    """
    number = {"debug": 10, "info": 20, "warning": 30, "error": 40}.get(level.lower())
    if number is None:
        raise ValueError(f"log level: got {level!r}, must be debug, info, warning or error")
    handler = _to_stderr() if stream is None else logging.StreamHandler(stream)
    handler.setFormatter(LineFormatter(service, private))
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(number)
    for name in _TALKATIVE:
        logging.getLogger(name).setLevel(number if number < logging.INFO else max(number, logging.WARNING))
    # No line shows these, and to find them out for each of it is half of what it costs; the way is the library's own.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    logging._srcfile = None


def _to_stderr() -> logging.Handler:
    try:
        return LineHandler(sys.stderr.fileno())
    except OSError:  # not a file: somebody in this process collects it
        return logging.StreamHandler(sys.stderr)


class LineFormatter(logging.Formatter):
    """Renders a record as one line; UTC with milliseconds."""

    def __init__(self, service: str, private: bool = True) -> None:
        super().__init__()
        self._service = service
        self._private = private
        self._second = -1, ""  # since 1970, and as it is written: the lines of one second share it

    def format(self, record: logging.LogRecord) -> str:
        """The whole line, without its end."""
        second, stamp = self._second
        if second != int(record.created):
            second = int(record.created)
            stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second))
            self._second = second, stamp
        parts = [
            f"{stamp}.{int(record.msecs):03d}Z",
            record.levelname,
            self._service,
            record.name,
            _one_line(self._message(record)),
        ]
        fields = record.__dict__.get(_FIELDS, {})
        parts.extend(f"{name}={render_value(self._said(value))}" for name, value in fields.items())
        if record.exc_info:
            parts.append(f"traceback={json.dumps(self._traceback(record.exc_info))}")
        return " ".join(parts)

    def _message(self, record: logging.LogRecord) -> str:
        """The record's text; the errors and bytes among its arguments say what they may."""
        if isinstance(record.args, Mapping):
            return str(record.msg) % {name: self._said(value) for name, value in record.args.items()}
        if not record.args:
            return record.getMessage()
        return str(record.msg) % tuple(self._said(value) for value in record.args)

    def _said(self, value: Any) -> Any:
        if isinstance(value, bytes | bytearray | memoryview) and self._private:
            return f"{len(value)} bytes"  # as they came from a peer: gRPC logs metadata that is no text, such as half a key
        if not isinstance(value, BaseException):
            return value
        return reason(value) if self._private else str(value) or type(value).__name__

    def _traceback(self, info: _ExcInfo) -> str:
        error = info[1]
        return private_traceback(error) if self._private and error is not None else self.formatException(info)


def render_value(value: LogValue) -> str:
    """One value as it stands in a line: bare when simple, JSON-quoted when it has spaces, quotes or line ends."""
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(value)
    return text if _PLAIN.fullmatch(text) else json.dumps(text)


def _one_line(text: str) -> str:
    """What a peer made of a name must neither end the line nor reach the reader's terminal as a command."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
