"""What is asked, the one right answer to each, and clients that ask all the time. Knows the router's door only."""

from __future__ import annotations

import asyncio
import itertools
import json
from dataclasses import dataclass, field

from tests.compose.journal import NotSo
from tests.compose.stack import Stack
from tests.integration.processes.client import Answer, Client

LONGEST = 480  # tokens: seconds, in which something can happen to a worker
PATIENCE_S = 120.0
_TALE = (
    "In the long winter the miller's three daughters counted sacks, mended nets and told each other what they feared. "
)
PROMPTS = (
    "The capital of France is",
    "A short list of things that one needs to bake bread:",
    "Once upon a time there was a lighthouse keeper who",
    "The difference between weather and climate is that",
    _TALE * 6 + "The eldest said:",
    _TALE * 20 + "The youngest said:",
)


@dataclass(frozen=True)
class Asked:
    """One request, greedy: its answer is a function of the prompt."""

    prompt: str
    max_tokens: int
    route: str = ""

    @property
    def body(self) -> dict[str, object]:
        """For /v1/completions."""
        ours = {"stream": True, "return_token_ids": True, "ignore_eos": True, "temperature": 0}
        way = {"diptych": {"route": self.route}} if self.route else {}
        return {"prompt": self.prompt, "max_tokens": self.max_tokens, **ours, **way}


async def truth_of(stack: Stack) -> dict[str, list[int]]:
    """Token ids of `diptych generate`, the engine alone, in a container of its own, of each prompt."""
    prompts = [word for prompt in PROMPTS for word in ("--prompt", prompt)]
    flags = [
        "--max-tokens",
        str(LONGEST),
        "--temperature",
        "0",
        "--ignore-eos",
        "--json",
        "--kv-memory",
        "256MiB",
        "--threads",
        "1",
    ]
    said = await stack.compose(
        "run", "--rm", "--no-deps", "-T", "decode", "generate", "--model", "/models/served", *prompts, *flags
    )
    answers = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    return {prompt: answer["token_ids"] for prompt, answer in zip(PROMPTS, answers, strict=True)}


def judged(answer: Answer, truth: dict[str, list[int]]) -> str:
    """What is wrong with it; "" when nothing is."""
    asked = answer.question
    if answer.status != 200 or answer.error or answer.broken:
        return f"status {answer.status}, {answer.error or answer.broken}"
    if answer.token_ids != truth[asked.prompt][: asked.max_tokens]:
        return f"{len(answer.token_ids)} tokens of {asked.max_tokens}, others than alone: {asked.prompt[:40]!r}"
    return ""


async def right(client: Client, asked: Asked, truth: dict[str, list[int]]) -> Answer:
    """The answer, once it is whole; NotSo unless it is the right one."""
    answer = client.ask(asked)
    await answer.end(PATIENCE_S)
    wrong = judged(answer, truth)
    if wrong:
        raise NotSo(wrong)
    return answer


@dataclass
class Load:
    """`streams` clients that ask one question after the other, and what was wrong."""

    client: Client
    truth: dict[str, list[int]]
    streams: int
    num_done: int = 0
    wrong: list[str] = field(default_factory=list)
    longest_wait_s: float = 0.0
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)
    _ending: bool = False

    async def __aenter__(self) -> Load:
        self._tasks = [asyncio.ensure_future(self._ask(first)) for first in range(self.streams)]
        return self

    async def __aexit__(self, *error: object) -> None:
        """Every answer that was begun is waited for."""
        self._ending = True
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.gather(*self._tasks)

    async def _ask(self, first: int) -> None:
        for number in itertools.count(first):
            if self._ending:
                return
            answer = self.client.ask(Asked(PROMPTS[number % len(PROMPTS)], 24 + 16 * (number % 3)))
            await answer.end(PATIENCE_S)
            wrong = judged(answer, self.truth)
            self.num_done += 1
            self.longest_wait_s = max(self.longest_wait_s, answer.longest_wait_s)
            if wrong:
                self.wrong.append(wrong)

    def must_be_right(self) -> str:
        """What it came to, in words; NotSo when an answer was wrong or there was none."""
        said = f"{self.num_done} answers, longest wait {self.longest_wait_s:.1f} s"
        if self.wrong or not self.num_done:
            raise NotSo(f"{said}; {len(self.wrong)} wrong: {self.wrong[:3]}")
        return said
