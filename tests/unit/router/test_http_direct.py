"""The ways in that carry the load pass nobody else; a fault there is told once and raised; a body that is here needs no timer."""

import asyncio

import pytest
from starlette.responses import Response

from router.http.answer import AnswerResponse
from router.http.body import FrontLimits, Refused, read_body
from router.http.direct import Direct
from router.http.incoming import Incoming
from router.http.visit import SCOPE_KEY, Visit

LIMITS = FrontLimits(max_body_bytes=8, request_timeout_s=30.0)


def scope_of(method: str, path: str, **more):
    return {"type": "http", "method": method, "path": path, "headers": [], SCOPE_KEY: Visit(), **more}


class Client:
    """Takes what is sent to it."""

    def __init__(self) -> None:
        self.statuses = []
        self.bodies = []

    async def send(self, message) -> None:
        if message["type"] == "http.response.start":
            self.statuses.append(message["status"])
        else:
            self.bodies.append(message["body"])


async def nothing():
    raise AssertionError("nobody waits for a message")


def door(endpoint):
    async def rest(scope, receive, send) -> None:
        await Response("rest")(scope, receive, send)

    return Direct({("POST", "/way"): endpoint}, rest, lambda request: Response("a fault", 500))


@pytest.mark.parametrize(("method", "path"), [("GET", "/way"), ("POST", "/way/"), ("POST", "/other")])
async def test_everything_else_goes_to_the_application_behind(method, path):
    async def endpoint(request):
        raise AssertionError("another's request")

    client = Client()
    await door(endpoint)(scope_of(method, path), nothing, client.send)
    assert client.bodies == [b"rest"]


async def test_a_fault_is_answered_and_raised():
    async def endpoint(request):
        raise RuntimeError("a bug")

    client = Client()
    with pytest.raises(RuntimeError, match="a bug"):
        await door(endpoint)(scope_of("POST", "/way"), nothing, client.send)
    assert (client.statuses, client.bodies) == ([500], [b"a fault"])


@pytest.mark.parametrize("begun", [False, True])
async def test_a_fault_of_a_response_is_answered_unless_it_has_begun(begun):
    class Faulty(AnswerResponse):
        def __init__(self) -> None:
            self.begun = False

        async def __call__(self, scope, receive, send) -> None:
            if begun:
                self.begun = True
                await send({"type": "http.response.start", "status": 200, "headers": []})
            raise RuntimeError("a bug")

    async def endpoint(request):
        return Faulty()

    client = Client()
    with pytest.raises(RuntimeError, match="a bug"):
        await door(endpoint)(scope_of("POST", "/way"), nothing, client.send)
    assert client.statuses == ([200] if begun else [500])


async def test_of_a_header_that_comes_twice_the_first_counts():
    headers = [(b"x-request-id", b"a"), (b"host", b"h"), (b"x-request-id", b"b\xe9")]
    assert Incoming({"headers": headers}, nothing).headers == {"x-request-id": "a", "host": "h"}


def arriving(*parts: bytes):
    messages = [{"type": "http.request", "body": part, "more_body": True} for part in parts[:-1]]
    messages.append({"type": "http.request", "body": parts[-1], "more_body": False})

    async def receive():
        return messages.pop(0)

    return receive


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("parts", [(b"",), (b"12345678",), (b"123", b"45678"), (b"123456789",), (b"12345", b"6789")])
async def test_a_body_is_what_came_whether_it_was_here_or_not_and_has_its_limit(whole, parts, monkeypatch):
    scope = scope_of("POST", "/way")
    scope[SCOPE_KEY].whole = whole
    if whole:
        monkeypatch.setattr(asyncio, "timeout", None)  # it is not asked for
    reading = read_body(Incoming(scope, arriving(*parts)), LIMITS)
    if sum(map(len, parts)) <= LIMITS.max_body_bytes:
        assert await reading == b"".join(parts)
    else:
        with pytest.raises(Refused):
            await reading
