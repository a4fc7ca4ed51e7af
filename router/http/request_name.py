"""A request's name: the client's X-Request-Id, or one of ours; every answer says it, errors as well.

Does not know what was asked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from starlette.responses import Response

from contracts.errors import InvalidRequest
from router.service import MAX_REQUEST_ID_CHARS

HEADER = "X-Request-Id"
_NAME = HEADER.lower()


def given_name(headers: Mapping[str, str]) -> str:
    """The client's own in its headers (lower-case names), or nothing. Raises InvalidRequest for one that cannot go out again."""
    given = headers.get(_NAME, "")
    return checked_name(HEADER, given) if given else ""


def checked_name(field: str, given: str) -> str:
    """A request's name goes out again in a header, so it must be fit for one."""
    if len(given) > MAX_REQUEST_ID_CHARS or not (given.isascii() and given.isprintable()):
        raise InvalidRequest(field, given, f"must be printable ASCII of at most {MAX_REQUEST_ID_CHARS} characters")
    return given


def named(response: Response, headers: Mapping[str, str], new_id: Callable[[], str]) -> Response:
    """The response with the name of a request with these headers, where it does not say one yet."""
    if HEADER not in response.headers:
        given = headers.get(_NAME, "")
        fit = given and len(given) <= MAX_REQUEST_ID_CHARS and given.isascii() and given.isprintable()
        response.headers[HEADER] = given if fit else new_id()
    return response
