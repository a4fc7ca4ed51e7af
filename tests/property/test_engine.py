"""Two engines and hand-offs between them under random use, with tiny pools: every answer is exactly the expected one,
nothing deadlocks, and when all is done every block is free."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from contracts.clock import VirtualClock
from contracts.kv_layout import KVLayout
from contracts.request import FinishReason, GenerationRequest
from contracts.sampling import SamplingParams
from engine.config import EngineConfig, SchedulerConfig
from engine.engine import Engine, Retained
from engine.execution.fake import FakeModel, FakeRunner, expected_tokens

LAYOUT = KVLayout("fake", "float32", 1, 1, 2, block_size=2)
MODEL = FakeModel(LAYOUT, vocab_size=11, max_model_len=16, eos_token_ids=frozenset({3}))
NUM_BLOCKS = 7

PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=7).map(tuple)  # two tokens: prefix hits everywhere
SAMPLINGS = st.builds(
    lambda max_tokens, **rest: SamplingParams(max_tokens=max_tokens, min_tokens=(max_tokens * 2) // 3, **rest),
    max_tokens=st.integers(1, 7),
    temperature=st.sampled_from([0.0, 1.0]),
    seed=st.integers(0, 2),
    stop_token_ids=st.sampled_from([(), (5,)]),
    ignore_eos=st.booleans(),
    prompt_logprobs=st.sampled_from([None, None, 0]),
)


class Worker:
    """One engine with its memory, and what its requests have said so far."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.buffer = memoryview(bytearray(NUM_BLOCKS * LAYOUT.block_bytes))
        self.engine = Engine(FakeRunner(MODEL, NUM_BLOCKS, self.buffer), EngineConfig(config), VirtualClock())

    def block(self, block_id: int) -> memoryview:
        return self.buffer[block_id * LAYOUT.block_bytes : (block_id + 1) * LAYOUT.block_bytes]


class EnginesMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.begin(3, 3, "fcfs", caching=True)

    @initialize(
        seqs=st.integers(1, 3),
        extra=st.integers(0, 4),
        policy=st.sampled_from(["fcfs", "priority"]),
        caching=st.booleans(),
    )
    def begin(self, seqs, extra, policy, caching):
        config = SchedulerConfig(seqs + extra, seqs, policy, caching)
        self.first, self.second = Worker(config), Worker(config)
        self.num_ids = 0
        self.requests: dict[str, GenerationRequest] = {}  # what was asked, of those that live
        self.outputs: dict[str, list[int]] = {}
        self.retained: list[Retained] = []
        self.reserved: list[tuple[Retained, object]] = []

    def new_request(self, prompt, sampling, priority, num_output=0) -> GenerationRequest:
        self.num_ids += 1
        request = GenerationRequest(f"r{self.num_ids}", prompt, sampling, priority=priority)
        whole = expected_tokens(request, MODEL)
        num_output = min(num_output, len(whole) - 1)
        self.outputs[request.request_id] = list(whole[:num_output])
        self.requests[request.request_id] = request
        return GenerationRequest(request.request_id, prompt, sampling, whole[:num_output], priority)

    @rule(
        prompt=PROMPTS,
        sampling=SAMPLINGS,
        priority=st.integers(0, 1),
        num_output=st.integers(0, 3),
        retain=st.booleans(),
    )
    def admit(self, prompt, sampling, priority, num_output, retain):
        request = self.new_request(prompt, sampling, priority, num_output)
        (self.first if retain else self.second).engine.admit(request, retain_kv=retain)

    @rule(prompts=st.lists(PROMPTS, min_size=2, max_size=4), sampling=SAMPLINGS)
    def admit_burst(self, prompts, sampling):
        for prompt in prompts:
            self.first.engine.admit(self.new_request(prompt, sampling, 0), retain_kv=True)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data):
        request_id = data.draw(st.sampled_from(sorted(self.requests)))
        known = self.first.engine.abort(request_id) or self.second.engine.abort(request_id)
        assert known != any(r.request_id == request_id for r in self.travelling())
        if known:
            del self.requests[request_id]
        assert not self.first.engine.abort(request_id)

    @precondition(lambda self: self.retained)
    @rule(data=st.data())
    def reserve(self, data):
        retained = data.draw(st.sampled_from(self.retained))
        lease = self.second.engine.reserve(retained.request_id, retained.num_computed_tokens, retained.block_hashes)
        if lease is not None:
            self.retained.remove(retained)
            self.reserved.append((retained, lease))

    @precondition(lambda self: self.reserved)
    @rule(data=st.data())
    def give_up_hand_off(self, data):
        """The decode side loses the reservation; the KV is recomputed there."""
        retained, lease = self.reserved.pop(data.draw(st.integers(0, len(self.reserved) - 1)))
        self.second.engine.release(lease)
        self.first.engine.release(retained.lease)
        self.second.engine.admit(retained.request)

    @precondition(lambda self: self.reserved)
    @rule(data=st.data())
    def hand_off(self, data):
        self.commit(*self.reserved.pop(data.draw(st.integers(0, len(self.reserved) - 1))))

    @rule(num_steps=st.integers(1, 3))
    def hand_off_all(self, num_steps):
        """As in normal running: whatever is ready goes over, and both sides step on."""
        for _ in range(num_steps):
            self.step_both()
        for retained in list(self.retained):
            lease = self.second.engine.reserve(retained.request_id, retained.num_computed_tokens, retained.block_hashes)
            if lease is not None:
                self.retained.remove(retained)
                self.commit(retained, lease)

    def commit(self, retained, lease) -> None:
        for index in range(lease.num_cached_tokens // LAYOUT.block_size, len(lease.block_ids)):
            self.second.block(lease.block_ids[index])[:] = self.first.block(retained.lease.block_ids[index])
        self.first.engine.release(retained.lease)
        self.second.engine.adopt(retained.request, lease, retained.num_computed_tokens)

    @rule(num_steps=st.integers(1, 4))
    def step(self, num_steps):
        for _ in range(num_steps):
            self.step_both()

    def step_both(self) -> bool:
        progressed = False
        for worker in (self.first, self.second):
            if worker.engine.has_work:
                output = worker.engine.step()
                progressed |= output.made_progress
                for retained in output.retained:
                    assert retained.token_ids == self.requests[retained.request_id].prompt_token_ids + tuple(
                        self.outputs[retained.request_id]
                        + [d.token_ids[0] for d in output.deltas if d.request_id == retained.request_id]
                    )
                    assert retained.num_computed_tokens == retained.request.num_tokens - 1
                    self.retained.append(retained)
                for delta in output.deltas:
                    self.take(delta)
        return progressed

    def take(self, delta) -> None:
        request, output = self.requests[delta.request_id], self.outputs[delta.request_id]
        assert delta.first_index == len(output), "nothing is lost, nothing comes twice"
        if request.sampling.prompt_logprobs is not None and delta.first_index == 0:
            ids = [p and p.token_id for p in delta.prompt_logprobs]
            assert ids == [None, *request.prompt_token_ids[1:]]
        else:
            assert delta.prompt_logprobs == ()
        output.extend(delta.token_ids)
        if delta.finish_reason is not None:
            whole = expected_tokens(request, MODEL)
            assert tuple(output) == whole
            stopped = delta.finish_reason is FinishReason.STOP
            assert delta.stop_token_id == (whole[-1] if stopped else None)
            assert stopped or len(whole) == request.sampling.max_tokens
            del self.requests[delta.request_id]

    def travelling(self) -> list[Retained]:
        return [*self.retained, *(retained for retained, _ in self.reserved)]

    @invariant()
    def books_balance(self):
        self.first.engine.check_integrity()
        self.second.engine.check_integrity()
        ended = set(self.outputs) - set(self.requests)
        assert not any(worker.engine.abort(i) for worker in (self.first, self.second) for i in ended)

    def teardown(self):
        for retained, lease in self.reserved:
            self.second.engine.release(lease)
            self.retained.append(retained)
        self.reserved.clear()
        num_idle = 0
        while num_idle < 2:
            for retained in self.retained:
                self.first.engine.release(retained.lease)
                self.second.engine.admit(retained.request)
            self.retained.clear()
            num_idle = 0 if self.step_both() else num_idle + 1
        assert not self.requests, "somebody hangs"
        for worker in (self.first, self.second):
            worker.engine.check_integrity()
            assert worker.engine.load().kv_usage == 0.0
            assert not worker.engine.has_work


TestEngines = EnginesMachine.TestCase
TestEngines.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
