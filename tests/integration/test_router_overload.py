"""Three times what a router can do, over real sockets: it does as much as before, and each request is served, or hears when to
come back, or that it is late.

The admission is the default one: the router learns from its worker how many run at once. On a quiet machine goodput is measured
by `python -m bench overload`; on virtual time in tests/simulation/test_overload.py.
"""

from collections import Counter
from dataclasses import replace

from bench.overload import judged
from bench.overload_client import OfferedLoad, offer
from engine.config import SchedulerConfig
from tests.integration.pools import Setup
from tests.integration.router_harness import MODEL
from tests.integration.test_router_pools import FAKE, served

AT_ONCE, TOKENS, STEP_S, TIMEOUT_S, DURATION_S = 4, 10, 0.02, 1.0, 2.5
CAPACITY = AT_ONCE / (TOKENS * STEP_S)  # requests per second, at most
SHARE = 0.75  # of the goodput at capacity; without shedding it is half
TRIES = 3  # others use this machine, and a second that they take is a second's goodput
SETUP = Setup(model=FAKE, step_s=STEP_S, scheduler=SchedulerConfig(max_num_batched_tokens=64, max_num_seqs=AT_ONCE))
LOAD = OfferedLoad(
    port=0,  # known later
    model=MODEL,
    prompt_tokens=8,
    max_tokens=TOKENS,
    vocab_size=FAKE.vocab_size,
    duration_s=DURATION_S,
    timeout_s=TIMEOUT_S,
)


async def test_goodput_stays_and_each_request_hears_what_becomes_of_it(tmp_path):
    async with served(tmp_path, SETUP) as (running, workers):

        async def offered(factor, seed):
            load = replace(LOAD, port=running.ports.http, rate=factor * CAPACITY, seed=seed)
            answers = await offer(load)
            run = judged(answers, TIMEOUT_S, DURATION_S)
            print(factor, Counter((answer.status, answer.error) for answer in answers), run)
            assert run.num_offered > factor * CAPACITY
            assert (run.num_hung, run.num_unexplained) == (0, 0)
            assert all(1 <= told <= 60 for told in run.retry_after_s)
            return run

        shares = []
        while not shares or (max(shares) < SHARE and len(shares) < TRIES):
            before, under = await offered(1, len(shares)), await offered(3, len(shares))
            assert under.num_refused > under.num_late, "most who cannot be in time hear it at once"
            shares.append(under.goodput / before.goodput)
        assert max(shares) >= SHARE, shares
        await workers.idle()
        assert await running.metric("diptych_requests_running") == 0
        assert await running.metric("diptych_requests_waiting") == 0
