"""The real model gives the ids that transformers gave for it: alone, and handed off."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest

from contracts.request import GenerationRequest
from engine.config import SchedulerConfig
from tests.equivalence.truth import GREEDY, engine, loaded, real_model, run
from tests.integration.pools import Decoding, Setup, disaggregated, pools

GOLDEN = json.loads((Path(__file__).parents[1] / "fixtures" / "smollm2_golden.json").read_text())
ASKED = [
    GenerationRequest(text, tuple(g["prompt_ids"]), replace(GREEDY, max_tokens=len(g["out_ids"])))
    for text, g in GOLDEN.items()
]
EXPECTED = {text: tuple(g["out_ids"]) for text, g in GOLDEN.items()}

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]


@pytest.fixture(autouse=True, scope="module")
def _give_the_memory_back():
    yield
    loaded.cache_clear()


def test_alone(smollm2_dir: Path) -> None:
    scheduler = SchedulerConfig(max_num_batched_tokens=9, max_num_seqs=8)
    assert run(engine(scheduler, model_dir=smollm2_dir), ASKED) == EXPECTED


async def test_handed_off(smollm2_dir: Path) -> None:
    scheduler = SchedulerConfig(max_num_batched_tokens=64, max_num_seqs=8)
    async with pools(Setup(connector="tcp", scheduler=scheduler, real=real_model(smollm2_dir))) as made:
        decoding = Decoding(made.decode[0])
        answers = await asyncio.gather(*(disaggregated(made, decoding, request) for request in ASKED))
        assert {r.request_id: a.token_ids for r, a in zip(ASKED, answers, strict=True)} == EXPECTED
        await decoding.close()
        await made.idle()
