"""Both gRPC clients against a real router: what they give, what they raise, and that leaving frees everything."""

import asyncio
import gc
import threading
import time
from dataclasses import replace

import grpc
import pytest

from contracts.pb.diptych.v1 import inference_pb2 as pb
from diptych_client import (
    AsyncClient,
    Cancelled,
    Client,
    DeadlineExceeded,
    InvalidArgument,
    MessageTooLarge,
    NotFound,
    Overloaded,
    RpcFailed,
    Unavailable,
    user,
)
from router.config import AdmissionConfig
from tests.integration.router_harness import MODEL, router_config, running_router
from tests.integration.test_router_grpc import PROMPT, TOKENS


@pytest.fixture
async def served(tmp_path):
    config = router_config(tmp_path, admission=AdmissionConfig(max_running=1, max_waiting=0))
    async with running_router(config) as running:
        await running.cluster.pools(1, 1)
        yield running


async def in_thread(work):
    """The synchronous client may not stop the router's loop."""
    return await asyncio.to_thread(work)


async def test_tokens_text_and_usage(served):
    async with AsyncClient(served.target) as client:
        stream = client.generate(PROMPT, max_tokens=6, seed=3, request_id="mine", timeout_s=5)
        pieces = [piece async for piece in stream]
        assert {piece.request_id for piece in pieces} == {"mine"}
        assert [i for piece in pieces for i in piece.token_ids] == TOKENS
        assert stream.request.request_id == "mine"
        got = await client.generate(PROMPT, max_tokens=6, seed=3).answer()

    def ask():
        with Client(served.target) as client:
            return client.generate(PROMPT, max_tokens=6, seed=3).answer()

    for answer in (got, await in_thread(ask)):
        assert (answer.token_ids, answer.text, answer.finish_reason) == (TOKENS, served.text(TOKENS), "length")
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 6)
        assert answer.last.HasField("stages")


async def test_several_answers_text_and_conversations(served):
    async with AsyncClient(served.target) as client:
        answers = await client.generate("Emma was", max_tokens=4, seed=1, n=2).answers()
        assert [a.index for a in answers] == [0, 1]
        assert answers[0].token_ids != answers[1].token_ids
        chat = await client.generate([user("hi")], max_tokens=4, seed=1).answer()
        assert chat.usage.prompt_tokens == len(served.ids("user: hi\nassistant:"))


async def test_models(served):
    async with AsyncClient(served.target) as client:
        assert [(m.name, m.max_model_len) for m in await client.models()] == [(MODEL, 1024)]

    def ask():
        with Client(served.target) as client:
            return [m.name for m in client.models()]

    assert await in_thread(ask) == [MODEL]


async def test_what_is_refused_names_its_field(served):
    async with AsyncClient(served.target) as client:
        with pytest.raises(InvalidArgument) as caught:
            await client.generate(PROMPT, top_p=2.0).answer()
        assert [v.field for v in caught.value.violations] == ["sampling.top_p"]
        assert "got 2" in caught.value.violations[0].description
        with pytest.raises(InvalidArgument) as caught:
            await client.generate([]).answer()
        assert [v.field for v in caught.value.violations] == ["token_ids"]
        with pytest.raises(NotFound, match="other"):
            await client.generate(PROMPT, model="other").answer()

    def ask():
        with Client(served.target) as client, pytest.raises(InvalidArgument) as caught:
            client.generate(PROMPT, max_tokens=0).answer()
        return caught.value

    assert [v.field for v in (await in_thread(ask)).violations] == ["sampling.max_tokens"]


async def test_a_stream_that_is_left_frees_what_it_holds(served):
    served.cluster.step_s = 0.02
    async with AsyncClient(served.target) as client:
        async with client.generate(PROMPT, max_tokens=900) as stream:
            async for _ in stream:
                break
        await served.cluster.idle(timeout_s=3.0)

    def leave():
        with Client(served.target) as client, client.generate(PROMPT, max_tokens=900) as stream:
            return next(iter(stream)).token_ids

    assert await in_thread(leave)
    await served.cluster.idle(timeout_s=3.0)


async def test_cancelling_while_another_reads_is_said_to_the_reader(served):
    served.cluster.step_s = 0.02
    async with AsyncClient(served.target) as client:
        stream = client.generate(PROMPT, max_tokens=900)
        with pytest.raises(Cancelled):
            async for _ in stream:
                stream.cancel()
        await served.cluster.idle(timeout_s=3.0)

    def cancel():
        with Client(served.target) as client:
            stream = client.generate(PROMPT, max_tokens=900)
            threading.Timer(0.1, stream.cancel).start()
            with pytest.raises(Cancelled):
                stream.answer()

    await in_thread(cancel)
    await served.cluster.idle(timeout_s=3.0)


async def test_what_is_too_large_for_grpc_is_no_overload(served):
    long = "x" * (65 * 2**20)
    async with AsyncClient(served.target) as client:
        with pytest.raises(MessageTooLarge, match="larger than max"):
            await client.tokenize(long)
        with pytest.raises(MessageTooLarge, match="larger than max"):
            await client.generate(long).answer()


async def test_a_loop_that_is_left_ends_the_call(served):
    served.cluster.step_s = 0.02
    async with AsyncClient(served.target) as client:
        stream = client.generate(PROMPT, max_tokens=900)
        async for _ in stream:
            break
        await served.cluster.idle(timeout_s=3.0)
        with pytest.raises(Cancelled):
            await stream.answer()

    def leave():
        with Client(served.target) as client:
            stream = client.generate(PROMPT, max_tokens=900)
            for _ in stream:
                break
            with pytest.raises(Cancelled):
                stream.answer()

    await in_thread(leave)
    await served.cluster.idle(timeout_s=3.0)


async def test_a_client_that_is_closed_says_so_to_its_readers(served):
    served.cluster.step_s = 0.02
    client = AsyncClient(served.target)
    reading = aiter(client.generate(PROMPT, max_tokens=900))
    await anext(reading)
    await client.close()
    with pytest.raises(Cancelled):
        async for _ in reading:
            pass
    await served.cluster.idle(timeout_s=3.0)


async def test_a_stream_that_nobody_reads_or_has_any_more_ends(served):
    served.cluster.step_s = 0.02
    async with AsyncClient(served.target) as client:
        stream = client.generate(PROMPT, max_tokens=900)
        async with asyncio.timeout(3):
            while not any(worker.running for worker in served.cluster.workers):
                await asyncio.sleep(0.01)
        del stream
        gc.collect()
        await served.cluster.idle(timeout_s=3.0)


async def test_outside_of_an_event_loop_nothing_is_sent_and_nothing_is_left_behind(served):
    """What is left behind would be a stream that cannot even be collected: that is an error here."""
    client = AsyncClient(served.target)

    def ask():
        with pytest.raises(RuntimeError, match="no running event loop"):
            client.generate(PROMPT, max_tokens=900)
        gc.collect()

    await in_thread(ask)
    assert not any(worker.running for worker in served.cluster.workers)
    await client.close()


async def test_a_task_that_is_cancelled_is_cancelled_and_the_call_with_it(served):
    served.cluster.step_s = 0.02
    async with AsyncClient(served.target) as client:
        task = asyncio.ensure_future(client.generate(PROMPT, max_tokens=900).answer())
        async with asyncio.timeout(3):
            while not any(worker.running for worker in served.cluster.workers):
                await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await served.cluster.idle(timeout_s=3.0)


async def test_deadline_overload_and_nobody_there(served):
    served.cluster.step_s = 0.02
    async with AsyncClient(served.target) as client:
        with pytest.raises(DeadlineExceeded):
            await client.generate(PROMPT, max_tokens=900, timeout_s=0.3).answer()
        await served.cluster.idle(timeout_s=3.0)
        async with client.generate(PROMPT, max_tokens=900) as holder:
            reading = aiter(holder)
            await anext(reading)
            with pytest.raises(Overloaded) as caught:
                await client.generate(PROMPT, max_tokens=1).answer()
            assert caught.value.retry_after_s >= 1
    async with AsyncClient("127.0.0.1:1") as client:
        with pytest.raises(Unavailable):
            await client.models(timeout_s=5)


async def test_a_router_that_was_away_is_found_soon_after_it_is_back():
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    await server.stop(None)
    async with AsyncClient(f"127.0.0.1:{port}") as client:
        back_at = time.monotonic() + 5.6  # left alone, gRPC tries again 5.3 and 9.3 s after the first time
        while time.monotonic() < back_at:
            with pytest.raises(Unavailable):
                await client.models(timeout_s=2)
            await asyncio.sleep(0.05)
        server = grpc.aio.server()
        assert server.add_insecure_port(f"127.0.0.1:{port}") == port
        await server.start()
        async with asyncio.timeout(3):
            while True:
                with pytest.raises(RpcFailed) as caught:
                    await client.models(timeout_s=0.5)
                if caught.value.code is grpc.StatusCode.UNIMPLEMENTED:
                    break
                await asyncio.sleep(0.05)
        await server.stop(None)


async def test_a_message_of_one_s_own_and_metadata(served):
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=PROMPT))
    request.sampling.max_tokens, request.sampling.seed = 6, 3
    async with AsyncClient(served.target) as client:
        trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
        got = await client.send(request, metadata=(("traceparent", trace),)).answer()
    assert got.token_ids == TOKENS
    assert replace(served.cluster.workers[0].seen[-1], request_id="").traceparent == trace
