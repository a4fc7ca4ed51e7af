"""A worker's prefix cache as its readers hear of it: a snapshot, then what changes, as fast as each of them reads.

    engine thread: all names, changes ──event loop──▶ mirror (a set of short names) ──▶ each reader: what it does not know yet

    nobody reads ──first reader──▶ listening ──last reader leaves──▶ nobody reads (the engine keeps no news)
    any          ──close──▶ every reader comes to its end

What waits for a reader is the net difference between what it was told and what there is; once that is no shorter than a new
snapshot, it gets that. So a reader that is slow, or has stopped, costs no more memory than the cache has blocks. Does not know
gRPC or routers.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Sequence
from dataclasses import dataclass

from contracts.block_hash import short_names
from contracts.errors import Draining, Overloaded
from engine.driver import EngineDriver
from engine.engine import Engine
from engine.kv.block_news import BlockChanges

MAX_READERS = 256
MAX_NAMES = (
    8192  # in one message: what a router takes in without holding its event loop for more than a few milliseconds
)
_FEW = 1024  # changes that may wait however small the snapshot is


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Short names of all blocks there are; `more` says that the next message goes on with it."""

    blocks: Sequence[int]
    more: bool = False


@dataclass(frozen=True, slots=True)
class Changes:
    """Short names of blocks that came and went since the message before."""

    stored: Sequence[int]
    removed: Sequence[int]


@dataclass(slots=True, eq=False)
class _Reader:
    """`behind` maps names to whether they came; empty while a snapshot is owed."""

    news: asyncio.Event
    owed_snapshot: bool = False
    behind: dict[int, bool] | None = None


class BlockFeed:
    """Owns the mirror and the readers. Used on the event loop of the driver, whose `on_blocks` it takes."""

    def __init__(self, driver: EngineDriver) -> None:
        self._driver = driver
        self._loop = asyncio.get_running_loop()
        self._mirror: set[int] = set()
        self._known = False  # the mirror is what there is
        self._readers: set[_Reader] = set()
        self._closed = False
        driver.on_blocks = self._on_changes

    @property
    def num_readers(self) -> int:
        """Who listens."""
        return len(self._readers)

    async def watch(self) -> AsyncGenerator[Snapshot | Changes, None]:
        """What there is, then what changes, until `close`. Close it to leave.

        Raises Overloaded over MAX_READERS, and Draining after `close`.
        """
        if self._closed:
            raise Draining("this worker is about to stop: what it has is nobody's business any more")
        if len(self._readers) >= MAX_READERS:
            raise Overloaded(f"{MAX_READERS} readers follow this worker's blocks already, which is the limit")
        reader = self._enter()
        try:
            while not self._closed:
                await reader.news.wait()
                for message in self._messages(reader):
                    yield message
        finally:
            self._leave(reader)

    def close(self) -> None:
        """Nobody needs to know any more: the worker takes nothing new. Idempotent."""
        self._closed = True
        for reader in self._readers:
            reader.news.set()

    def _enter(self) -> _Reader:
        reader = _Reader(asyncio.Event())
        self._readers.add(reader)
        if self._known:
            _owe_snapshot(reader)
        elif len(self._readers) == 1:
            self._driver.post(self._listen)
        return reader

    def _leave(self, reader: _Reader) -> None:
        self._readers.discard(reader)
        if not self._readers:
            self._driver.post(lambda engine: engine.block_news.ignore())
            self._mirror, self._known = set(), False

    def _listen(self, engine: Engine) -> None:
        """In the engine's thread. Told the way the changes are, so that both come in their order."""
        self._loop.call_soon_threadsafe(self._on_all, engine.block_news.listen())

    def _on_all(self, names: Sequence[bytes]) -> None:
        if self._readers:
            self._mirror, self._known = set(short_names(names)), True
            for reader in self._readers:
                _owe_snapshot(reader)

    def _on_changes(self, changes: BlockChanges) -> None:
        if not self._known:
            return  # of before the snapshot that is on its way
        stored, removed = short_names(changes.stored), short_names(changes.removed)
        self._mirror.difference_update(removed)
        self._mirror.update(stored)
        most = max(_FEW, len(self._mirror))
        for reader in self._readers:
            if reader.owed_snapshot:
                continue
            _fall_behind(reader, stored, came=True)
            _fall_behind(reader, removed, came=False)
            if reader.behind is not None and len(reader.behind) > most:
                _owe_snapshot(reader)

    def _messages(self, reader: _Reader) -> Iterable[Snapshot | Changes]:
        """What the reader is owed, which it then has."""
        reader.news.clear()
        if reader.owed_snapshot:
            reader.owed_snapshot = False
            names = list(self._mirror)
            starts = range(0, max(1, len(names)), MAX_NAMES)
            return [Snapshot(names[at : at + MAX_NAMES], at + MAX_NAMES < len(names)) for at in starts]
        behind, reader.behind = list((reader.behind or {}).items()), None
        return [_changes(behind[at : at + MAX_NAMES]) for at in range(0, len(behind), MAX_NAMES)]


def _owe_snapshot(reader: _Reader) -> None:
    reader.owed_snapshot, reader.behind = True, None
    reader.news.set()


def _fall_behind(reader: _Reader, names: Iterable[int], *, came: bool) -> None:
    if reader.behind is None:
        reader.behind = {}
    behind = reader.behind
    for name in names:
        if behind.setdefault(name, came) != came:
            del behind[name]
    if behind:
        reader.news.set()


def _changes(some: Sequence[tuple[int, bool]]) -> Changes:
    return Changes([name for name, came in some if came], [name for name, came in some if not came])
