"""Two hundred clients that leave at once, over real sockets, at moments of their requests' lives; others notice nothing.

What the decode worker does about it is counted in engine steps, which no slow machine changes; the wall bound is generous.
Until the moment comes steps are slow, so that on a crowded machine too no answer ends before the last client is there.
The exact bound of the whole is kept on virtual time (tests/faults/test_cancel.py); `python -m bench cancel` measures what it takes.
"""

import asyncio
import time
from dataclasses import dataclass, field

import pytest

from bench.cancel import GrpcClient, SseClient, still
from bench.cluster import ServedCluster
from contracts.pb.diptych.v1 import inference_pb2_grpc
from decode_service.outputs import AnswerState
from decode_service.worker import AnswerConfig
from engine.config import SchedulerConfig
from kv_transfer.config import ReceiverConfig, SenderConfig
from prefill_service.run import RunConfig
from router.config import AdmissionConfig, RegistryConfig
from rpc.channel import open_channel
from tests.integration.pools import Setup
from tests.integration.router_harness import MODEL, router_config
from tests.integration.test_router_pools import FAKE, PROMPT, served, tokens

NUM_LEAVING = 200
LEAVING_FROM = 200  # their prompts begin with this token and those above it, no other prompt has it
NUM_STAYING = 4
STEP_S = 0.02
SLOW_STEP_S = 0.25  # 300 tokens last 75 s
STEPS_BOUND = 2
WALL_BOUND_S = 30.0
STAYING_TOKENS = 40
IN_PREFILL = 120  # of them, which would take 150 steps
LARGE = SchedulerConfig(max_num_batched_tokens=4096, max_num_seqs=512)
SMALL = SchedulerConfig(max_num_batched_tokens=64, max_num_seqs=64)  # less than a prompt
# A busy machine may take its time; what is asked here is what is left when they have gone.
PATIENT = SenderConfig(reserve_timeout_s=60.0, call_timeout_s=60.0, commit_timeout_s=60.0, write_timeout_s=60.0)


@dataclass
class Watched:
    """A decode engine: when each cancel arrived and when its request had gone, in steps."""

    arrived: dict[str, int] = field(default_factory=dict)
    gone: dict[str, int] = field(default_factory=dict)

    def watch(self, worker) -> None:
        cancel, abort, driver = worker.desk.cancel, worker.driver._engine.abort, worker.driver

        def noting_cancel(session, *request_ids):
            for request_id in request_ids:
                if worker._book.state(request_id) is AnswerState.STREAMING:  # else its KV has not come
                    self.arrived.setdefault(request_id, driver.num_steps)
            cancel(session, *request_ids)

        def noting_abort(request_id):
            self.gone[request_id] = driver.num_steps
            return abort(request_id)

        worker.desk.cancel, worker.driver._engine.abort = noting_cancel, noting_abort


@dataclass(frozen=True)
class Case:
    """When they leave, and what makes that moment last."""

    scheduler: SchedulerConfig
    max_running: int
    ready: object  # of (workers, clients)


def prefill_is_full(workers, clients) -> bool:
    load = workers.prefill[0].worker.load()
    return load.num_waiting + load.num_running > IN_PREFILL


CASES = {
    # Half of them are not admitted yet, the others are on their way to the prefill worker or wait there.
    "queued": Case(SMALL, 100, lambda workers, clients: True),
    # One is in the middle of its prompt, a few have just been handed off, most wait.
    "prefill": Case(SMALL, 1000, prefill_is_full),
    # The first has its first token; hand-offs of the others are under way.
    "first": Case(LARGE, 1000, lambda workers, clients: any(client.num_events for client in clients)),
    "decode": Case(LARGE, 1000, lambda workers, clients: all(client.num_events > 1 for client in clients)),
}


async def free(served, num_blocks: int) -> bool:
    """Whether the engine holds no more than the staying may, and nobody else is in it."""

    def look(engine) -> bool:
        engine.check_integrity()
        load, inside = engine.load(), engine._roster._requests.values()
        return (
            load.kv_usage * num_blocks < NUM_STAYING * 9
            and load.num_waiting + load.num_running <= NUM_STAYING
            and not any(request.facts.prompt_token_ids[0] >= LEAVING_FROM for request in inside)
        )

    return await served.worker.driver.call(look)


async def pace(workers, step_s: float) -> None:
    """Let every engine's steps take this long from now on."""
    for each in (*workers.prefill, *workers.decode):
        await each.worker.driver.call(lambda engine: setattr(engine._runner, "_step_s", step_s))


@pytest.mark.parametrize("surface", ["sse", "grpc"])
@pytest.mark.parametrize("moment", CASES)
async def test_all_who_leave_at_once_are_gone_and_the_others_notice_nothing(tmp_path, surface, moment):
    case = CASES[moment]
    setup = Setup(
        model=FAKE,
        step_s=SLOW_STEP_S,
        scheduler=case.scheduler,
        prefill_blocks=4096,
        decode_blocks=4096,
        run=RunConfig(PATIENT),
        answers=AnswerConfig(ReceiverConfig(lease_s=120.0)),
    )
    config = router_config(
        tmp_path,
        request_timeout_s=120.0,
        admission=AdmissionConfig(case.max_running, 1024),
        registry=RegistryConfig(ttl_s=60.0),
    )
    async with served(tmp_path, setup, config) as (running, workers), open_channel(running.target) as channel:
        watched = Watched()
        watched.watch(workers.decode[0].worker)
        asked = [{"prompt": PROMPT[i:], "seed": i, "max_tokens": STAYING_TOKENS} for i in range(NUM_STAYING)]
        staying = [asyncio.create_task(tokens(running, **ask)) for ask in asked]
        cluster = ServedCluster(running.url, running.target, MODEL, ())
        stub = inference_pb2_grpc.InferenceStub(channel)
        clients = [SseClient(cluster) if surface == "sse" else GrpcClient(stub, MODEL) for _ in range(NUM_LEAVING)]
        prompts = [[LEAVING_FROM + i, *PROMPT] for i in range(NUM_LEAVING)]
        await asyncio.gather(*(c.send(prompt, 300) for c, prompt in zip(clients, prompts, strict=True)))
        async with asyncio.timeout(60):
            while still(clients) and not case.ready(workers, clients):
                await asyncio.sleep(0.005)
        began, step = time.monotonic(), workers.prefill[0].worker.driver.num_steps
        for client in clients:
            client.leave()
        await pace(workers, STEP_S)
        async with asyncio.timeout(WALL_BOUND_S):
            for pool in (workers.prefill, workers.decode):
                while not await free(pool[0], 4096):
                    await asyncio.sleep(0.005)
        print(f"{surface} {moment}: free after {time.monotonic() - began:.3f} s")
        if moment == "prefill":
            assert workers.prefill[0].worker.driver.num_steps - step < 100, "it computed for nobody"
        answers = [answer["choices"][0]["token_ids"] for answer in await asyncio.gather(*staying)]
        await workers.idle()  # hand-offs that were under way have come and gone as well
        assert moment != "decode" or len(watched.arrived) == NUM_LEAVING
        assert not set(watched.arrived) - set(watched.gone), "it decoded for nobody"
        steps = {i: watched.gone[i] - arrived for i, arrived in watched.arrived.items()}
        assert max(steps.values(), default=0) <= STEPS_BOUND, steps
        assert answers == [(await tokens(running, **ask))["choices"][0]["token_ids"] for ask in asked]
        await workers.idle()
        assert await running.metric("diptych_requests_running") == 0
        assert await running.metric("diptych_requests_waiting") == 0
