"""What is published in Redis, as one stream that outlives every time that Redis is away, and says so.

    Signal.LISTENING ──▶ Message … Message ──▶ Signal.DEAF ──(reconnect, with a back-off)──▶ Signal.LISTENING ──▶ …

Pub/sub keeps nothing for who is away: at each LISTENING, the first too, something may have been missed, and the reader
reads the whole state again. A reader that is too slow for `most_waiting` messages loses them, and hears LISTENING again.
A Redis that hangs is found by a PING on this connection. Does not know what the messages mean.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Self

from redis.asyncio.connection import AbstractConnection
from redis.exceptions import RedisError

from contracts.clock import Clock
from contracts.upkeep import watched
from observability.log import get_logger
from registry.config import RedisConfig
from registry.link import RedisLink, reason_of

log = get_logger(__name__)
_SUBSCRIBED, _MESSAGE, _PONG = b"subscribe", b"message", b"pong"


class Signal(Enum):
    """How it stands with the stream itself."""

    LISTENING = "listening"  # from now on everything is heard; what was before may have been missed
    DEAF = "deaf"  # nothing is heard until LISTENING comes again


@dataclass(frozen=True, slots=True)
class Message:
    """One publication."""

    channel: str
    data: bytes


class Broken(Exception):
    """The connection of a subscription is of no use any more; says why."""


class Subscription:
    """An asynchronous iterator for one reader. Owns one connection and the task that reads it, from making to `close`."""

    def __init__(self, link: RedisLink, channels: Sequence[str], clock: Clock, most_waiting: int = 10_000) -> None:
        self._link = link
        self._names = {link.channel(name): name for name in channels}
        self._problem = ""
        self._clock = clock
        self._most_waiting = most_waiting
        self._events: deque[Message | Signal] = deque()
        self._arrived = asyncio.Event()
        self._listening = False
        self._closed = False
        self._task = watched("redis subscription", self._run(), self._end)

    @property
    def listening(self) -> bool:
        """Whether what is published now will be heard."""
        return self._listening

    @property
    def problem(self) -> str:
        """Why nothing is heard, where that is known; empty while it is listening."""
        return "" if self._listening else self._problem

    def __aiter__(self) -> Self:
        """For `async for`."""
        return self

    async def __anext__(self) -> Message | Signal:
        """The next event; ends when the subscription is closed."""
        while not self._events:
            if self._closed:
                raise StopAsyncIteration
            self._arrived.clear()
            await self._arrived.wait()
        return self._events.popleft()

    async def close(self) -> None:
        """Stop listening; the reader's loop ends. Idempotent."""
        self._task.cancel()
        await asyncio.wait((self._task,))
        self._end()

    async def _run(self) -> None:
        config = self._link.config
        backoff_s = config.min_backoff_s
        while True:
            await self._link.presence.wait_up()
            connection = self._link.new_connection()
            try:
                await self._subscribe(connection, config)
                backoff_s = config.min_backoff_s
                self._problem = ""
                self._put(Signal.LISTENING)
                await self._listen(connection, config)
            except (RedisError, OSError, TimeoutError, Broken) as error:
                self._hear_of(error)
            finally:
                if self._listening:
                    self._put(Signal.DEAF)
                with contextlib.suppress(RedisError, OSError):
                    await connection.disconnect(nowait=True)
            self._link.doubt()
            await self._clock.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, config.max_backoff_s)

    async def _subscribe(self, connection: AbstractConnection, config: RedisConfig) -> None:
        async with asyncio.timeout(config.connect_timeout_s + config.command_timeout_s):
            await connection.connect()
            await connection.send_command("SUBSCRIBE", *self._names)
            missing = set(self._names)
            while missing:
                kind, channel, _ = _parts(await connection.read_response())
                if kind == _SUBSCRIBED:
                    missing.discard(channel.decode())
                elif kind == _MESSAGE:  # of a channel that is confirmed before the others: LISTENING comes after it
                    continue

    async def _listen(self, connection: AbstractConnection, config: RedisConfig) -> None:
        """Read until the connection breaks, or a PING is not answered."""
        asked = False
        while True:
            limit_s = config.command_timeout_s if asked else config.check_s
            response = await connection.read_response(timeout=limit_s)
            if response is None:
                if asked:
                    raise Broken(f"no answer within {limit_s:g} s")
                async with asyncio.timeout(config.command_timeout_s):
                    await connection.send_command("PING")
                asked = True
                continue
            asked = False
            kind, channel, data = _parts(response)
            if kind == _MESSAGE:
                self._put(Message(self._names[channel.decode()], data))
            elif kind != _PONG:
                raise Broken(f"unexpected {kind!r}")

    def _hear_of(self, error: Exception) -> None:
        """Logs what is news."""
        problem = reason_of(error)
        if problem != self._problem:
            log.info("not listening to redis", reason=problem)
        self._problem = problem

    def _put(self, event: Message | Signal) -> None:
        if isinstance(event, Signal):
            self._listening = event is Signal.LISTENING
        elif len(self._events) >= self._most_waiting:
            log.warning("a reader of redis is too slow; it starts anew", missed=len(self._events))
            self._events.clear()
            event = Signal.LISTENING
        self._events.append(event)
        self._arrived.set()

    def _end(self) -> None:
        self._listening, self._closed = False, True
        self._arrived.set()


def _parts(response: object) -> tuple[bytes, bytes, bytes]:
    """What a subscribed connection sends: its kind, then what belongs to it. Raises Broken for anything else."""
    match response:
        case [bytes(kind), bytes(channel), bytes(data)]:
            return kind, channel, data
        case [bytes(kind), bytes(channel), int()] | [bytes(kind), bytes(channel)]:
            return kind, channel, b""
        case b"PONG" | "PONG":
            return _PONG, b"", b""
    raise Broken(f"unexpected {response!r:.80}")
