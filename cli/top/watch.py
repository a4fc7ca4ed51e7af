"""A router's dashboard events, as whoever shows them in a terminal gets them; comes again when the router does.

    connect ──▶ Snapshot ──▶ Frame, Frame, …  ──lost──▶ a pause ──▶ connect

Does not know how they are shown.
"""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from dataclasses import dataclass

import httpx
import msgspec

from contracts.errors import ConfigError, PermissionDenied, Unauthenticated, Unavailable
from dashboard.frames import Frame, Snapshot, heard
from rpc.tls_context import what_is_amiss

_SILENT_S = 5.0  # a frame comes each second
_DATA = "data: "
_MOST_CHARS = 16 * 2**20  # of one event


@dataclass(frozen=True, slots=True)
class Source:
    """Where a router is, and what it is shown and believed by."""

    url: str
    key: str = ""
    tls: ssl.SSLContext | None = None


def events(source: Source) -> Iterator[Frame | Snapshot]:
    """Until the connection ends. Raises Unavailable where nobody answers or the stream breaks, Unauthenticated or PermissionDenied
    for the key, ConfigError for an address that is none or has no dashboard.
    """
    headers = {"Authorization": f"Bearer {source.key}"} if source.key else {}
    verify: ssl.SSLContext | bool = True if source.tls is None else source.tls
    url = f"{source.url.rstrip('/')}/dashboard/events"
    try:
        with (
            httpx.Client(timeout=_SILENT_S, trust_env=False, verify=verify) as client,
            client.stream("GET", url, headers=headers) as response,
        ):
            _check(response, url)
            begun = ""  # an event whose end has not come; one that a lost connection cut has none
            for piece in response.iter_text():
                *whole, begun = (begun + piece).split("\n\n")
                for said in whole:
                    yield heard(said.removeprefix(_DATA))
                if len(begun) > _MOST_CHARS:
                    raise ConfigError(f"--url: got {source.url}, where no router answers: its first event has no end")
    except (httpx.InvalidURL, httpx.UnsupportedProtocol, UnicodeError) as error:
        raise ConfigError(f"--url: got {source.url}, which is not http://HOST:PORT or https://: {error}") from error
    except (httpx.TransportError, httpx.DecodingError) as error:
        raise Unavailable(f"{source.url}: {error or type(error).__name__}{what_is_amiss(url, error)}") from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(f"--url: got {source.url}, where no router of this version answers: {error}") from error


def _check(response: httpx.Response, url: str) -> None:
    if response.status_code == httpx.codes.UNAUTHORIZED:
        raise Unauthenticated("this router asks for a key that it knows: --api-key-file")
    if response.status_code == httpx.codes.FORBIDDEN:
        raise PermissionDenied("this key does not open the dashboard of this router")
    if response.status_code == httpx.codes.NOT_FOUND:
        raise ConfigError(f"--url: {url} is not there; is it a router?")
    if response.status_code != httpx.codes.OK:
        raise Unavailable(f"{url}: status {response.status_code}")
