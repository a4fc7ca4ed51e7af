"""`diptych top`: a router's dashboard in this terminal, until Ctrl-C. Does not know how it is drawn."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from types import FrameType
from typing import NoReturn, TypedDict, Unpack

import click
from rich.console import Console
from rich.live import Live

from cli.commands.doorflags import SECTION
from cli.options import SectionedCommand, apply, option
from cli.reaching import read_api_key
from cli.top.screen import Room, Screen
from cli.top.watch import Source, events
from contracts.errors import ConfigError, Unavailable
from dashboard.frames import Frame
from rpc.tls import TlsConfig
from rpc.tls_context import client_context

_AGAIN_S = 1.0
_FILE = click.Path(dir_okay=False, path_type=Path)


class TopFlags(TypedDict):
    """What click hands over."""

    url: str
    api_key_file: Path | None
    tls_ca: Path | None
    once: bool


OPTIONS = (
    option("--url", section="Router", default="http://127.0.0.1:8000", metavar="URL", help="Where its HTTP API is."),
    option("--api-key-file", section=SECTION, type=_FILE, metavar="FILE", help="Its first line is the API key."),
    option(
        "--tls-ca",
        section=SECTION,
        type=_FILE,
        metavar="FILE.pem",
        help="Believe a router that this authority vouches for.",
    ),
    option("--once", section="Other", is_flag=True, help="Print one second's picture and end."),
)


@click.command("top", cls=SectionedCommand)
def top(**given: Unpack[TopFlags]) -> None:
    """Watch a router and its workers: latencies, pools, and the last requests by stage.

    The same as its /dashboard in a browser. Ctrl-C ends it.
    """
    tls = None if given["tls_ca"] is None else client_context(TlsConfig(ca=given["tls_ca"]))
    source = Source(given["url"], read_api_key(given["api_key_file"]), tls)
    if given["once"]:
        _print_one(source)
    else:
        _watch(source)


def _print_one(source: Source) -> None:
    screen = Screen()
    for said in events(source):
        screen.take(said)
        if isinstance(said, Frame):
            console = Console(width=None if Console().is_terminal else 120)
            console.print(screen.draw(room=Room(console.width)))
            return
    raise Unavailable(f"{source.url}: the router ended the stream")


def _watch(source: Source) -> None:
    """The first connection must succeed; later ones are tried again for as long as it takes."""
    screen, stream, console = Screen(), events(source), Console()
    if not console.is_terminal:
        raise ConfigError("stdout is not a terminal, and nothing can be drawn over; --once prints one picture")
    first = next(stream, None)
    if first is None:
        raise Unavailable(f"{source.url}: the router ended the stream")
    screen.take(first)
    signal.signal(signal.SIGTERM, _leave)
    with Live(screen.draw(room=_room(console)), console=console, screen=True, auto_refresh=False) as live:
        while True:
            try:
                for said in stream:
                    screen.take(said)
                    live.update(screen.draw(room=_room(console)), refresh=True)
            except Unavailable as error:
                live.update(screen.draw(error.message, _room(console)), refresh=True)
            time.sleep(_AGAIN_S)
            stream = events(source)


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    """Of a signal: by way of an exception, so that the terminal is given back as it was."""
    del frame
    raise SystemExit(128 + number)


def _room(console: Console) -> Room:
    return Room(console.width, console.height)


apply(OPTIONS, top)
