"""A request's name: the client's X-Request-Id, or one of ours; every answer says it, errors as well.

Does not know what was asked.
"""

from __future__ import annotations

from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import Response

from contracts.errors import InvalidRequest
from router.service import MAX_REQUEST_ID_CHARS

HEADER = "X-Request-Id"


def given_name(request: Request) -> str:
    """The client's own, or nothing. Raises InvalidRequest for one that cannot go out again."""
    return checked_name(HEADER, request.headers.get(HEADER, ""))


def checked_name(field: str, given: str) -> str:
    """A request's name goes out again in a header, so it must be fit for one."""
    if len(given) > MAX_REQUEST_ID_CHARS or not (given.isascii() and given.isprintable()):
        raise InvalidRequest(field, given, f"must be printable ASCII of at most {MAX_REQUEST_ID_CHARS} characters")
    return given


def named(response: Response, request: Request, new_id: Callable[[], str]) -> Response:
    """The response with the request's name, where it does not say one yet."""
    if HEADER not in response.headers:
        given = request.headers.get(HEADER, "")
        fit = given and len(given) <= MAX_REQUEST_ID_CHARS and given.isascii() and given.isprintable()
        response.headers[HEADER] = given if fit else new_id()
    return response
