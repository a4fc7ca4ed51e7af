"""Three times what a router can do, over real sockets: each request is served, or hears when to come back, or that it is late.

How much is served is measured by `python -m bench overload` and, on virtual time, in tests/simulation/test_overload.py.
"""

from collections import Counter
from dataclasses import replace

from bench.overload import judged
from bench.overload_client import OfferedLoad, offer
from router.config import AdmissionConfig
from tests.integration.pools import Setup
from tests.integration.router_harness import MODEL, router_config
from tests.integration.test_router_pools import FAKE, served

PLACES, TOKENS, STEP_S, TIMEOUT_S = 4, 10, 0.02, 8.0
CAPACITY = PLACES / (TOKENS * STEP_S)  # requests per second, at most


async def test_each_request_hears_what_becomes_of_it(tmp_path):
    config = router_config(tmp_path, admission=AdmissionConfig(max_running=PLACES, max_waiting=20))
    load = OfferedLoad(
        port=0,  # known later
        model=MODEL,
        prompt_tokens=8,
        max_tokens=TOKENS,
        vocab_size=FAKE.vocab_size,
        duration_s=3.0,
        rate=3 * CAPACITY,
        timeout_s=TIMEOUT_S,
    )
    async with served(tmp_path, Setup(model=FAKE, step_s=STEP_S), config) as (running, workers):
        answers = await offer(replace(load, port=running.ports.http))
        run = judged(answers, TIMEOUT_S, 3.0)
        print(Counter(answer.status for answer in answers), run)
        assert run.num_offered > CAPACITY
        assert (run.num_hung, run.num_unexplained) == (0, 0)
        assert run.num_refused > 0
        assert all(1 <= told <= 60 for told in run.retry_after_s)
        assert run.goodput > 0
        await workers.idle()
        assert (running.router._admission.num_running, running.router._admission.num_waiting) == (0, 0)
