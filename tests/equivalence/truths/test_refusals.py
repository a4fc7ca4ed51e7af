"""What can never be answered is refused at once, with its numbers, at every door and on every route, and nothing is computed."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import grpc
import openai
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from router.choosing.route import Route
from tests.equivalence.truths.case import Question
from tests.equivalence.truths.doors import DOORS
from tests.equivalence.truths.house import House
from tests.equivalence.truths.naive import prompt_ids
from tests.equivalence.truths.rows import GREEDY, GRPC, PROMPT, ask

pytestmark = pytest.mark.asyncio(loop_scope="module")

LONG = PROMPT * 20
# What is asked, what the workers have (blocks, context), and the field and the numbers that the refusal says.
REFUSED = {
    "prompt longer than the context": (ask(prompt=LONG), (40, 640), "prompt", (len(prompt_ids(ask(prompt=LONG))), 640)),
    "prompt as long as the context": (ask(prompt=(270,) * 64), (4, 64), "prompt", (64, 64)),
    "answer longer than the context": (ask(replace(GREEDY, max_tokens=602)), (40, 640), "max_tokens", (602, 39, 640)),
    "longer than a context cut by KV memory": (
        ask(replace(GREEDY, max_tokens=58)),
        (6, 96),
        "max_tokens",
        (58, 39, 96),
    ),
    "larger than the KV memory": (ask(replace(GREEDY, max_tokens=60)), (6, 640), "prompt", (39, 60, 96)),
    "n larger than the KV memory": (ask(replace(GREEDY, max_tokens=60), n=3), (6, 640), "prompt", (39, 60, 96)),
}

# What the doors call a field.
NAMES = {"prompt": ("prompt", "text", "token_ids"), "max_tokens": ("max_tokens", "sampling.max_tokens")}


@pytest.mark.parametrize("route", list(Route))
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("name", REFUSED)
async def test_refused_at_once(served: House, name: str, door: str, route: Route) -> None:
    question, (num_blocks, context), field, numbers = REFUSED[name]
    async with served.crew(num_blocks, context) as crew:
        said_field, message = await refusal(served, door, question, route)
        assert said_field in NAMES[field]
        for number in numbers:
            assert str(number) in message, message
        stats = [*await crew.stats(crew.pools.prefill), *await crew.stats(crew.pools.decode)]
        assert [s.num_steps for s in stats] == [0, 0, 0]


@pytest.mark.parametrize("route", list(Route))
@pytest.mark.parametrize("door", DOORS)
async def test_what_just_fits_is_answered(served: House, door: str, route: Route) -> None:
    async with served.crew(6, 96):
        asked = ask(replace(GREEDY, max_tokens=57, ignore_eos=True))
        heard = await DOORS[door](served, asked, route, lambda _: None)
        assert (heard.completion_tokens, heard.answers[0].finish_reason) == (57, "length")


async def refusal(served: House, door: str, question: Question, route: Route) -> tuple[str, str]:
    """The field at fault and the words."""
    async with asyncio.timeout(5.0):
        if door == GRPC:
            with pytest.raises(grpc.aio.AioRpcError) as broken:
                await DOORS[door](served, question, route, lambda _: None)
            assert broken.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            violation = error_details_pb2.BadRequest()
            status = rpc_status.from_call(broken.value)
            assert any(d.Unpack(violation) for d in status.details if d.Is(violation.DESCRIPTOR))
            return violation.field_violations[0].field, broken.value.details()
        with pytest.raises(openai.BadRequestError) as refused:
            await DOORS[door](served, question, route, lambda _: None)
        return refused.value.param, refused.value.message
