"""One process's link to one Redis: commands and scripts with a deadline, and whether Redis is there.

    start ──▶ away ──PING is answered──▶ up ──a connection broke, or a deadline and then a PING passed──▶ away
                └─ PING again after a back-off        while away every command fails at once, nobody waits

Nothing here retries a command: whoever asked knows whether that is wise. A command that met its deadline may have been done.
Connections are redis-py's; credentials go nowhere else. Does not know keys, values or what is subscribed to
(`registry.subscription`).
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import ssl
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias, cast

from redis.asyncio.connection import AbstractConnection, BlockingConnectionPool, Connection, SSLConnection
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoScriptError, RedisError

from contracts.clock import Clock
from contracts.errors import ConfigError, Unavailable
from observability.log import get_logger
from registry.config import RedisAddress, RedisConfig
from registry.presence import Presence

log = get_logger(__name__)
Word: TypeAlias = str | bytes | int | float
# As Redis sends it: an integer, a string, nothing, or a list of these.
Reply: TypeAlias = "int | bytes | list[Reply] | None"


@dataclass(frozen=True, slots=True)
class Script:
    """A Lua script, which Redis runs as one step. Redis forgets scripts when it restarts; the link brings them back."""

    source: str
    digest: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "digest", hashlib.sha1(self.source.encode(), usedforsecurity=False).hexdigest())


class RedisLink:
    """Owns the connections to one Redis and the task that watches it, from `start` to `close`. For one event loop.

    `presence` says whether Redis answered lately, and tells who wants to know. Nothing here takes longer than its deadline.
    """

    def __init__(self, config: RedisConfig, clock: Clock) -> None:
        self.config = config
        self._clock = clock
        self._pool = connection_pool(config)
        self.presence = Presence(str(config.address), clock)
        self._doubt = asyncio.Event()
        self._closed = False
        self._watching: asyncio.Task[None] | None = None

    @property
    def up(self) -> bool:
        """Whether Redis answered lately."""
        return self.presence.up

    def start(self) -> None:
        """Begin to look for Redis. Returns at once."""
        if self._watching is None:
            self._watching = watched(
                "redis link", self._watch(), lambda: self.presence.say("the task that looks for it died")
            )

    async def close(self) -> None:
        """Let go of everything. Idempotent; commands raise Unavailable from now on."""
        self._closed = True
        watching, self._watching = self._watching, None
        if watching is not None:
            watching.cancel()
            await asyncio.wait((watching,))
        with suppress(RedisError, OSError, TimeoutError):
            async with asyncio.timeout(self.config.connect_timeout_s):
                await self._pool.disconnect()

    async def run(self, *words: Word, timeout_s: float | None = None) -> Reply:
        """Run one command. Raises Unavailable when Redis is away, refuses it, or does not answer within `timeout_s`
        (default: the configuration's `command_timeout_s`).
        """
        if self._closed or not self.up:
            raise Unavailable(f"{self.config.address}: away: {'closed' if self._closed else self.presence.problem}")
        limit_s = self.config.command_timeout_s if timeout_s is None else timeout_s
        try:
            async with asyncio.timeout(limit_s):
                return await self._ask(words)
        except TimeoutError as error:
            self.doubt()
            raise Unavailable(f"{self.config.address}: no answer within {limit_s:g} s") from error
        except (RedisError, OSError) as error:
            if isinstance(error, RedisConnectionError | OSError) and not self._closed:
                self.presence.say(reason_of(error))
                self.doubt()
            raise Unavailable(f"{self.config.address}: {reason_of(error)}") from error

    async def script(
        self, script: Script, keys: Sequence[Word], args: Sequence[Word] = (), timeout_s: float | None = None
    ) -> Reply:
        """Run a Lua script. Raises as `run` does, and bears the same deadline as a whole or twice where Redis forgot it."""
        try:
            return await self.run("EVALSHA", script.digest, len(keys), *keys, *args, timeout_s=timeout_s)
        except Unavailable as error:
            if not isinstance(error.__cause__, NoScriptError):
                raise
        return await self.run("EVAL", script.source, len(keys), *keys, *args, timeout_s=timeout_s)

    def channel(self, name: str) -> str:
        """What a channel is called in Redis, whose channels are the same in all its databases: one deployment's are not."""
        db = self.config.address.db
        return f"{name}@{db}" if db else name

    def new_connection(self) -> AbstractConnection:
        """A connection of its own, not made yet, for who has to hold it; the caller disconnects it."""
        return cast("AbstractConnection", self._pool.make_connection())

    def doubt(self) -> None:
        """Something spoke against Redis being there: look now, not at the next turn."""
        self._doubt.set()

    async def _ask(self, words: Sequence[Word]) -> Reply:
        connection = await self._pool.get_connection()
        try:
            await connection.send_command(*words)
            return cast("Reply", await connection.read_response())
        finally:
            if self._closed:  # meanwhile: nobody closes it later
                await connection.disconnect(nowait=True)
            await self._pool.release(connection)

    async def _watch(self) -> None:
        backoff_s = self.config.min_backoff_s
        while True:
            self._doubt.clear()
            problem = await self._ping()
            self.presence.say(problem)
            if problem:
                with suppress(RedisError, OSError, TimeoutError):  # they lead nowhere, or to a Redis that was
                    async with asyncio.timeout(self.config.connect_timeout_s):
                        await self._pool.disconnect(inuse_connections=False)
                await self._clock.sleep(backoff_s * random.uniform(0.5, 1.0))
                backoff_s = min(2 * backoff_s, self.config.max_backoff_s)
            else:
                backoff_s = self.config.min_backoff_s
                await self._pause()

    async def _ping(self) -> str:
        """What is wrong with Redis; nothing when it answers."""
        limit_s = self.config.command_timeout_s + (0.0 if self.up else self.config.connect_timeout_s)
        try:
            async with asyncio.timeout(limit_s):
                await self._ask(("PING",))
        except TimeoutError:
            return f"no answer within {limit_s:g} s"
        except (RedisError, OSError) as error:
            return reason_of(error)
        return ""

    async def _pause(self) -> None:
        """Until the next look is due, or Redis is in doubt."""
        waits = (
            asyncio.ensure_future(self._clock.sleep(self.config.check_s)),
            asyncio.ensure_future(self._doubt.wait()),
        )
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()


def connection_pool(config: RedisConfig) -> BlockingConnectionPool:
    """Connections to one database, made when needed. They have no time-outs of their own: who uses them has."""
    address = config.address
    make = partial(
        BlockingConnectionPool,
        max_connections=config.max_connections,
        timeout=None,
        host=address.host,
        port=address.port,
        db=address.db,
        username=address.username,
        password=address.password,
        socket_timeout=None,
        socket_connect_timeout=config.connect_timeout_s,
        socket_keepalive=True,
        protocol=2,
        driver_info=None,
    )
    if not address.tls:
        return make(connection_class=Connection)
    _check_tls_files(address)
    return make(
        connection_class=SSLConnection,
        ssl_ca_certs=address.ca_file,
        ssl_certfile=address.cert_file,
        ssl_keyfile=address.key_file,
    )


def _check_tls_files(address: RedisAddress) -> None:
    """Raises ConfigError for files that are no certificates or keys: better now than at every connection."""
    try:
        context = ssl.create_default_context(cafile=address.ca_file)
        if address.cert_file is not None:
            context.load_cert_chain(address.cert_file, address.key_file)
    except (ssl.SSLError, OSError) as error:
        raise ConfigError(f"{address}: TLS files: {error}") from error


def reason_of(error: BaseException) -> str:
    """One line; redis-py's messages name host and port, never credentials."""
    return " ".join(str(error).split()) or type(error).__name__


def watched(name: str, work: Coroutine[None, None, None], died: Callable[[], None]) -> asyncio.Task[None]:
    """A task whose death is not silent."""

    def ended(task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            log.error("a task died", error, task=name)
            died()

    task = asyncio.ensure_future(work)
    task.add_done_callback(ended)
    return task
