"""What a caller may hand over by name, checked where it is handed over: the right kind of number, inside its bounds.

Each raises TypeError or ValueError that says field, value and limit. Booleans are no numbers here, and floats no integers,
not even whole ones: who computed 16.0 computed something else than he thinks. Does not know what the numbers are for.
"""

from __future__ import annotations

from collections.abc import Sequence


def integer(field: str, value: object, low: int, high: int | None = None) -> int:
    """An int from `low` to `high`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{field}: got {value!r}, must be an integer")
    if value < low or (high is not None and value > high):
        limit = f"at least {low}" if high is None else f"from {low} to {high}"
        raise ValueError(f"{field}: got {value}, must be {limit}")
    return value


def number(field: str, value: object) -> float:
    """An int or a float; its bounds are looked at by others."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{field}: got {value!r}, must be a number")
    return float(value)


def flag(field: str, value: object) -> bool:
    """True or False, nothing that is merely like it."""
    if not isinstance(value, bool):
        raise TypeError(f"{field}: got {value!r}, must be True or False")
    return value


def texts(field: str, value: object) -> tuple[str, ...]:
    """One text or several; none is empty."""
    found = (value,) if isinstance(value, str) else value
    if not isinstance(found, Sequence) or not all(isinstance(text, str) for text in found):
        raise TypeError(f"{field}: got {value!r}, must be a text or several")
    if not all(found):
        raise ValueError(f"{field}: got {value!r}, no text may be empty")
    return tuple(found)


def integers(field: str, value: object, low: int) -> tuple[int, ...]:
    """Several ints, each at least `low`."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise TypeError(f"{field}: got {value!r}, must be several integers")
    return tuple(integer(f"{field}[{index}]", one, low) for index, one in enumerate(value))
