"""How fast an engine says it is: smoothed, and only from steps that tell."""

import pytest

from contracts.clock import VirtualClock
from contracts.request import GenerationRequest
from contracts.sampling import SamplingParams
from engine.config import EngineConfig
from engine.engine import Engine
from engine.execution.fake import FakeModel, FakeRunner
from engine.tempo import Tempo


def test_decode_steps_and_prompt_steps_are_told_apart() -> None:
    tempo = Tempo()
    assert (tempo.decode_step_s, tempo.prefill_tokens_per_s) == (0.0, 0.0)
    tempo.note(0, 0, 1.0)
    tempo.note(4, 4, 0.0)
    tempo.note(1, 30, 5.0)  # waits for the weights mostly
    assert (tempo.decode_step_s, tempo.prefill_tokens_per_s) == (0.0, 0.0)
    for _ in range(3):
        tempo.note(4, 4, 0.02)
        tempo.note(2, 512, 0.5)
    assert tempo.decode_step_s == pytest.approx(0.02)
    assert tempo.prefill_tokens_per_s == pytest.approx(1024)


def test_it_follows_a_change_and_not_one_step() -> None:
    tempo = Tempo()
    for _ in range(50):
        tempo.note(1, 1, 0.02)
    tempo.note(1, 1, 0.2)
    assert tempo.decode_step_s < 0.035
    for _ in range(100):
        tempo.note(1, 1, 0.2)
    assert tempo.decode_step_s == pytest.approx(0.2, rel=0.05)


def test_an_engine_s_load_says_it() -> None:
    class Ticking(VirtualClock):
        def now(self) -> float:
            self.skip(0.01)
            return super().now()

    model = FakeModel(max_model_len=512)
    engine = Engine(FakeRunner(model, 64), EngineConfig(), Ticking())
    engine.admit(
        GenerationRequest("r", tuple(1 + i % 90 for i in range(199)), SamplingParams(max_tokens=5, ignore_eos=True))
    )
    while engine.has_work:
        engine.step()
    load = engine.load()
    assert load.decode_step_s > 0
    assert load.prefill_tokens_per_s > 199
