"""The scheduler alone, against made-up computing: limits hold, order holds, everybody ends."""

from hypothesis import given, settings
from hypothesis import strategies as st

from contracts.request import GenerationRequest
from contracts.sampling import SamplingParams
from engine.config import SchedulerConfig
from engine.kv.cache_manager import KVCacheManager
from engine.request import Request, RequestStatus
from engine.scheduling.scheduler import Scheduler

BLOCK_SIZE = 2
NUM_BLOCKS = 6

CONFIGS = st.builds(
    lambda seqs, extra, policy: SchedulerConfig(seqs + extra, seqs, policy),
    st.integers(1, 3),
    st.integers(0, 5),
    st.sampled_from(["fcfs", "priority"]),
)
ARRIVALS = st.lists(
    st.tuples(
        st.integers(0, 6),  # step of arrival
        st.integers(1, 6),  # prompt tokens
        st.integers(1, 6),  # output tokens: together they fit the pool of 12 tokens
        st.integers(0, 2),  # priority
        st.booleans(),  # adopted
    ),
    max_size=8,
)


class World:
    """Computes what the scheduler says, one made-up token at a time, and checks each step on the way."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.kv = KVCacheManager(NUM_BLOCKS, BLOCK_SIZE, 0)
        self.scheduler = Scheduler(config, self.kv)
        self.live: list[Request] = []
        self.num_arrived = 0

    def arrive(self, num_prompt: int, max_tokens: int, priority: int, adopted: bool) -> None:
        self.num_arrived += 1
        facts = GenerationRequest(
            f"r{self.num_arrived}",
            tuple(range(num_prompt)),
            SamplingParams(max_tokens=max_tokens),
            (9,) if adopted else (),
        )
        request = Request(facts, 0.0, self.scheduler.next_order(priority))
        if adopted:
            if max_tokens == 1 or not self.scheduler.has_room_for_reservation(num_prompt, 0):
                return
            lease = self.kv.lease(facts.request_id, num_prompt, (), 0)
            if lease is None:
                return
            request.start(lease, num_prompt)
        self.live.append(request)
        self.scheduler.add(request)

    def step(self) -> None:
        first = min(self.live, key=lambda r: r.order, default=None)
        first_runs = first is not None and first.status is RequestStatus.RUNNING
        running = [r for r in self.live if r.status is RequestStatus.RUNNING]
        waiting = [r for r in self.live if r.status is RequestStatus.WAITING]
        shares = self.scheduler.schedule()
        self.check_limits(shares)
        chosen = [share.request for share in shares]
        started = {r for r in waiting if r in chosen}
        assert started == set(sorted(waiting, key=lambda r: r.order)[: len(started)]), "waiting ones start in order"
        if first_runs:
            assert first.status is RequestStatus.RUNNING, "the first in order is never preempted"
        preempted = [r for r in running if r.status is RequestStatus.WAITING]
        kept = [r for r in running if r.status is RequestStatus.RUNNING]
        assert not preempted or all(k.order < min(p.order for p in preempted) for k in kept), (
            "the last in order gives way"
        )
        for share in shares:
            self.compute(share.request, share.num_tokens)
        self.kv.check_integrity()

    def check_limits(self, shares) -> None:
        assert len(shares) <= self.config.max_num_seqs
        assert sum(share.num_tokens for share in shares) <= self.config.max_num_batched_tokens
        assert len({share.request for share in shares}) == len(shares)
        kinds = [share.request.num_uncomputed_tokens > 1 for share in shares]
        assert kinds == sorted(kinds), "decodes come first"
        for share in shares:
            assert 0 < share.num_tokens <= share.request.num_uncomputed_tokens
            assert (
                len(share.request.lease.block_ids) * BLOCK_SIZE >= share.request.num_computed_tokens + share.num_tokens
            )

    def compute(self, request: Request, num_tokens: int) -> None:
        request.num_computed_tokens += num_tokens
        self.kv.hasher.extend(request.block_hashes, request.token_ids)
        self.kv.publish(request.lease, request.block_hashes, request.num_computed_tokens)
        if request.num_uncomputed_tokens:
            return
        request.append(0, 0.0, 0.0)
        if request.finish_reason(frozenset()):
            self.scheduler.remove(request)
            self.live.remove(request)
            request.give_up_lease(RequestStatus.FINISHED).release()


@settings(max_examples=200, deadline=None)
@given(CONFIGS, ARRIVALS)
def test_limits_hold_and_everybody_ends(config, arrivals):
    world = World(config)
    for step in range(7):
        for when, *what in arrivals:
            if when == step:
                world.arrive(*what)
        world.step()
    steps_left = 500
    while world.live and steps_left:
        world.step()
        steps_left -= 1
    assert not world.live, "somebody starves"
    assert world.kv.num_free_blocks == NUM_BLOCKS
    assert world.scheduler.num_waiting == world.scheduler.num_running == world.scheduler.num_queued_tokens == 0
