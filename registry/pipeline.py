"""Many commands at once on one connection to Redis: each is sent as it comes, and replies come in the order of commands.

    ask ──▶ waits to be sent ──▶ sent ──▶ its reply            the connection breaks ──▶ all that wait hear it; the next `ask` makes
                                                              a new one

So a Redis that is far away costs each command its distance, and not that times the commands before it, as it would where each
command holds a connection until it is answered. Who gives a command up leaves its reply to be dropped when it comes. Deadlines
are the callers'. Does not know whether Redis is there.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeAlias

from redis.asyncio.connection import AbstractConnection
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError, ResponseError

from contracts.clock import Clock
from observability.log import get_logger

Word: TypeAlias = str | bytes | int | float
# As Redis sends it: an integer, a string, nothing, or a list of these.
Reply: TypeAlias = "int | bytes | list[Reply] | None"
MOST_WAITING = 10_000
log = get_logger(__name__)


class Pipeline:
    """Owns one connection at a time, which `make` makes. For one event loop."""

    def __init__(self, make: Callable[[], AbstractConnection], connect_timeout_s: float, clock: Clock) -> None:
        self._make = make
        self._connect_timeout_s = connect_timeout_s
        self._clock = clock
        self._line: _Line | None = None

    @property
    def silent_s(self) -> float:
        """For how long a command has been without a reply, and no reply to any before it came; 0 if none waits for one."""
        return 0.0 if self._line is None else self._line.silent_s

    async def ask(self, words: Sequence[Word]) -> Reply:
        """The reply. Raises RedisError, OSError or TimeoutError (of the connection's making)."""
        if self._line is None or self._line.task.done():
            self._line = _Line(self._make(), self._connect_timeout_s, self._clock)
        return await self._line.put(words)

    async def reset(self, reason: str) -> None:
        """Give the connection up; all that wait hear `reason`."""
        line, self._line = self._line, None
        if line is not None:
            line.fail(RedisConnectionError(reason))
            line.task.cancel()
            await asyncio.wait((line.task,))


class _Line:
    """One connection's life, and who waits for a reply on it."""

    def __init__(self, connection: AbstractConnection, connect_timeout_s: float, clock: Clock) -> None:
        self._connection = connection
        self._connect_timeout_s = connect_timeout_s
        self._clock = clock
        self._to_send: deque[tuple[Sequence[Word], asyncio.Future[Reply]]] = deque()
        self._sent: deque[asyncio.Future[Reply]] = deque()
        self._more = asyncio.Event()
        self._heard_at = 0.0  # the last reply, or when something was sent after nothing waited for one
        self.task = asyncio.ensure_future(self._carry())

    @property
    def silent_s(self) -> float:
        """See Pipeline."""
        return self._clock.now() - self._heard_at if self._sent else 0.0

    def put(self, words: Sequence[Word]) -> asyncio.Future[Reply]:
        """Have it sent; the reply."""
        if len(self._to_send) + len(self._sent) >= MOST_WAITING:
            raise RedisError(f"{MOST_WAITING} commands wait for their replies")
        reply: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._to_send.append((words, reply))
        self._more.set()
        return reply

    def fail(self, problem: Exception) -> None:
        """Nobody gets a reply any more."""
        waiting = [*self._sent, *(reply for _, reply in self._to_send)]
        self._sent.clear()
        self._to_send.clear()
        for reply in waiting:
            if not reply.done():
                reply.set_exception(problem)

    async def _carry(self) -> None:
        problem: Exception = RedisConnectionError("the connection ended")
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                await self._connection.connect()
            async with asyncio.TaskGroup() as both:
                both.create_task(self._write())
                both.create_task(self._read())
        except ExceptionGroup as errors:
            problem = _known(errors.exceptions[0])
        except (RedisError, OSError, TimeoutError) as error:
            problem = error
        finally:
            self.fail(problem)
            with suppress(RedisError, OSError):
                await self._connection.disconnect()
            self.fail(problem)

    async def _write(self) -> None:
        while True:
            await self._more.wait()
            self._more.clear()
            packed: list[bytes] = []
            while self._to_send:
                words, reply = self._to_send.popleft()
                if reply.done():  # given up meanwhile
                    continue
                if not self._sent:
                    self._heard_at = self._clock.now()
                packed += self._connection.pack_command(*words)
                self._sent.append(reply)
            if packed:
                await self._connection.send_packed_command(packed, check_health=False)

    async def _read(self) -> None:
        while True:
            answer: Reply | ResponseError
            try:
                answer = await self._connection.read_response(timeout=math.inf)
            except ResponseError as error:  # of this command only
                answer = error
            if not self._sent:
                raise RedisConnectionError("an answer to nothing that was asked")
            self._heard_at = self._clock.now()
            reply = self._sent.popleft()
            if reply.done():
                continue
            if isinstance(answer, ResponseError):
                reply.set_exception(answer)
            else:
                reply.set_result(answer)


def _known(error: Exception) -> Exception:
    """As those who wait expect it; what no connection does is our own fault, and said."""
    if isinstance(error, RedisError | OSError | TimeoutError):
        return error
    log.error("carrying commands to redis failed", error)
    return RedisConnectionError(f"carrying commands failed: {error!r:.80}")
