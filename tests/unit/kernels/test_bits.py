"""Native kernels: the same row has the same bits, alone or in company, in one piece or in chunks, on any number of threads.

The truth is the same kernels called one op after the other, each prompt alone and in one piece on one thread.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.models.loader import load_model
from kernels.batch import Segment
from kernels.cpu.config import compiler
from kernels.cpu.kernels import native
from kernels.cpu.library import load, supported_isas
from kernels.implementation import Kernels
from kernels.one_by_one import OneByOne
from tests.unit.models.families import CASES, make_model
from tests.unit.models.paged import PagedRun, random_schedule

ISAS = supported_isas() if compiler() else ()
pytestmark = pytest.mark.skipif(not ISAS, reason="no compiler, or not an x86 on Linux")
LENGTHS = (61, 1, 17, 33, 8)


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module", params=CASES)
def model_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    make_model(request.param, directory)
    return directory


def prompts_of(seed: int, lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(96) for _ in range(length)] for length in lengths]


def alone(model_dir: Path, dtype: str, kernels: Kernels, prompts: list[list[int]]) -> list[Tensor]:
    torch.set_num_threads(1)
    run = PagedRun(load_model(model_dir, dtype, replace(kernels, forward=OneByOne)), prompts)
    for index, prompt in enumerate(prompts):
        run.step([(index, len(prompt))])
    return run.finish()


def mixed(model_dir: Path, dtype: str, kernels: Kernels, prompts: list[list[int]], *, threads: int = 2) -> list[Tensor]:
    torch.set_num_threads(threads)
    run = PagedRun(load_model(model_dir, dtype, kernels), prompts, seed=threads)
    for step in random_schedule(prompts, random.Random(threads)):
        run.step(step)
    return run.finish()


def assert_same_bits(found: list[Tensor], expected: list[Tensor]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert theirs.isfinite().all()
        assert torch.equal(ours, theirs), (ours.float() - theirs.float()).abs().max()


def test_every_family_mixed_is_every_family_alone(model_dir: Path, dtype: str) -> None:
    kernels = native(load(ISAS[0]))
    prompts = prompts_of(1)
    assert_same_bits(mixed(model_dir, dtype, kernels, prompts), alone(model_dir, dtype, kernels, prompts))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("threads", [1, 3])
def test_every_instruction_set_on_any_number_of_threads(isa: str, threads: int, dtype: str, tmp_path: Path) -> None:
    make_model("qwen3/sliding/default", tmp_path)
    kernels = native(load(isa))
    prompts = prompts_of(2, (19, 5, 9))
    expected = alone(tmp_path, dtype, kernels, prompts)
    assert_same_bits(mixed(tmp_path, dtype, kernels, prompts, threads=threads), expected)


@pytest.mark.parametrize("case", ["llama/tied/default", "qwen2/plain/default"])
def test_wanted_rows_have_the_bits_that_they_have_among_all(case: str, dtype: str, tmp_path: Path) -> None:
    make_model(case, tmp_path)
    kernels = native(load(ISAS[0]))
    prompt = prompts_of(7, (19,))[0]
    model = load_model(tmp_path, dtype, kernels)
    everything = alone(tmp_path, dtype, kernels, [prompt])[0]
    for wanted in ([4, 18], [18], [0, 1, 2, 9, 10, 11, 18], []):
        run = PagedRun(model, [prompt])
        rows = torch.tensor(wanted, dtype=torch.int64)
        with torch.inference_mode():
            segments = [Segment(0, 19, 0, run.block_ids[0])]
            ids, positions = torch.tensor(prompt), torch.arange(19)
            hidden = model.forward(ids, positions, run.cache.attention(segments), rows)
            step = model.step(ids, positions, run.cache.attention(segments), rows)
            of_hidden = model.logits(hidden)
        assert torch.equal(of_hidden, everything[rows])
        assert torch.equal(step, everything[rows])
        # KV is written whatever is wanted.
        held = run.block_ids[0]
        assert run.kv[held].permute(0, 3, 1, 2, 4, 5).flatten(0, 1)[:19].isfinite().all()
