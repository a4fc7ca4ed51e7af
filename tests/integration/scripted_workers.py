"""Workers that speak the real protocol over real sockets, make tokens from a script, and break where a test says so.

The KV is not there: a commit is a message in this process. A token is a function of (prompt, seed, index), as in the real
engine, so a continuation elsewhere must give the answer that an undisturbed run gives.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace

import grpc

from contracts.clock import MonotonicClock
from contracts.errors import DiptychError, Draining, TransferFailed, WorkerLost
from contracts.kv_layout import KVLayout
from contracts.pb.diptych.v1 import decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc
from contracts.request import FinishReason, GenerationRequest, TokenDelta, TokenLogprob
from contracts.wire import (
    delta_to_pb,
    error_info,
    error_info_to_pb,
    handoff_stats_to_pb,
    request_from_pb,
    stages_to_pb,
)
from contracts.wire_handoff import worker_ref_to_pb
from contracts.worker import WorkerInfo, WorkerKind, WorkerLoad, WorkerRef
from observability.stages import HandoffStats, StageTimes
from rpc.announce import AnnounceConfig, Announcer, GrpcRegistryClient

LAYOUT = KVLayout("tiny", "float32", 4, 2, 32, 16)
EOS = 1
STATS = HandoffStats("local", kv_bytes=4096, num_writes=1, num_blocks=1, transfer_s=0.001, exposed_s=0.0005)
PREFILL_STAGES = StageTimes(prefill_queue_s=0.001, prefill_compute_s=0.002, transfer_s=0.0005)
DECODE_STAGES = StageTimes(decode_queue_s=0.0005, first_step_s=0.001)
ALONE_STAGES = (StageTimes(), DECODE_STAGES)


def token_at(request: GenerationRequest, index: int) -> int:
    """Never a mark, so an answer ends by length."""
    return 2 + (sum(request.prompt_token_ids) * 31 + request.sampling.seed * 7 + index * 13) % 1000


def says(token_ids) -> Callable[[GenerationRequest, int], int]:
    """A script that says these tokens and ends."""
    return lambda request, index: token_ids[index] if index < len(token_ids) else EOS


def answer(request: GenerationRequest) -> list[int]:
    return [token_at(request, i) for i in range(request.sampling.max_tokens)]


@dataclass
class Faults:
    """What shall go wrong. Each is used up by the request that meets it."""

    refuse: list[DiptychError] = field(default_factory=list)
    die_before_first: int = 0
    die_after_first: int = 0
    handoff_failures: list[DiptychError] = field(default_factory=list)
    die_after_tokens: int | None = None
    before_end: Callable[[int], Awaitable[None]] | None = (
        None  # awaited with the number of tokens before it dies or drains
    )
    drain_after_tokens: int | None = None  # of each request, from then on
    end_session_after_tokens: int | None = None  # in good order, without a word to who it carries
    skip_a_token: int = 0
    stall_before_handoff: bool = False
    wait_for_retarget: int = 0  # it does not get on with its hand-off, and notices nothing, until another target comes
    too_late: int = 0  # … when the commit is acknowledged already
    commit_before_first: bool = False  # the other connection is quicker
    books_late_s: float = 0.0  # handed_off comes that long after the commit
    no_books: bool = False  # the call ends without handed_off
    commit_unheard: asyncio.Event | None = None  # from when on it takes a commit that was made for a failed one
    hold: asyncio.Event = field(default_factory=asyncio.Event)  # cleared by a test to make the worker wait

    def __post_init__(self) -> None:
        self.hold.set()


class ScriptedWorker:
    def __init__(self, cluster: "Cluster", kind: WorkerKind, worker_id: str, epoch: int = 1) -> None:
        self.cluster, self.kind, self.ref = cluster, kind, WorkerRef(worker_id, epoch)
        self.faults = Faults()
        self.seen: list[GenerationRequest] = []  # what it was asked to run
        self.running: set[str] = set()
        self.attached: list[str] = []
        self.retargets: list[str] = []  # hand-off ids
        self.cancelled: list[str] = []
        self.load = WorkerLoad()
        self.info: WorkerInfo | None = None

    async def start(self) -> None:
        self.server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        if self.kind is WorkerKind.PREFILL:
            prefill_pb2_grpc.add_PrefillServicer_to_server(ScriptedPrefill(self), self.server)
        else:
            decode_pb2_grpc.add_DecodeServicer_to_server(ScriptedDecode(self), self.server)
        port = self.server.add_insecure_port("127.0.0.1:0")
        await self.server.start()
        self.info = WorkerInfo(
            self.ref, self.kind, f"127.0.0.1:{port}", self.cluster.model_name, LAYOUT, ("local",), 1024, 256
        )
        client = self.cluster.registry_client()
        self.announcer = Announcer(
            client, self.info, lambda: self.load, MonotonicClock(), AnnounceConfig(interval_s=0.1)
        )
        async with asyncio.timeout(10):
            while not await self.announcer.announce_once():  # its name may still be another's
                await asyncio.sleep(0.05)
        self._announcing = asyncio.create_task(self.announcer.run())

    async def mute(self) -> None:
        self._announcing.cancel()
        await asyncio.wait((self._announcing,))

    async def stop(self, leave: bool = False) -> None:
        await self.mute()
        if leave:
            await self.announcer.leave()
        else:
            await self.announcer._client.close()
        await self.server.stop(0)


class SessionDies(Exception):
    """The worker dies, with all that its sessions carry."""


class ScriptedPrefill(prefill_pb2_grpc.PrefillServicer):
    def __init__(self, worker: ScriptedWorker) -> None:
        self.worker, self.cluster, self.faults = worker, worker.cluster, worker.faults
        self.ref = worker_ref_to_pb(worker.ref)

    async def Session(self, commands, context):
        outbox: asyncio.Queue = asyncio.Queue()
        runs: dict[str, tuple[asyncio.Task, asyncio.Queue]] = {}

        async def listen():
            async for command in commands:
                match command.WhichOneof("command"):
                    case "run":
                        more: asyncio.Queue = asyncio.Queue()
                        task = asyncio.create_task(self.run(command.run, more, outbox))
                        runs[command.run.request.request_id] = task, more
                    case "retarget":
                        runs[command.retarget.request_id][1].put_nowait(command.retarget.target)
                    case "cancel":
                        for ident in command.cancel.request_ids:
                            runs[ident][0].cancel()

        listener = asyncio.create_task(listen())
        try:
            while (event := await outbox.get()) is not None:
                yield prefill_pb2.PrefillBatch(prefill=self.ref, events=[event])
            await context.abort(grpc.StatusCode.UNAVAILABLE, "prefill worker died")
        finally:
            for task in [listener, *(task for task, _ in runs.values())]:
                task.cancel()

    async def run(self, first, more, outbox):
        request = request_from_pb(first.request)
        self.worker.seen.append(request)
        self.worker.running.add(request.request_id)
        try:
            await self.faults.hold.wait()
            ended = prefill_pb2.PrefillEnded()
            try:
                async for event in self.events(request, first.target, more):
                    event.request_id = request.request_id
                    outbox.put_nowait(event)
            except SessionDies:
                outbox.put_nowait(None)
                return
            except DiptychError as refused:
                ended.error.CopyFrom(error_info_to_pb(error_info(refused)))
            outbox.put_nowait(prefill_pb2.PrefillEvent(request_id=request.request_id, ended=ended))
        except asyncio.CancelledError:
            self.worker.cancelled.append(request.request_id)
            raise
        finally:
            self.worker.running.discard(request.request_id)

    async def other_target(self, target, commands):
        """Where the hand-off goes in the end, and what is said of the first target, if a test wants another one to come."""
        if self.faults.stall_before_handoff:
            await asyncio.Event().wait()
        if not self.faults.wait_for_retarget:
            return target, []
        self.faults.wait_for_retarget -= 1
        aim = await commands.get()
        self.worker.retargets.append(aim.handoff_id)
        if self.faults.too_late:
            return target, []
        gone = prefill_pb2.HandoffFailed(
            handoff_id=target.handoff_id, error=error_info_to_pb(error_info(WorkerLost("gone"))), hold_s=10
        )
        return aim, [prefill_pb2.PrefillEvent(handoff_failed=gone)]

    async def books(self, target, commands):
        """What is said of a hand-off that is committed."""
        await asyncio.sleep(self.faults.books_late_s)
        if self.faults.no_books:
            return
        if self.faults.commit_unheard is not None:
            await self.faults.commit_unheard.wait()
            lost = error_info_to_pb(error_info(TransferFailed("no answer to the commit")))
            failed = prefill_pb2.HandoffFailed(handoff_id=target.handoff_id, error=lost, hold_s=10)
            yield prefill_pb2.PrefillEvent(handoff_failed=failed)
            while True:
                self.worker.retargets.append((await commands.get()).handoff_id)
        done = prefill_pb2.HandedOff(
            handoff_id=target.handoff_id, stats=handoff_stats_to_pb(STATS), stages=stages_to_pb(PREFILL_STAGES)
        )
        yield prefill_pb2.PrefillEvent(handed_off=done)

    async def events(self, request, target, commands):
        if self.faults.refuse:
            raise self.faults.refuse.pop()
        if self.faults.die_before_first:
            self.faults.die_before_first -= 1
            raise SessionDies
        delta = make_delta(self.cluster.script, request, request.request_id, len(request.output_token_ids))
        if delta.first_index == 0:
            delta = replace(delta, num_cached_tokens=self.cluster.num_cached_tokens, stages=PREFILL_STAGES)
        ticket = replace(request, output_token_ids=(*request.output_token_ids, *delta.token_ids))
        if self.faults.commit_before_first:
            self.cluster.commit(target.decode.worker_id, target.handoff_id).set_result(ticket)
            await asyncio.sleep(0.1)
        yield prefill_pb2.PrefillEvent(tokens=delta_to_pb(delta))
        if delta.finish_reason is not None:
            return
        if self.faults.die_after_first:
            self.faults.die_after_first -= 1
            raise SessionDies
        target, failed = await self.other_target(target, commands)
        for event in failed:
            yield event
        while self.faults.handoff_failures:
            failed = prefill_pb2.HandoffFailed(
                handoff_id=target.handoff_id,
                error=error_info_to_pb(error_info(self.faults.handoff_failures.pop())),
                hold_s=10,
            )
            yield prefill_pb2.PrefillEvent(handoff_failed=failed)
            aim = await commands.get()
            target = aim
        commit = self.cluster.commit(target.decode.worker_id, target.handoff_id)
        if not commit.done():
            commit.set_result(ticket)
        async for event in self.books(target, commands):
            yield event


class SessionEnd(TokenDelta):
    """Ends the session when its turn comes."""


class ScriptedDecode(decode_pb2_grpc.DecodeServicer):
    def __init__(self, worker: ScriptedWorker) -> None:
        self.worker, self.cluster, self.faults = worker, worker.cluster, worker.faults
        self.ref = worker_ref_to_pb(worker.ref)

    async def Session(self, commands, context):
        outbox: asyncio.Queue[TokenDelta | None] = asyncio.Queue()
        tasks: dict[str, asyncio.Task] = {}

        async def listen() -> None:
            async for command in commands:
                match command.WhichOneof("command"):
                    case "attach":
                        ident = command.attach.handoff_id
                        self.worker.attached.append(ident)
                        ticket = self.cluster.commit(self.worker.ref.worker_id, ident)
                        tasks[ident] = asyncio.create_task(self.go_on(ident, ticket, outbox))
                    case "generate":
                        request = request_from_pb(command.generate.request)
                        self.worker.seen.append(request)
                        tasks[request.request_id] = asyncio.create_task(self.run(request.request_id, request, outbox))
                    case "cancel":
                        self.worker.cancelled.extend(command.cancel.request_ids)
                        for ident in command.cancel.request_ids:
                            if ident in tasks:
                                tasks[ident].cancel()

        listener = asyncio.create_task(listen())
        try:
            while (delta := await outbox.get()) is not None:
                if isinstance(delta, SessionEnd):
                    return
                yield decode_pb2.DecodeBatch(decode=self.ref, deltas=[delta_to_pb(delta)])
            await context.abort(grpc.StatusCode.UNAVAILABLE, "decode worker died")
        finally:
            for task in [listener, *tasks.values()]:
                task.cancel()

    async def go_on(self, ident, ticket, outbox):
        await self.run(ident, await ticket, outbox, (DECODE_STAGES,))

    async def before_end(self, num_tokens):
        if self.faults.before_end is not None:
            await self.faults.before_end(num_tokens)

    async def run(self, ident, request, outbox, told=ALONE_STAGES):
        """`told` are the stages of its first tokens; alone it computes prompts in no time, which teaches a router nothing."""
        self.worker.running.add(ident)
        stages = list(told)
        try:
            if self.faults.refuse:
                info = error_info(self.faults.refuse.pop())
                outbox.put_nowait(TokenDelta(ident, 0, finish_reason=FinishReason.ERROR, error=info))
                return
            index = len(request.output_token_ids)
            began = index
            while True:
                await self.faults.hold.wait()
                await asyncio.sleep(self.cluster.step_s)
                if self.faults.drain_after_tokens == index - began:
                    await self.before_end(index)
                    info = error_info(Draining(f"{self.worker.ref.worker_id} is about to stop"))
                    outbox.put_nowait(TokenDelta(ident, 0, finish_reason=FinishReason.ERROR, error=info))
                    return
                if self.faults.end_session_after_tokens == index - began:
                    outbox.put_nowait(SessionEnd(ident, 0))
                    return
                if self.faults.die_after_tokens is not None:
                    self.faults.die_after_tokens -= 1
                    if self.faults.die_after_tokens < 0:
                        self.faults.die_after_tokens = None
                        await self.before_end(index)
                        outbox.put_nowait(None)
                        return
                if self.faults.skip_a_token:
                    self.faults.skip_a_token -= 1
                    index += 1
                delta = make_delta(self.cluster.script, request, ident, index)
                outbox.put_nowait(replace(delta, stages=stages.pop(0)) if stages else delta)
                if delta.finish_reason is not None:
                    return
                index += 1
        finally:
            self.worker.running.discard(ident)


def make_delta(script, request: GenerationRequest, ident: str, index: int) -> TokenDelta:
    token = script(request, index)
    sampling = request.sampling
    ended = token == EOS and not sampling.ignore_eos
    finish = FinishReason.STOP if ended else FinishReason.LENGTH if index + 1 >= sampling.max_tokens else None
    logprobs = ()
    if sampling.logprobs is not None:
        top = tuple((token + k, -0.5 - k) for k in range(sampling.logprobs))
        logprobs = (TokenLogprob(token, -0.5, 1, top),)
    prompt_logprobs = ()
    if sampling.prompt_logprobs is not None and index == 0:
        rest = tuple(TokenLogprob(t, -1.0, 2, ((5, -0.1),)) for t in request.prompt_token_ids[1:])
        prompt_logprobs = (None, *rest)
    return TokenDelta(
        ident,
        index,
        (token,),
        logprobs,
        prompt_logprobs,
        finish_reason=finish,
        stop_token_id=token if ended else None,
    )


class Cluster:
    """Scripted workers around one real router."""

    def __init__(self, registry_address: str, model_name: str) -> None:
        self.registry_address, self.model_name = registry_address, model_name
        self.script = token_at
        self.step_s = 0.0
        self.num_cached_tokens = 0
        self.workers: list[ScriptedWorker] = []
        self._commits: dict[tuple[str, str], asyncio.Future] = {}

    def registry_client(self):
        return GrpcRegistryClient(self.registry_address)

    def commit(self, worker_id: str, handoff_id: str) -> asyncio.Future:
        key = (worker_id, handoff_id)
        if key not in self._commits:
            self._commits[key] = asyncio.get_running_loop().create_future()
        return self._commits[key]

    async def add(self, kind: WorkerKind, worker_id: str, epoch: int = 1) -> ScriptedWorker:
        worker = ScriptedWorker(self, kind, worker_id, epoch)
        await worker.start()
        self.workers.append(worker)
        return worker

    async def pools(self, num_prefill: int, num_decode: int) -> tuple[list[ScriptedWorker], list[ScriptedWorker]]:
        prefill = [await self.add(WorkerKind.PREFILL, f"p{i}") for i in range(num_prefill)]
        decode = [await self.add(WorkerKind.DECODE, f"d{i}") for i in range(num_decode)]
        return prefill, decode

    async def idle(self, timeout_s: float = 20.0) -> None:
        """Return when no worker runs anything; TimeoutError when they go on."""
        async with asyncio.timeout(timeout_s):
            while any(worker.running for worker in self.workers):
                await asyncio.sleep(0.01)

    async def stop(self) -> None:
        for worker in self.workers:
            with contextlib.suppress(grpc.aio.UsageError):
                await worker.stop()
