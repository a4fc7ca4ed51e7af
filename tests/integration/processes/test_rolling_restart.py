"""Every worker of a 2P2D cluster is asked to stop and started again, one after the other, under load from both doors.

No request fails, every token is the one that an undisturbed engine gives, each worker leaves with exit code 0 within its time,
and of the answers that were on a decode worker then, those go on elsewhere that it does not wait for, and short ones end there
where it does.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import grpc
import pytest
from prometheus_client.parser import text_string_to_metric_families

from contracts import wire
from contracts.pb.diptych.v1 import inference_pb2 as pb
from contracts.pb.diptych.v1 import inference_pb2_grpc, types_pb2
from contracts.sampling import SamplingParams
from decode_service.config import DecodeConfig
from prefill_service.config import PrefillConfig
from rpc.channel import open_channel
from rpc.lifecycle import LifecycleConfig
from tests.integration.processes.children import Config, Nursery
from tests.integration.processes.client import TEMPERATURE, TOP_K, Answer, Question, question
from tests.integration.processes.cluster import WORKERS, Cluster, Setup

pytestmark = pytest.mark.slow
HASTY = LifecycleConfig(drain_limit_s=6.0, finish_share=0.0)  # how long an answer takes here is nobody's promise
PATIENT = LifecycleConfig(drain_limit_s=12.0, finish_share=0.6)  # on decode-1
NUM_CLIENTS = 6
LENGTHS = (8, 60, 700)  # most are under way at the last, which takes many times as long as a farewell
LIMIT_S = 60.0


class Rolling(Cluster):
    """A cluster whose workers drain quickly and are restarted one at a time."""

    def config(self, name: str) -> Config:
        """As ever, with a drain of its own."""
        config = super().config(name)
        if isinstance(config, PrefillConfig | DecodeConfig):
            return replace(config, worker=replace(config.worker, lifecycle=drain_of(name)))
        return config

    async def restart(self, name: str) -> float:
        """Ask it to stop, start it again, wait until the router knows its next life; seconds until it was gone."""
        child, began = self.children[name], time.monotonic()
        child.signal(signal.SIGTERM)
        async with asyncio.timeout(drain_of(name).drain_limit_s + 5):
            await child.ended.wait()
        took_s = time.monotonic() - began
        assert child.code == 0, self.logs()
        self._epochs[name] += 1
        self.children[name] = await self._nursery.start(name, self.config(name))
        await self.until(self._is_whole, f"{name} is back")
        self._epochs = await self._known()
        return took_s

    async def failed_and_drained(self) -> tuple[float, float, float]:
        """Attempts that failed, and that a draining worker gave up before the first token and after it."""
        text = (await self._http.get(f"http://127.0.0.1:{self.doors['router'].ports['http'].port}/metrics")).text
        samples = [s for family in text_string_to_metric_families(text) for s in family.samples]

        def total(name: str, **labels: str) -> float:
            return sum(s.value for s in samples if s.name == name and labels.items() <= s.labels.items())

        failed = total("diptych_failed_attempts_total")
        drained = [total("diptych_drained_attempts_total", when=w) for w in ("before_first_token", "mid_answer")]
        return failed, drained[0], drained[1]


def drain_of(name: str) -> LifecycleConfig:
    """How this worker drains."""
    return PATIENT if name == "decode-1" else HASTY


@dataclass
class Load:
    """Clients that ask one question after the other, each at its own door, until they are told to stop."""

    made: Rolling
    answers: list[Answer] = field(default_factory=list)
    stopping: bool = False

    async def one_client(self, number: int, stub: inference_pb2_grpc.InferenceStub) -> None:
        """The longest greedily; even numbers over HTTP, odd ones over gRPC.

        Lengths by lot: in turn, clients that were held up together would go on in step, all at long answers at once.
        """
        lot = random.Random(number)
        for turn in itertools.count():
            if self.stopping:
                return
            length = lot.choice(LENGTHS)
            asked = question(f"rolling {number} {turn}", 20 + number, length, seeded=length < max(LENGTHS))
            if number % 2 == 0:
                answer = self.made.client.ask(asked)
                self.answers.append(answer)
                await answer.end(LIMIT_S)
            else:
                answer = Answer(asked)
                self.answers.append(answer)
                await ask_grpc(stub, answer)

    def at(self, decode: str) -> list[Answer]:
        """Those whose first attempt is on this decode worker, and whose first token has come, but not their last."""
        return [
            a
            for a in self.answers
            if a.token_ids and not a.over and self.made.routes[a.question.prompt][0][1] == decode
        ]

    def migrated(self, answer: Answer) -> bool:
        """Whether more than one attempt was made over both pools."""
        return len(self.made.routes[answer.question.prompt]) > 1


async def ask_grpc(stub: inference_pb2_grpc.InferenceStub, answer: Answer) -> None:
    """Stream one answer over gRPC."""
    asked = answer.question
    sampling = wire.sampling_to_pb(sampling_of(asked))
    try:
        call = stub.Generate(
            pb.GenerateRequest(token_ids=pb.TokenIds(ids=asked.prompt), sampling=sampling), timeout=LIMIT_S
        )
        async for piece in call:
            answer.token_ids += piece.token_ids
            if piece.finish_reason == types_pb2.FINISH_REASON_LENGTH:
                answer.finish_reason = "length"
        answer.status = 200
    except grpc.aio.AioRpcError as error:
        answer.error = f"{error.code().name}: {error.details()}"
    answer.over = True


def sampling_of(asked: Question) -> SamplingParams:
    """How its tokens are chosen, as over HTTP."""
    greedy = SamplingParams(temperature=0.0, max_tokens=asked.max_tokens, ignore_eos=True)
    return greedy if asked.seed is None else replace(greedy, temperature=TEMPERATURE, top_k=TOP_K, seed=asked.seed)


async def truths(made: Rolling, answers: Sequence[Answer]) -> list[list[int]]:
    """What the engine that nobody disturbed gives for each."""
    few = asyncio.Semaphore(16)

    async def truth(answer: Answer) -> list[int]:
        async with few:
            return await made.truth(answer.question)

    return await asyncio.gather(*map(truth, answers))


@asynccontextmanager
async def load(made: Rolling) -> AsyncIterator[Load]:
    """All clients at work; they end their last answers before this is left."""
    async with open_channel(made.doors["router"].ports["grpc"].local_address) as channel:
        at_work = Load(made)
        stub = inference_pb2_grpc.InferenceStub(channel)
        clients = [asyncio.create_task(at_work.one_client(number, stub)) for number in range(NUM_CLIENTS)]
        try:
            yield at_work
        finally:
            at_work.stopping = True
            await asyncio.gather(*clients)


@pytest.mark.timeout(300)  # four drains and four starts, one after the other
async def test_a_rolling_restart_under_load_fails_no_request(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        made = Rolling(Setup("shm"), await stack.enter_async_context(Nursery(tmp_path)))
        await made.open(stack)
        here: dict[str, list[Answer]] = {}
        async with load(made) as at_work:
            for name in WORKERS:
                await made.until(busy(at_work, name), f"answers of all lengths are under way, at {name} if it decodes")
                here[name] = at_work.at(name)
                took_s = await made.restart(name)
                assert took_s < drain_of(name).drain_limit_s, name
        for answer in at_work.answers:
            assert (answer.broken, answer.error, answer.status) == (None, None, 200), made.logs()
            assert answer.finish_reason == "length"
        assert [answer.token_ids for answer in at_work.answers] == await truths(made, at_work.answers)
        failed, _, mid_answer = await made.failed_and_drained()
        assert failed == 0, made.logs()
        assert mid_answer >= sum(map(at_work.migrated, here["decode-0"])) > 0, (
            "who was not waited for went on elsewhere"
        )
        assert not all(map(at_work.migrated, here["decode-1"])), "short ones ended where they were"
        await made.idle()
        made.check_nothing_leaked()


def busy(at_work: Load, name: str) -> Callable[[], Awaitable[bool]]:
    """Whether every client waits for an answer, and a decode worker has a short one and has just begun a long one."""

    async def look() -> bool:
        if sum(not answer.over for answer in at_work.answers) < NUM_CLIENTS:
            return False
        here = at_work.at(name)
        short = any(answer.question.max_tokens == LENGTHS[1] for answer in here)
        long = any(answer.question.max_tokens == LENGTHS[2] > 6 * len(answer.token_ids) for answer in here)
        return not name.startswith("decode") or (short and long)

    return look
