"""DESIGN section 5 at every door: one question, one answer, made in one pool, in two, or by workers that are lost on the way.

What is heard is compared with the slow truth (naive.py), so all ways and doors are equal to each other as well.
"""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass, replace

import pytest

from router.choosing.route import Route
from tests.equivalence.truths.case import Heard, Question, check_same
from tests.equivalence.truths.doors import DOORS
from tests.equivalence.truths.house import BLOCK_SIZE, Crew, House
from tests.equivalence.truths.naive import expected, prompt_ids
from tests.equivalence.truths.rows import EVERY_CUT, GRPC, ROWS, SENT_TWICE, STREAM, WARM, WHOLE, Row, ask
from tests.integration.pools import PATIENCE_S

pytestmark = pytest.mark.asyncio(loop_scope="module")


@dataclass(frozen=True)
class Way:
    """How an answer is made: its route, and after how many tokens the decode worker that makes it is cut off."""

    route: Route
    cut: int | None = None

    def __str__(self) -> str:
        return self.route.value if self.cut is None else f"{self.route.value}, migrated after {self.cut}"


UNBROKEN = tuple(map(Way, Route))
CUTS = {
    GRPC: (Way(Route.DISAGGREGATED, 1), Way(Route.DISAGGREGATED, 6), Way(Route.COLOCATED, 6)),
    STREAM: (Way(Route.DISAGGREGATED, 2),),
    WHOLE: (Way(Route.DISAGGREGATED, 6),),
}
CASES = [
    pytest.param(row, door, way, id=f"{row.name}-{door}-{way}")
    for row in ROWS
    for door in row.doors
    for way in (*UNBROKEN, *CUTS[door])
    if way.cut is None or way.cut < row.num_tokens
]
EVERYWHERE = [
    pytest.param(row, GRPC, Way(Route.DISAGGREGATED, cut), id=f"{row.name}-{cut}")
    for row in EVERY_CUT
    for cut in range(1, row.num_tokens)
]


@pytest.mark.parametrize(("row", "door", "way"), CASES)
async def test_one_question_one_answer(served: House, row: Row, door: str, way: Way) -> None:
    await check(served, row, door, way)


@pytest.mark.parametrize(("row", "door", "way"), EVERYWHERE)
async def test_migrated_after_every_token(served: House, row: Row, door: str, way: Way) -> None:
    await check(served, row, door, way)


@pytest.mark.parametrize("row", [pytest.param(row, id=row.name) for row in SENT_TWICE])
async def test_the_prefill_worker_is_lost_behind_its_first_token(served: House, row: Row) -> None:
    async with served.crew(spare=True) as crew:
        for _ in range(row.question.warm):
            await DOORS[GRPC](served, row.question, Route.DISAGGREGATED, lambda _: None)
        crew.breath.holds_transfers = True
        told = asyncio.Event()
        asking = DOORS[GRPC](served, row.question, Route.DISAGGREGATED, lambda count: told.set() if count else None)
        answering = asyncio.ensure_future(asking)
        async with asyncio.timeout(PATIENCE_S):
            await told.wait()
            await crew.cut_prefill()
            check_same(await answering, expected(row.question))


@pytest.mark.parametrize("cut", [None, 3])
async def test_all_at_once(served: House, cut: int | None) -> None:
    """Every row in the same pools, which are too small for them, by doors and routes in turn; a worker is lost on the way."""
    ways = itertools.cycle(itertools.product(range(3), Route))
    asked = [(row, row.doors[door % len(row.doors)], route) for row, (door, route) in zip(ROWS, ways, strict=False)]
    async with served.crew(num_blocks=12, context=12 * BLOCK_SIZE) as crew:
        crew.breath.hold_at = cut
        asking = [DOORS[door](served, row.question, route, lambda _: None) for row, door, route in asked]
        everybody = asyncio.gather(*asking)
        if cut is not None:
            await crew.cut()
        for (row, _, _), heard in zip(asked, await everybody, strict=True):
            truth = expected(row.question)
            check_same(replace(heard, cached_tokens=truth.cached_tokens), truth)  # of prompts that others asked as well


@pytest.mark.parametrize("door", DOORS)
async def test_a_seed_that_nobody_gave_goes_with_the_answer(served: House, door: str) -> None:
    seeds = set()
    for _ in range(2):
        async with served.crew() as crew:
            crew.breath.hold_at = 5
            question = ask(replace(WARM, seed=None))
            heard = await asked_and_cut(served, crew, question, door, Way(Route.DISAGGREGATED, 5))
            (seed,) = crew.breath.seeds
            check_same(heard, expected(ask(replace(WARM, seed=seed))))
            seeds.add(seed)
    assert len(seeds) == 2


async def check(served: House, row: Row, door: str, way: Way) -> None:
    truth = expected(row.question)
    first = truth.answers[0]
    assert (first.finish_reason, first.stop_reason) == (row.finish, row.stop), "the row has lost its point"
    assert len(first.token_ids) == row.num_tokens, "the row has lost its point"
    async with served.crew() as crew:
        for _ in range(row.question.warm):
            await DOORS[door](served, row.question, way.route, lambda _: None)
        before = await crew.stats(crew.pools.decode)
        crew.breath.hold_at = way.cut
        heard = await asked_and_cut(served, crew, row.question, door, way)
        check_same(heard, truth)
        check_made_this_way(heard, row, way)
        after = await crew.stats(crew.pools.decode)
        steps = [a.num_steps - b.num_steps for a, b in zip(after, before, strict=True)]
        if way.route is Route.DISAGGREGATED and row.at_prefill:
            assert steps == [0, 0]
        if way.cut is not None and row.finish == "length" and way.cut < row.num_tokens - 1:
            assert all(steps), "nobody took it over"
        if way.cut is None and not row.question.warm:
            await check_computed_once(crew, row, way)


def check_made_this_way(heard: Heard, row: Row, way: Way) -> None:
    if way.route is Route.COLOCATED or row.at_prefill:
        assert not any(heard.handed_off)
    elif way.cut is None and not isinstance(row.stop, str):  # that may be complete before the hand-off's account is in
        assert all(heard.handed_off)


async def check_computed_once(crew: Crew, row: Row, way: Way) -> None:
    """The prompt, of whose blocks each further answer computes the last again."""
    pool = crew.pools.prefill if way.route is Route.DISAGGREGATED else crew.pools.decode
    stats = await crew.stats(pool)
    num_computed = sum(s.num_prefix_queried_tokens - s.num_prefix_hit_tokens for s in stats)
    assert num_computed <= len(prompt_ids(row.question)) + (row.question.n - 1) * BLOCK_SIZE


async def asked_and_cut(served: House, crew: Crew, question: Question, door: str, way: Way) -> Heard:
    heard_enough = asyncio.Event()
    if way.cut is None:
        return await DOORS[door](served, question, way.route, lambda _: None)
    cut = way.cut

    def on_tokens(count: int) -> None:
        if count >= cut:
            heard_enough.set()

    asking = asyncio.ensure_future(DOORS[door](served, question, way.route, on_tokens))
    async with asyncio.timeout(PATIENCE_S):
        await crew.breath.held
        if door == WHOLE:
            # Its client hears nothing that could be waited for. Turns, and not only time: what was made is on its way through
            # this loop, and the router has to have heard the first token, as it has where a client has heard six.
            for _ in range(20):
                await asyncio.sleep(0.005)
        else:
            await heard_enough.wait()
        await crew.cut()
        return await asking
