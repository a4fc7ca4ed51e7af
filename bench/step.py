"""What stands between the model's bare step and a token: nothing, `LLM`, and a whole server, on the same model and threads.

    bare     runner.execute of a decode batch                                in this process
    LLM      offline.LLM.generate, its steps after the first                  in this process
    gRPC     router and decode worker, which does both; streams over gRPC      processes of their own, the client another
    SSE      the same, streams over HTTP                                       the same

In turns in every round, the memory's limit too, so that a machine that drifts does not touch the ratios. Prompts are short:
attention is the same small part everywhere. Does not know how any of them works.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from bench.checkpoint import HALF_B
from bench.cluster import ServedCluster, serving
from bench.engine import random_prompts
from bench.limits import measure_limits
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
LIMIT = "memory limit"
WAYS = ("bare step", "LLM", "gRPC", "SSE")
LIMIT_BARS = {1: 1.15, 8: 1.3, 16: 1.5}
LIMIT_TRIES = 2
WARM_TOKENS = 2
_GREEDY = EngineParams(temperature=0.0)


@dataclass(frozen=True, slots=True)
class StepBenchConfig:
    """Sizes in tokens. Served answers are longer by what streams may lead others by at the start."""

    threads: int = 2
    rounds: int = 3
    prompt_tokens: int = 16
    tokens: int = 24
    served_tokens: int = 40
    seed: int = 0


@dataclass(slots=True)
class Seconds:
    """Seconds a token, one entry a round, by way and batch size."""

    of: dict[tuple[str, int], list[float]] = field(
        default_factory=lambda: {(way, batch): [] for way in (LIMIT, *WAYS) for batch in BATCHES}
    )

    def spread_ms(self, way: str, batch: int) -> Spread:
        """In milliseconds."""
        return spread(self.of[way, batch], 1e3)

    def said(self) -> str:
        """The last round in a line, for who stops before the end."""
        return " · ".join(
            f"batch {batch}: " + ", ".join(f"{way} {1e3 * self.of[way, batch][-1]:.1f}" for way in (LIMIT, *WAYS))
            for batch in BATCHES
        )


@dataclass(frozen=True, slots=True)
class World:
    """The model, loaded for each way."""

    runner: ModelRunner
    llm: LLM
    cluster: ServedCluster


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
    """Two minutes where nothing else runs."""
    say("step: loading the model four times")
    runner = load_runner(checkpoint, config.threads)
    with (
        LLM(checkpoint, threads=config.threads, kv_memory_bytes=KV_BYTES, tokenizer=False, prefix_caching=False) as llm,
        # SSE cannot ask for a way: `never` sends all of it to the one worker.
        serving(servable(checkpoint), config.threads, ("--no-prefix-caching",), way="never") as cluster,
    ):
        world = World(runner, llm, cluster)
        say("step: warming up")
        # Served answers stay as long: streams that begin one after the other must all stream at once for a while.
        _round(world, replace(config, tokens=WARM_TOKENS), Seconds(), 0)
        seconds = Seconds()
        for number in range(1, config.rounds + 1):
            say(f"step: round {number} of {config.rounds}")
            _round(world, config, seconds, number)
            say(f"step: {seconds.said()}")
    return step_report(seconds, config)


def _round(world: World, config: StepBenchConfig, seconds: Seconds, number: int) -> None:
    """Every way at every batch size, on the prompts of round `number`."""
    rng = random.Random(config.seed + number)
    read_s = HALF_B.matmul_parameters * 2 / measure_limits(config.threads, LIMIT_TRIES).read_gb_per_s.high / 1e9
    for batch in BATCHES:
        prompts = random_prompts(rng, 2 * batch, config.prompt_tokens, HALF_B.vocab_size)
        half = prompts[:batch]
        for way, taken in (
            (LIMIT, read_s),
            ("bare step", bare_s(world.runner, half, config.tokens)),
            ("LLM", llm_s(world.llm, prompts, config.tokens)),
            ("gRPC", server_s(world.cluster, Protocol.GRPC, half, config.served_tokens)),
            ("SSE", server_s(world.cluster, Protocol.SSE, half, config.served_tokens)),
        ):
            seconds.of[way, batch].append(taken)


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


def server_s(cluster: ServedCluster, protocol: Protocol, prompts: list[list[int]], num_tokens: int) -> float:
    """The mean gap between a stream's tokens while all stream."""
    grpc = protocol is Protocol.GRPC
    # Which way an answer went is only told, and checked, over gRPC.
    route = Route.COLOCATED if grpc else Route.ANY
    requests = tuple(LoadRequest(tuple(prompt), num_tokens, route) for prompt in prompts)
    address = cluster.grpc if grpc else cluster.http
    answers = run_load(LoadPlan(protocol, address, cluster.model, len(requests), requests))
    return steady_itl_s([answer.times for answer in answers])


def step_report(seconds: Seconds, config: StepBenchConfig) -> Report:
    """Both ways' cost over the bare step, against the bar."""
    measures, verdicts = [], []
    for batch in BATCHES:
        bare = seconds.spread_ms("bare step", batch)
        for way in (LIMIT, *WAYS):
            measures.append(Measure(f"{way}, batch {batch}", "ms a token", seconds.spread_ms(way, batch).runs))
        over_limit = ratio(bare, seconds.spread_ms(LIMIT, batch))
        name = f"bare step over the memory's limit, batch {batch}"
        verdicts.append(Verdict(name, over_limit, "x", LIMIT_BARS[batch], False))
        for way in WAYS[1:]:
            over = ratio(seconds.spread_ms(way, batch), bare)
            verdicts.append(Verdict(f"{way} over the bare step, batch {batch}", over, "x", LOSS_BAR, False))
    return Report(
        name="step",
        title="From the model's bare step to a token",
        command=f"python -m bench step --rounds {config.rounds} --threads {config.threads}",
        method=f"0.5B-shaped bf16 model, {config.threads} threads, prompts of {config.prompt_tokens} tokens, greedy. Bare: the "
        f"mean of {config.tokens} calls of `execute`. LLM: a call of {config.tokens + 1} tokens less one of 1, over "
        f"{config.tokens}. gRPC, SSE: the mean gap of streams while all stream, through router and one worker that does both; "
        "these and the client are on the same cores. Limit: all weights at the memory's read rate of the round.",
        measures=tuple(measures),
        verdicts=tuple(verdicts),
    )
