"""A cluster with a secret over real connections: what strangers say, alter or say again is refused, counted, and harms nobody."""

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace

import grpc
import pytest
from google.protobuf.descriptor import FieldDescriptor

from contracts import wire_commit, wire_handoff
from contracts.clock import MonotonicClock
from contracts.errors import NotOfThisCluster, Unavailable, UnknownHandoff
from contracts.pb.diptych.v1 import decode_pb2, decode_pb2_grpc, handoff_pb2, registry_pb2
from contracts.prefill import Target
from contracts.request import GenerationRequest
from contracts.sampling import SamplingParams
from contracts.secret import ClusterSecret
from contracts.ticket import AbortRequest, ConnectRequest, RenewRequest, ReserveRequest, Ticket
from contracts.worker import WorkerInfo, WorkerKind, WorkerLoad, WorkerRef
from decode_service.decode_servicer import DecodeServicer
from decode_service.handoff_servicer import HandoffServicer
from decode_service.worker import AnswerConfig, DecodeWorker
from engine.config import EngineConfig
from engine.engine import Engine
from engine.execution.fake import FakeModel, FakeRunner
from kv_transfer.config import ReceiverConfig
from kv_transfer.connector import Write
from kv_transfer.links import Side
from kv_transfer.local import LocalConnector, LocalHub
from kv_transfer.region import SharedRegion
from observability.stages import StageTimes
from prefill_service.peer import GrpcPeer
from router.config import AccessConfig
from router.serving.inbox import Inbox
from router.serving.legs import DecodeSession, PrefillLine
from router.workers.breakers import blames_worker
from rpc.announce import Announcer, GrpcRegistryClient
from rpc.call_proof import CallProver
from rpc.channel import open_channel, wait_connected
from rpc.errors import from_rpc_error
from rpc.proof_guard import ProofGuard
from rpc.proving_channel import ProvingChannel, proving
from rpc.secret_file import read_secret, write_new_secret
from rpc.server import RpcServer, ServerConfig
from tests.integration.router_harness import MODEL as SERVED
from tests.integration.router_harness import router_config, running_router
from tests.integration.scripted_workers import LAYOUT

SECRET, OTHER = ClusterSecret(b"the secret of one cluster"), ClusterSecret(b"the secret of another")
MODEL = FakeModel(max_model_len=256)
NUM_BLOCKS = 16
P, D = WorkerRef("p", 1), WorkerRef("d", 7)
HANDOFF = "/diptych.v1.Handoff/"
NUM_TOKENS = 40


class DecodeSide:
    """One life of a decode worker behind gRPC, with a secret."""

    def __init__(self, secret=SECRET, lease_s=10.0):
        clock = MonotonicClock()
        self.region, self.hub = SharedRegion(NUM_BLOCKS * MODEL.layout.block_bytes), LocalHub()
        self.source_region = SharedRegion(NUM_BLOCKS * MODEL.layout.block_bytes)
        connector, self.source = LocalConnector(self.hub, clock), LocalConnector(self.hub, clock)
        connector.expose(self.region)
        self.source.expose(self.source_region)
        runner = FakeRunner(MODEL, NUM_BLOCKS, self.region.buffer, step_s=0.0, strict=False)
        self.engine = Engine(runner, EngineConfig(), clock)
        config = AnswerConfig(ReceiverConfig(lease_s=lease_s, sweep_every_s=0.02))
        self.worker = DecodeWorker(Side(D, MODEL.layout, [connector], clock), self.engine, config)
        self.guard = None if secret is None else ProofGuard(secret)
        self.server = RpcServer(ServerConfig(), (), () if self.guard is None else (self.guard,))
        decode_pb2_grpc.add_DecodeServicer_to_server(DecodeServicer(self.worker.desk), self.server.grpc_server)
        handoff_pb2_grpc_add(HandoffServicer(self.worker.receiver), self.server.grpc_server)
        self.refused = []

    async def __aenter__(self):
        if self.guard is not None:
            self.guard.on_refused = self.refused.append
            self.guard.serve(self.server.grpc_server)
        self.worker.start()
        self.address = f"127.0.0.1:{await self.server.start()}"
        self.stranger = open_channel(self.address)
        self.channel = proving(open_channel, SECRET)(self.address)
        self.peer = GrpcPeer(D, self.address, proving(open_channel, SECRET))
        return self

    async def __aexit__(self, *_):
        for channel in (self.stranger, self.channel, self.peer):
            await channel.close()
        await self.server.stop(0)
        await self.worker.stop()
        await self.source.close()

    async def used(self):
        """The share of KV memory that is in use; the books must add up."""

        def look(engine):
            engine.check_integrity()
            return engine.load().kv_usage

        return await self.worker.driver.call(look)

    async def free(self):
        async with asyncio.timeout(5):
            while await self.used() > 0:
                await asyncio.sleep(0.01)

    async def granted(self, handoff_id="h"):
        grant = await self.peer.reserve(ReserveRequest(handoff_id, P, D, NUM_TOKENS, ()))
        address, key = grant.windows[0]
        size = MODEL.layout.block_bytes
        await self.source.write(address, key, [Write(0, block * size, size) for block in grant.block_ids])
        return grant

    async def say(self, method, message, token=None):
        """One call of a stranger, with what he has heard; DiptychError when it is refused."""
        body = message if isinstance(message, bytes) else message.SerializeToString()
        metadata = [] if token is None else [token]
        try:
            return await self.stranger.unary_unary(method)(body, metadata=metadata, timeout=5)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error, "it") from error


def handoff_pb2_grpc_add(servicer, server):
    from contracts.pb.diptych.v1 import handoff_pb2_grpc

    handoff_pb2_grpc.add_HandoffServicer_to_server(servicer, server)


def ticket_request(handoff_id="h"):
    return GenerationRequest(
        request_id=handoff_id,
        prompt_token_ids=tuple(range(NUM_TOKENS)),
        sampling=SamplingParams(max_tokens=2, seed=5, stop_token_ids=(9,)),
        output_token_ids=(3,),
        deadline_s=30.0,
    )


def ticket(grant, handoff_id="h"):
    return Ticket(
        handoff_id=handoff_id,
        prefill=P,
        decode=D,
        layout=MODEL.layout,
        request=ticket_request(handoff_id),
        num_computed_tokens=NUM_TOKENS,
        num_cached_tokens=1,
        window_key=grant.windows[0][1],
        stages=StageTimes(prefill_compute_s=0.5),
    )


def commit_of(grant, handoff_id="h"):
    return handoff_pb2.CommitRequest(ticket=wire_commit.ticket_to_pb(ticket(grant, handoff_id)))


REQUESTS = {
    "Connect": wire_handoff.connect_to_pb(ConnectRequest(P, D, MODEL.layout)),
    "Reserve": wire_handoff.reserve_to_pb(ReserveRequest("another", P, D, NUM_TOKENS, ())),
    "Renew": wire_handoff.renew_to_pb(RenewRequest(P, D, ("h",))),
    "Abort": wire_handoff.abort_to_pb(AbortRequest("h", P, D, "I say so")),
}


async def test_a_whole_hand_off_of_this_cluster_and_a_stranger_beside_it():
    async with DecodeSide() as decode:
        await decode.peer.connect(ConnectRequest(P, D, MODEL.layout))
        grant = await decode.granted()
        used = await decode.used()
        for method, message in (*REQUESTS.items(), ("Commit", commit_of(grant))):
            with pytest.raises(NotOfThisCluster, match="--cluster-secret-file"):
                await decode.say(HANDOFF + method, message)
        assert await decode.used() == used, "nothing taken, nothing given back"
        assert sorted(decode.refused) == sorted(HANDOFF + m for m in (*REQUESTS, "Commit"))
        renewed = await decode.peer.renew(RenewRequest(P, D, ("h",)))
        assert renewed.lost_handoff_ids == ()
        assert (await decode.peer.commit(ticket(grant))).num_blocks == len(grant.block_ids)
        assert (await decode.peer.commit(ticket(grant))).num_blocks == len(grant.block_ids), (
            "asked again, as a sender may"
        )


async def test_each_call_counts_once_also_after_its_hand_off_is_forgotten():
    async with DecodeSide() as decode:
        session = await decode.channel.session()
        heard = []

        async def said(method, message):
            body = message.SerializeToString()
            heard.append((HANDOFF + method, body, session.token(HANDOFF + method, body)))
            return await decode.say(*heard[-1])

        await said("Connect", REQUESTS["Connect"])
        await said("Reserve", REQUESTS["Reserve"])
        await said("Renew", REQUESTS["Renew"])
        await said("Abort", wire_handoff.abort_to_pb(AbortRequest("another", P, D, "over")))
        await decode.free()
        for call in heard:
            with pytest.raises(NotOfThisCluster, match="heard before"):
                await decode.say(*call)
        assert await decode.used() == 0
        decode.guard._prover = CallProver(SECRET)  # what a restart does
        for call in heard:
            with pytest.raises(NotOfThisCluster, match="earlier life"):
                await decode.say(*call)
        assert await decode.used() == 0
        assert len(decode.refused) == 2 * len(heard)


def leaves(message, path=()):
    """Every field of a message that could be altered, as a way to it."""
    for field in message.DESCRIPTOR.fields:
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            if field.is_repeated:
                continue
            yield from leaves(getattr(message, field.name), (*path, field.name))
        else:
            yield (*path, field.name)


def altered(message, path):
    """A copy with this one field changed."""
    changed = type(message)()
    changed.CopyFrom(message)
    at = changed
    for name in path[:-1]:
        at = getattr(at, name)
    field = at.DESCRIPTOR.fields_by_name[path[-1]]
    value = getattr(at, path[-1])
    other = {
        FieldDescriptor.CPPTYPE_STRING: b"x" if field.type == FieldDescriptor.TYPE_BYTES else "x",
        FieldDescriptor.CPPTYPE_BOOL: True,
        FieldDescriptor.CPPTYPE_DOUBLE: 0.25,
        FieldDescriptor.CPPTYPE_FLOAT: 0.25,
    }.get(field.cpp_type, 1)
    if field.is_repeated:
        value.append(other)
    elif field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
        setattr(at, path[-1], not value)
    else:
        setattr(at, path[-1], value + other)
    return changed


async def test_a_ticket_that_is_altered_in_any_field_is_refused_and_the_true_one_still_redeems_its_grant():
    async with DecodeSide() as decode:
        grant = await decode.granted()
        true = commit_of(grant)
        session, method = await decode.channel.session(), HANDOFF + "Commit"
        ways = list(leaves(true))
        assert ("ticket", "window_key") in ways
        assert len(ways) > 30
        for way in ways:
            with pytest.raises(NotOfThisCluster, match="proof is wrong"):
                await decode.say(method, altered(true, way), session.token(method, true.SerializeToString()))
        for name in ("Abort", "Reserve"):  # and a proof is of one method
            with pytest.raises(NotOfThisCluster, match="proof is wrong"):
                await decode.say(
                    HANDOFF + name, REQUESTS[name], session.token(method, REQUESTS[name].SerializeToString())
                )
        assert len(decode.refused) == len(ways) + 2
        await decode.say(method, true, session.token(method, true.SerializeToString()))


async def test_a_ticket_is_of_one_grant_and_its_lease():
    async with DecodeSide(lease_s=0.2) as decode:
        grant = await decode.granted()
        await decode.free()  # by the decode worker's own clock
        with pytest.raises(UnknownHandoff, match="lease"):
            await decode.peer.commit(ticket(grant))
        other = await decode.granted("h2")
        with pytest.raises(Exception, match="another grant"):
            await decode.peer.commit(replace(ticket(grant, "h2"), window_key=grant.windows[0][1]))
        assert other.windows[0][1] != grant.windows[0][1]
        await decode.free()


@pytest.mark.parametrize(
    ("theirs", "ours", "said"),
    [
        (OTHER, SECRET, "another cluster secret"),
        (None, SECRET, "it has no cluster secret"),
        (SECRET, None, "the caller proves nothing"),
    ],
)
async def test_another_secret_on_one_side_is_named_at_the_connect(theirs, ours, said):
    async with DecodeSide(theirs) as decode:
        peer = GrpcPeer(D, decode.address, proving(open_channel, ours))
        for _ in range(2):  # a failed beginning is not remembered
            with pytest.raises(NotOfThisCluster, match=said):
                await peer.connect(ConnectRequest(P, D, MODEL.layout))
        assert await decode.used() == 0
        await peer.close()


async def test_sessions_of_decode_prove_themselves_and_find_a_new_life():
    async with DecodeSide() as decode:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await decode_pb2_grpc.DecodeStub(decode.stranger).Session(timeout=5).read()
        assert isinstance(from_rpc_error(caught.value, "it"), NotOfThisCluster)
        await wait_connected(decode.channel, decode.address, 5)
        stub = decode_pb2_grpc.DecodeStub(decode.channel)
        one = stub.Session()
        await one.write(decode_pb2.DecodeCommand(decode=wire_handoff.worker_ref_to_pb(WorkerRef("d", 6))))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await one.read()
        assert "epoch" in caught.value.details(), "it was heard"
        decode.guard._prover = CallProver(SECRET)
        first = stub.Session()  # it finds out
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in first:
                pass
        assert isinstance(from_rpc_error(caught.value, "it"), NotOfThisCluster)
        second = stub.Session()  # it begins anew
        await second.write(decode_pb2.DecodeCommand(decode=wire_handoff.worker_ref_to_pb(WorkerRef("d", 6))))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in second:
                pass
        assert "epoch" in caught.value.details()
        second.cancel()
        early = stub.Session()
        assert early.cancel() is False
        with pytest.raises(asyncio.CancelledError):
            await early.read()


async def test_calls_that_do_not_stream_find_a_new_life_by_themselves():
    async with DecodeSide() as decode:
        for _ in range(3):
            await decode.peer.connect(ConnectRequest(P, D, MODEL.layout))
            decode.guard._prover = CallProver(SECRET)
        await asyncio.gather(*(decode.peer.connect(ConnectRequest(P, D, MODEL.layout)) for _ in range(20)))


@pytest.mark.parametrize(("theirs", "ours"), [(OTHER, SECRET), (SECRET, None), (None, SECRET)])
async def test_a_worker_of_another_cluster_costs_a_request_an_attempt_and_is_no_workers_death(theirs, ours):
    """It may have got into a shared registry. A request that meets it goes on elsewhere; its breaker hears of it."""
    async with DecodeSide(theirs) as decode:
        channel, inboxes = proving(open_channel, ours)(decode.address), (Inbox(), Inbox())
        info = WorkerInfo(D, WorkerKind.DECODE, decode.address, SERVED, LAYOUT, ("local",), 1024, 256)
        session = DecodeSession(info, channel, 3.0, lambda lost: None)
        session.attach("h", 5.0, inboxes[0])
        leg = PrefillLine(info, channel, 3.0).leg(inboxes[1])
        both = theirs is not None and ours is not None
        if both:  # a decode worker has no such service: it comes to the challenge only
            leg.start(ticket_request(), Target("h", D, decode.address))
        for inbox in inboxes if both else inboxes[:1]:
            error = (await inbox.get()).error
            assert type(error) is Unavailable
            assert "secret" in error.message
            assert blames_worker(error)
        session.close("over")
        await channel.close()


# The router's registry


@asynccontextmanager
async def router_with_secret(tmp_path, secret=SECRET):
    async with running_router(router_config(tmp_path, access=AccessConfig(secret=secret))) as running:
        yield running


INFO = WorkerInfo(WorkerRef("w", 3), WorkerKind.DECODE, "127.0.0.1:9", SERVED, LAYOUT, ("local",), 1024, 256)


def client(running, secret):
    return GrpcRegistryClient(running.target, opener=proving(open_channel, secret))


async def test_nobody_can_announce_or_dismiss_a_worker_without_the_secret(tmp_path, caplog):
    async with router_with_secret(tmp_path) as running:
        ours, none, other = (client(running, secret) for secret in (SECRET, None, OTHER))
        assert await ours.announce(INFO, WorkerLoad()) > 0
        for stranger, said in ((none, "proves nothing"), (other, "another cluster secret")):
            with pytest.raises(NotOfThisCluster, match=said):
                await stranger.announce(replace(INFO, ref=WorkerRef("evil", 1)), WorkerLoad())
            with pytest.raises(NotOfThisCluster):
                await stranger.leave(INFO.ref)
        (worker,) = running.router._registry.workers()
        assert worker.info == INFO
        assert await running.metric("diptych_refused_calls_total", method="/diptych.v1.Registry/Announce") == 1
        assert await running.metric("diptych_refused_calls_total", method="/diptych.v1.Registry/Leave") == 1
        assert "a call was refused" in caplog.text
        announcer = Announcer(none, INFO, WorkerLoad, MonotonicClock())
        assert not await announcer.announce_once()
        await ours.leave(INFO.ref)
        assert running.router._registry.workers() == ()
        for each in (ours, none, other):
            await each.close()


@pytest.mark.parametrize(
    ("theirs", "ours"), [(OTHER, SECRET), (SECRET, None), (None, SECRET), (SECRET, SECRET), (None, None)]
)
async def test_a_worker_of_another_cluster_that_is_in_the_registry_is_not_counted_ready(tmp_path, theirs, ours, caplog):
    """It may have got into a shared registry, whatever it says there."""
    async with DecodeSide(theirs) as decode, router_with_secret(tmp_path, ours) as running:
        info = WorkerInfo(D, WorkerKind.DECODE, decode.address, SERVED, LAYOUT, ("local",), 1024, 256)
        await running.router._registry.announce(info, WorkerLoad())
        async with asyncio.timeout(10):
            while not (theirs is ours or "not of this cluster" in caplog.text):
                await asyncio.sleep(0.02)
        await asyncio.sleep(0.2 if theirs is ours else 0.0)
        for _ in range(2):
            report = (await running.http.get("/health")).json()
            assert report["ready"]["decode"] == (1 if theirs is ours else 0)
            assert report["status"] == ("ok" if theirs is ours else "unavailable")
            assert ("no decode worker is ready (1 suspect)" in report["missing"]) is (theirs is not ours)
            await running.router._registry.announce(info, WorkerLoad())


async def test_users_need_no_secret_and_strangers_learn_nothing_by_altering_an_announcement(tmp_path):
    async with router_with_secret(tmp_path) as running:
        channel = ProvingChannel(open_channel(running.target), SECRET, running.target)
        session, method = await channel.session(), "/diptych.v1.Registry/Announce"
        true = registry_pb2.AnnounceRequest(
            info=wire_handoff.worker_info_to_pb(INFO), load=wire_handoff.worker_load_to_pb(WorkerLoad())
        )
        token = session.token(method, true.SerializeToString())
        async with open_channel(running.target) as stranger:
            for way in leaves(true):
                with pytest.raises(grpc.aio.AioRpcError):
                    await stranger.unary_unary(method)(altered(true, way).SerializeToString(), metadata=[token])
            assert running.router._registry.workers() == ()
            await stranger.unary_unary(method)(true.SerializeToString(), metadata=[token])
        assert (await running.http.get("/v1/models")).status_code == 200
        await channel.close()


def test_a_secret_file_is_read_whole_or_refused_by_name(tmp_path, caplog):
    from contracts.errors import ConfigError

    good = tmp_path / "secret"
    write_new_secret(good)
    assert good.stat().st_mode & 0o077 == 0
    key = read_secret(good, "--flag").key("x")
    text = good.read_bytes().strip()
    assert key.proves(ClusterSecret(text).key("x").proof(b"1"), b"1"), "a line's end is no part of it"
    with pytest.raises(FileExistsError):
        write_new_secret(good)
    for name, content, said in (
        ("short", b"123\n", "3 bytes"),
        ("long", b"x" * 5000, "no secret"),
        ("gone", None, "No such"),
    ):
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(ConfigError, match=rf"--flag: .*{name}.*{said}"):
            read_secret(tmp_path / name, "--flag")
    for mode, may in ((0o600, ""), (0o640, ""), (0o644, "read"), (0o620, "write"), (0o646, "read and write")):
        caplog.clear()
        good.chmod(mode)
        read_secret(good, "--flag")
        said = f"--flag: {good}: others than its owner can {may} the cluster's secret"
        assert [record.getMessage() for record in caplog.records] == ([said] if may else [])
