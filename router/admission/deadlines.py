"""How long an HTTP client is ready to wait: the header `X-Request-Timeout`, in seconds, as in `X-Request-Timeout: 2.5`.

It bounds the whole request from when it has arrived, as gRPC's deadline does there; the router's own limit stays. OpenAI's
Python client sends `x-stainless-read-timeout` by itself, which is how long it waits between two reads, not for the whole; when
that passes it leaves, and a client that leaves is noticed anyway, so that header is not heard. Does not know what is bounded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from contracts.errors import InvalidRequest

TIMEOUT_HEADER = "X-Request-Timeout"
_TIMEOUT_NAME = TIMEOUT_HEADER.lower()
_LONGEST_S = 86_400.0


def wanted_timeout_s(headers: Mapping[str, str]) -> float | None:
    """The client's own limit in its headers (lower-case names), None without one.

    Raises InvalidRequest for what is not a number of seconds above 0.
    """
    given = headers.get(_TIMEOUT_NAME)
    if given is None:
        return None
    try:
        seconds = float(given) if given.isascii() and "_" not in given else math.nan
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= _LONGEST_S:
        raise InvalidRequest(TIMEOUT_HEADER, given, f"must be a number of seconds above 0 and at most {_LONGEST_S:g}")
    return seconds
