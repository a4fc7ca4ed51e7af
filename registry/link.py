"""One process's link to one Redis: commands and scripts with a deadline, and whether Redis is there.

    start ──▶ away ──PING is answered──▶ up ──a connection broke, or a deadline and then a PING passed──▶ away
                └─ PING again after a back-off        while away every command fails at once, nobody waits

Nothing here retries a command: whoever asked knows whether that is wise. A command that met its deadline may have been done.
All commands share one connection (`registry.pipeline`); the PING has its own, so that it says of Redis, and not of what waits.
Connections are redis-py's; credentials go nowhere else. Does not know keys, values or what is subscribed to
(`registry.subscription`).
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import ssl
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import cast

from redis.asyncio.connection import AbstractConnection, Connection, ConnectionPool, SSLConnection
from redis.exceptions import AuthenticationError, NoPermissionError, NoScriptError, RedisError
from redis.exceptions import ConnectionError as RedisConnectionError

from contracts.clock import Clock
from contracts.errors import ConfigError, Unavailable
from contracts.upkeep import kept_up, pause
from observability.log import get_logger
from registry.config import PASSWORD_VARIABLE, RedisAddress, RedisConfig
from registry.pipeline import Pipeline, Reply, Word
from registry.presence import Presence

log = get_logger(__name__)
_STUCK_TIMEOUTS = 4  # without any reply while Redis answers a PING: it is the connection that is broken


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
        self._maker = _maker(config)
        self._pipeline = Pipeline(self.new_connection, config.connect_timeout_s, clock)
        self._probe: AbstractConnection | None = None
        self.refused = ""  # why Redis does not take our credentials, if that is so
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
            self._watching = asyncio.ensure_future(kept_up("redis link", self._watch, self._clock, self._not_watched))

    def _not_watched(self, _task: str) -> None:
        self.presence.say("the task that looks for it died; it is started again")

    async def close(self) -> None:
        """Let go of everything. Idempotent; commands raise Unavailable from now on."""
        self._closed = True
        watching, self._watching = self._watching, None
        if watching is not None:
            watching.cancel()
            await asyncio.wait((watching,))
        await self._pipeline.reset("closed")
        await self._forget_probe()

    async def run(self, *words: Word, timeout_s: float | None = None) -> Reply:
        """Run one command. Raises Unavailable when Redis is away, refuses it, or does not answer within `timeout_s`
        (default: the configuration's `command_timeout_s`).
        """
        if self._closed or not self.up:
            raise Unavailable(f"{self.config.address}: away: {'closed' if self._closed else self.presence.problem}")
        limit_s = self.config.command_timeout_s if timeout_s is None else timeout_s
        try:
            async with asyncio.timeout(limit_s):
                return await self._pipeline.ask(words)
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
        return cast("AbstractConnection", self._maker.make_connection())

    def doubt(self) -> None:
        """Something spoke against Redis being there: look now, not at the next turn."""
        self._doubt.set()

    async def _watch(self) -> None:
        backoff_s = self.config.min_backoff_s
        while True:
            self._doubt.clear()
            await self.look()
            if not self.up:
                await self._pipeline.reset(self.presence.problem)  # it leads nowhere, or to a Redis that was
                await self._clock.sleep(backoff_s * random.uniform(0.5, 1.0))
                backoff_s = min(2 * backoff_s, self.config.max_backoff_s)
                continue
            backoff_s = self.config.min_backoff_s
            if self._pipeline.silent_s > _STUCK_TIMEOUTS * self.config.command_timeout_s:
                log.warning("commands are not answered although redis is there; they get another connection")
                await self._pipeline.reset("the connection for commands was silent")
            await pause(self._clock, self.config.check_s, self._doubt)

    async def look(self) -> None:
        """Ask Redis once whether it is there."""
        self.presence.say(await self._ping())

    async def _ping(self) -> str:
        """What is wrong with Redis; nothing when it answers. On a connection of its own: no command is before it."""
        limit_s = self.config.command_timeout_s + (0.0 if self.up else self.config.connect_timeout_s)
        if self._probe is None:
            self._probe = self.new_connection()
        try:
            async with asyncio.timeout(limit_s):
                await self._probe.connect()
                await self._probe.send_command("PING")
                await self._probe.read_response()
        except TimeoutError:
            await self._forget_probe()
            return f"no answer within {limit_s:g} s"
        except (RedisError, OSError) as error:
            await self._forget_probe()
            self.refused = reason_of(error) if isinstance(error, AuthenticationError | NoPermissionError) else ""
            return reason_of(error)
        self.refused = ""
        return ""

    async def _forget_probe(self) -> None:
        probe, self._probe = self._probe, None
        if probe is not None:
            with suppress(RedisError, OSError):
                await probe.disconnect()


async def check_credentials(config: RedisConfig, clock: Clock) -> None:
    """Return when Redis has answered, or does not answer, as one that is away; it may come.

    Raises ConfigError when it is there and does not take our credentials, and for TLS files of no use: who starts so would wait
    for ever.
    """
    link = RedisLink(config, clock)
    await link.look()
    await link.close()
    if link.refused:
        raise refusal(link)


def refusal(link: RedisLink) -> ConfigError:
    """What is to be said where `link.refused`."""
    named = "--registry-password-file, or the URL of --registry"
    return ConfigError(
        f"{link.config.address}: credentials are refused: {link.refused}; see {PASSWORD_VARIABLE}, {named}"
    )


def _maker(config: RedisConfig) -> ConnectionPool:
    """Makes connections to one database, and keeps none. They have no time-outs of their own: who uses them has."""
    address = config.address
    make = partial(
        ConnectionPool,
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
