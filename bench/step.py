"""What stands between the model's bare step and a token: nothing, `LLM`, and a whole server, on the same model and threads.

    bare     runner.execute of a decode batch                                in this process
    LLM      offline.LLM.generate, its steps after the first                  in this process
    server   router and one worker that does both, streams over gRPC          processes of their own, the client another

In turns in every round, so that a machine that drifts does not touch the ratios. Prompts are short: attention is the same
small part everywhere. Does not know how any of them works.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from bench.checkpoint import HALF_B
from bench.cluster import ServedCluster, serving
from bench.engine import random_prompts
from bench.load import LoadPlan, LoadRequest, Protocol, Route, run_load
from bench.ours import load_runner
from bench.progress import Say
from bench.report import Measure, Report, Verdict
from bench.stats import Spread, ratio, spread, steady_itl_s
from contracts.sampling import SamplingParams as EngineParams
from engine.execution.interface import ModelRunner, ScheduledBatch, ScheduledRequest
from offline import LLM, SamplingParams

BATCHES = (1, 8, 16)
LOSS_BAR = 1.05
KV_BYTES = 256 << 20
WAYS = ("bare step", "LLM", "server")
_GREEDY = EngineParams(temperature=0.0)


@dataclass(frozen=True, slots=True)
class StepBenchConfig:
    """Sizes in tokens. Served answers are longer by what streams may lead others by at the start."""

    threads: int = 2
    rounds: int = 5
    prompt_tokens: int = 16
    tokens: int = 24
    served_tokens: int = 40
    seed: int = 0


@dataclass(slots=True)
class Seconds:
    """Seconds a token, one entry a round, by way and batch size."""

    of: dict[tuple[str, int], list[float]] = field(
        default_factory=lambda: {(way, batch): [] for way in WAYS for batch in BATCHES}
    )

    def spread_ms(self, way: str, batch: int) -> Spread:
        """In milliseconds."""
        return spread(self.of[way, batch], 1e3)


def servable(checkpoint: Path) -> Path:
    """The checkpoint with a tokenizer, which a router wants: one token an id, each spelt by its number."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder = checkpoint.with_name(f"{checkpoint.name}-served")
    folder.mkdir(exist_ok=True)
    for file in checkpoint.iterdir():
        link = folder / file.name
        if not link.exists():
            link.symlink_to(file)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*alphabet, *(f"<{number}>" for number in range(len(alphabet), HALF_B.vocab_size))]
    made = Tokenizer(models.BPE(vocab={word: number for number, word in enumerate(words)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.save(str(folder / "tokenizer.json"), pretty=False)
    return folder


def run_step(checkpoint: Path, config: StepBenchConfig, say: Say) -> Report:
    """A minute or two."""
    say("step: loading the model three times")
    runner = load_runner(checkpoint, config.threads)
    with (
        LLM(checkpoint, threads=config.threads, kv_memory_bytes=KV_BYTES, tokenizer=False, prefix_caching=False) as llm,
        serving(servable(checkpoint), config.threads, ("--no-prefix-caching",)) as cluster,
    ):
        seconds = Seconds()
        for number in range(config.rounds + 1):
            say(f"step: round {number} of {config.rounds}" if number else "step: warming up")
            rng = random.Random(config.seed + number)
            for batch in BATCHES:
                prompts = random_prompts(rng, 2 * batch, config.prompt_tokens, HALF_B.vocab_size)
                half = prompts[:batch]
                measured = (
                    bare_s(runner, half, config.tokens),
                    llm_s(llm, prompts, config.tokens),
                    server_s(cluster, half, config.served_tokens),
                )
                for way, taken in zip(WAYS, measured, strict=True):
                    if number:
                        seconds.of[way, batch].append(taken)
    return step_report(seconds, config)


def bare_s(runner: ModelRunner, prompts: list[list[int]], num_tokens: int) -> float:
    """Seconds a step of `execute` alone: each row one token further each time, on whatever its blocks hold."""
    batches = list(_decode_batches(runner, prompts, num_tokens))
    begun = time.perf_counter()
    for batch in batches:
        runner.execute(batch)
    return (time.perf_counter() - begun) / len(batches)


def _decode_batches(runner: ModelRunner, prompts: list[list[int]], num_tokens: int) -> Iterator[ScheduledBatch]:
    length = len(prompts[0])
    each = runner.layout.num_blocks_for(length + num_tokens)
    for at in range(length, length + num_tokens):
        yield ScheduledBatch(
            tuple(
                ScheduledRequest(
                    f"row-{row}",
                    [*prompt, *[0] * (at - length + 1)],
                    length,
                    at,
                    1,
                    list(range(row * each, (row + 1) * each)),
                    _GREEDY,
                )
                for row, prompt in enumerate(prompts)
            )
        )


def llm_s(llm: LLM, prompts: list[list[int]], num_tokens: int) -> float:
    """Seconds a step of `generate`: a long call less one of a single token, on as many other prompts."""
    half = len(prompts) // 2
    taken = []
    for some, count in ((prompts[:half], 1), (prompts[half:], 1 + num_tokens)):
        params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
        begun = time.perf_counter()
        llm.generate(some, params)
        taken.append(time.perf_counter() - begun)
    return (taken[1] - taken[0]) / num_tokens


def server_s(cluster: ServedCluster, prompts: list[list[int]], num_tokens: int) -> float:
    """The mean gap between a stream's tokens while all stream."""
    requests = tuple(LoadRequest(tuple(prompt), num_tokens, Route.COLOCATED) for prompt in prompts)
    answers = run_load(LoadPlan(Protocol.GRPC, cluster.grpc, cluster.model, len(requests), requests))
    return steady_itl_s([answer.times for answer in answers])


def step_report(seconds: Seconds, config: StepBenchConfig) -> Report:
    """Both ways' cost over the bare step, against the bar."""
    measures, verdicts = [], []
    for batch in BATCHES:
        bare = seconds.spread_ms("bare step", batch)
        for way in WAYS:
            measures.append(Measure(f"{way}, batch {batch}", "ms a token", seconds.spread_ms(way, batch).runs))
        for way in WAYS[1:]:
            over = ratio(seconds.spread_ms(way, batch), bare)
            verdicts.append(Verdict(f"{way} over the bare step, batch {batch}", over, "x", LOSS_BAR, False))
    return Report(
        name="step",
        title="From the model's bare step to a token",
        command=f"python -m bench step --rounds {config.rounds} --threads {config.threads}",
        method=f"0.5B-shaped bf16 model, {config.threads} threads, prompts of {config.prompt_tokens} tokens, greedy. Bare: the "
        f"mean of {config.tokens} calls of `execute`. LLM: a call of {config.tokens + 1} tokens less one of 1, over "
        f"{config.tokens}. Server: the mean gap of streams over gRPC while all stream, through router and one worker that does "
        "both; these and the client are on the same cores.",
        measures=tuple(measures),
        verdicts=tuple(verdicts),
    )
