"""What of an error may stand in a log: never what a user sent or was answered.

    an error of ours           its message, unless its class says that it repeats what a user sent
    OSError, RuntimeError, …   its message: made by the system or by code about itself
    anything else              its class alone: "invalid literal: 'Dear Anna…'" is what a ValueError is made of

A traceback keeps its files, lines and functions. Nothing else of a request is logged, so with this no log has prompts, answers
or token ids. Does not know how logs are written, or the flag that turns it off.
"""

from __future__ import annotations

import traceback
from types import TracebackType

_SAFE = (OSError, RuntimeError, MemoryError, AssertionError, AttributeError, NameError, ImportError)


class LoggableError(Exception):
    """An error that knows what of it may be logged."""

    @property
    def logged(self) -> str:
        """Its message without what a user sent."""
        return str(self)


def reason(error: BaseException) -> str:
    """The error on one line of a log."""
    name = type(error).__name__
    if isinstance(error, LoggableError):
        return error.logged
    if isinstance(error, _SAFE):
        said = str(error)
        return f"{name}: {said}" if said else name
    return name


def private_traceback(error: BaseException) -> str:
    """The traceback of `error` and of what caused it, each with its reason in the place of its message."""
    return "".join(_lines(error, set()))


def _lines(error: BaseException, seen: set[int]) -> list[str]:
    seen.add(id(error))
    lines: list[str] = []
    cause = error.__cause__
    context = None if error.__suppress_context__ else error.__context__
    if cause is not None and id(cause) not in seen:
        lines += [*_lines(cause, seen), "\nThe above exception was the direct cause of the following exception:\n\n"]
    elif context is not None and id(context) not in seen:
        lines += [*_lines(context, seen), "\nDuring handling of the above exception, another exception occurred:\n\n"]
    lines += _own(error, error.__traceback__)
    if isinstance(error, BaseExceptionGroup):
        for number, inner in enumerate(error.exceptions, 1):
            lines += [f"---- {number} of {len(error.exceptions)} ----\n", *_lines(inner, seen)]
    return lines


def _own(error: BaseException, where: TracebackType | None) -> list[str]:
    name = type(error).__qualname__
    said = reason(error)
    head = ["Traceback (most recent call last):\n", *traceback.format_tb(where)] if where is not None else []
    bare = said.removeprefix(f"{type(error).__name__}: ")
    return [*head, f"{name}\n" if bare == type(error).__name__ else f"{name}: {bare}\n"]
