"""The files of the page, read once, and where they are found: nothing of it comes from anywhere else. Does not know HTTP
beyond their types.

uPlot (page/uplot, MIT, its licence beside it) draws the charts.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources

import xxhash

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
PAGE = "/dashboard"
EVENTS_PATH = f"{PAGE}/events"
INDEX = "index.html"
NAMES = (
    INDEX,
    "icon.svg",
    "style.css",
    "main.js",
    "stream.js",
    "charts.js",
    "pools.js",
    "requests.js",
    "words.js",
    "uplot/uPlot.iife.min.js",
    "uplot/uPlot.min.css",
)
PAGE_PATHS = frozenset({PAGE, *(f"{PAGE}/{name}" for name in NAMES if name != INDEX)})


@dataclass(frozen=True, slots=True)
class PageFile:
    """One file; `tag` differs when its content does."""

    content: bytes
    media_type: str
    tag: str


def load_files() -> dict[str, PageFile]:
    """All of them, by name."""
    folder = resources.files("dashboard") / "page"
    return {name: _file((folder / name).read_bytes(), name) for name in NAMES}


def _file(content: bytes, name: str) -> PageFile:
    return PageFile(content, _TYPES[name[name.rindex(".") :]], f'"{xxhash.xxh64_hexdigest(content)}"')
