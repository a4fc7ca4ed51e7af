"""A small fake model and engines on it."""

from collections.abc import Callable

import pytest

from contracts.clock import VirtualClock
from contracts.kv_layout import KVLayout
from contracts.request import GenerationRequest, TokenDelta
from contracts.sampling import SamplingParams
from engine.config import EngineConfig, SchedulerConfig
from engine.engine import Engine
from engine.execution.fake import FakeModel, FakeRunner

BLOCK_SIZE = 4


@pytest.fixture
def model() -> FakeModel:
    return FakeModel(KVLayout("fake", "float32", 2, 1, 2, BLOCK_SIZE), vocab_size=31, max_model_len=64)


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def make_engine(model, clock) -> Callable[..., Engine]:
    def make(num_blocks: int = 16, model: FakeModel = model, **limits) -> Engine:
        return Engine(FakeRunner(model, num_blocks), EngineConfig(SchedulerConfig(**limits)), clock)

    return make


@pytest.fixture
def make_request() -> Callable[..., GenerationRequest]:
    def make(request_id: str = "r", num_prompt: int = 6, output=(), priority=0, deadline_s=None, **sampling):
        prompt = tuple(range(1, num_prompt + 1))
        params = SamplingParams(**{"temperature": 0.0, "max_tokens": 5, **sampling})
        return GenerationRequest(request_id, prompt, params, tuple(output), priority, deadline_s)

    return make


@pytest.fixture
def run() -> Callable[[Engine], dict[str, list[TokenDelta]]]:
    def run(engine: Engine, max_steps: int = 500) -> dict[str, list[TokenDelta]]:
        deltas: dict[str, list[TokenDelta]] = {}
        while engine.has_work:
            assert (max_steps := max_steps - 1), "it does not end"
            for delta in engine.step().deltas:
                deltas.setdefault(delta.request_id, []).append(delta)
        engine.check_integrity()
        return deltas

    return run
