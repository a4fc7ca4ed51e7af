"""A client that streams one completion over HTTP and keeps what came, and when. Knows nothing behind the router's door."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
import zlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import httpx

TEMPERATURE, TOP_K = 0.7, 8


@dataclass(frozen=True)
class Question:
    """One request: its prompt, and how tokens are chosen (seed None: greedily)."""

    prompt: tuple[int, ...]
    max_tokens: int
    seed: int | None

    @property
    def body(self) -> dict[str, object]:
        """For /v1/completions."""
        seeded = {"temperature": TEMPERATURE, "top_k": TOP_K, "seed": self.seed}
        sampling = {"temperature": 0.0} if self.seed is None else seeded
        ours = {"stream": True, "return_token_ids": True, "ignore_eos": True}
        return {"prompt": self.prompt, "max_tokens": self.max_tokens, **sampling, **ours}


def question(label: str, num_prompt: int, max_tokens: int, *, seeded: bool) -> Question:
    """The question of this label: always the same one, whose prompt shares no block with any other's.

    Always the same, and sampled from few tokens: prompts are recomputed in chunks of any size, which changes the last bits
    of logits, and a number that falls between two tokens' shares by less than that would be a flaw of the question.
    """
    number = zlib.crc32(label.encode())
    prompt = tuple((number % 990 + i * 7 + i * i * number % 997) % 990 + 10 for i in range(num_prompt))
    return Question(prompt, max_tokens, number if seeded else None)


@dataclass
class Answer:
    """What one client has seen so far. `at` has a time for each token; `broken` says that the connection was lost."""

    question: Question
    began: float = field(default_factory=time.monotonic)
    status: int | None = None
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    at: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    error: str | None = None
    broken: str | None = None
    over: bool = False
    task: asyncio.Task[None] | None = None
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def longest_wait_s(self) -> float:
        """Between two tokens, or before the first."""
        times = [self.began, *self.at]
        return max((b - a for a, b in itertools.pairwise(times)), default=0.0)

    async def until(self, condition: Callable[[Answer], bool], limit_s: float) -> None:
        """Wait until it holds, or the answer is over."""
        async with asyncio.timeout(limit_s):
            while not condition(self) and not self.over:
                self._news.clear()
                await self._news.wait()

    async def end(self, limit_s: float) -> None:
        """Wait until it is over."""
        assert self.task is not None
        await asyncio.wait_for(asyncio.shield(self.task), limit_s)

    def told(self) -> None:
        """Something has changed."""
        self._news.set()


class Client:
    """Asks one router, each question on a connection of its own. Leave it by `close`."""

    def __init__(self, port: int) -> None:
        limits = httpx.Limits(max_keepalive_connections=0)
        self._http = httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=60.0, limits=limits
        )
        self._asking: set[asyncio.Task[None]] = set()

    def ask(self, asked: Question) -> Answer:
        """Begin; the answer grows while its task runs."""
        answer = Answer(asked)
        answer.task = asyncio.ensure_future(self._stream(answer))
        self._asking.add(answer.task)
        answer.task.add_done_callback(self._asking.discard)
        return answer

    async def close(self) -> None:
        """Leave every answer."""
        for task in tuple(self._asking):
            task.cancel()
            await asyncio.wait((task,))
        await self._http.aclose()

    async def _stream(self, answer: Answer) -> None:
        try:
            async with self._events(answer) as events:
                async for event in events:
                    _take(answer, event)
                    answer.told()
        except httpx.TransportError as error:
            answer.broken = type(error).__name__
        finally:
            answer.over = True
            answer.told()

    @asynccontextmanager
    async def _events(self, answer: Answer) -> AsyncIterator[AsyncIterator[str]]:
        async with self._http.stream("POST", "/v1/completions", json=answer.question.body) as response:
            answer.status = response.status_code
            if response.status_code != 200:
                answer.error = (await response.aread()).decode()
            yield response.aiter_lines()


def _take(answer: Answer, line: str) -> None:
    if not line.startswith("data: ") or line == "data: [DONE]":
        return
    event = json.loads(line.removeprefix("data: "))
    if "error" in event:
        answer.error = event["error"]["message"]
        return
    (choice,) = event["choices"]
    answer.text += choice["text"]
    answer.token_ids += choice["token_ids"]
    answer.at += [time.monotonic()] * len(choice["token_ids"])
    answer.finish_reason = choice["finish_reason"]
