"""The engine on the GPU's kernels: the CPU's tokens, step by step and recorded, and no KV written but its own."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from contracts.kv_layout import KVLayout
from contracts.sampling import SamplingParams
from engine.execution.interface import ScheduledBatch, ScheduledRequest
from engine.execution.torch_runner import TorchRunner
from engine.models.loader import load_model
from kernels.dispatch import TORCH, Kernels

MODEL = Path("tests/fixtures/tiny-austen")
NUM_BLOCKS = 16
BLOCK_SIZE = 8
NUM_NEW = 5


def runner(kernels: Kernels) -> tuple[TorchRunner, torch.Tensor]:
    """On KV memory that is all NaN."""
    model = load_model(MODEL, "float32", kernels)
    config = model.config
    layout = KVLayout("tiny", "float32", config.num_layers, config.num_kv_heads, config.head_size, BLOCK_SIZE)
    memory = torch.full((NUM_BLOCKS * layout.block_bytes,), 255, dtype=torch.uint8, device=kernels.device)
    return TorchRunner(model, layout, memory, NUM_BLOCKS, 100), memory


def generated(made: TorchRunner, chunk: int, seeded: bool) -> tuple[list[list[int]], set[int]]:
    """Three prompts, read in chunks of at most `chunk` tokens while others decode; the tokens, and the blocks used."""
    rng = random.Random(3)
    prompts = [[rng.randrange(1024) for _ in range(n)] for n in (19, 1, 9)]
    sampling = SamplingParams(temperature=0.8 if seeded else 0.0, seed=11, max_tokens=NUM_NEW)
    ids = list(range(1, NUM_BLOCKS))
    rng.shuffle(ids)
    tables = [[ids.pop() for _ in range(-(-(len(p) + NUM_NEW) // BLOCK_SIZE))] for p in prompts]
    tokens, computed = [list(p) for p in prompts], [0, 0, 0]
    while any(len(t) < len(p) + NUM_NEW for t, p in zip(tokens, prompts, strict=True)):
        open_ = [i for i in range(3) if len(tokens[i]) < len(prompts[i]) + NUM_NEW]
        batch = ScheduledBatch(
            tuple(
                ScheduledRequest(
                    str(i),
                    tokens[i],
                    len(prompts[i]),
                    computed[i],
                    min(chunk, len(tokens[i]) - computed[i]),
                    tables[i],
                    sampling,
                )
                for i in open_
            )
        )
        for i, request, result in zip(open_, batch.requests, made.execute(batch), strict=True):
            computed[i] += request.num_scheduled_tokens
            if result.token_id is not None:
                tokens[i].append(result.token_id)
    return [t[len(p) :] for t, p in zip(tokens, prompts, strict=True)], {b for table in tables for b in table}


@pytest.fixture
def kernels(device: torch.device) -> Kernels:
    from kernels.triton.kernels import triton_kernels

    return triton_kernels(device.type)


@pytest.mark.parametrize("seeded", [False, True], ids=["greedy", "seeded"])
def test_tokens_are_the_cpus(kernels: Kernels, seeded: bool) -> None:
    expected, _ = generated(runner(TORCH)[0], 8, seeded)
    made, memory = runner(kernels)
    found, used = generated(made, 8, seeded)
    assert found == expected
    blocks = memory.view(NUM_BLOCKS, -1)
    assert (blocks[[b for b in range(NUM_BLOCKS) if b not in used]] == 255).all()


def test_recorded_steps_are_the_plain_ones_and_padding_writes_nothing(kernels: Kernels, device: torch.device) -> None:
    from engine.execution.cuda_graphs import CudaRecorder, DecodeGraphs, Repeating, graphs_for, sizes

    expected, _ = generated(runner(TORCH)[0], 30, False)
    made, memory = runner(kernels)
    recorder = CudaRecorder() if device.type == "cuda" else Repeating()
    with torch.inference_mode():
        graphs = graphs_for(made._model, made._cache, 5, 100, recorder)
    assert isinstance(graphs, DecodeGraphs)
    assert sizes(5) == [1, 2, 4, 5]
    made._graphs = graphs
    found, used = generated(made, 30, False)
    assert found == expected
    assert (memory.view(NUM_BLOCKS, -1)[[b for b in range(NUM_BLOCKS) if b not in used]] == 255).all()


def test_a_runner_records_on_a_gpu(kernels: Kernels, cuda: torch.device) -> None:
    made, _ = runner(kernels)
    made.record(4)
    assert generated(made, 30, False)[0] == generated(runner(TORCH)[0], 30, False)[0]


def test_sizes_leave_little_padding() -> None:
    pytest.importorskip("triton", reason="triton is not installed (the extra gpu)")
    from engine.execution.cuda_graphs import sizes

    for most in (1, 3, 8, 64, 200, 256):
        found = sizes(most)
        assert found == sorted(set(found))
        assert found[-1] == most
        for rows in range(1, most + 1):
            assert min(s for s in found if s >= rows) < rows * 1.5 + 8
