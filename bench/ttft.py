"""Time to first token through two pools against one: the same cluster, the same prompts' length, in turns.

    256-token prompt ─▶ router ─▶ prefill worker ─▶ first token            disaggregated
    256-token prompt ─▶ router ─▶ decode worker  ─▶ first token            colocated

One request at a time, no prompt twice, so nothing queues and no prefix cache helps; the client forces the way. Does not know
how the cluster does it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from bench.cluster import ServedCluster
from bench.load import LoadAnswer, LoadFailed, LoadPlan, LoadRequest, Protocol, Route, run_load
from bench.progress import Say
from bench.report import Measure, Report, Verdict, measure
from bench.stats import Spread, spread

TTFT_BAR_MS = 5.0
ORDINARY_FROM = 32  # ids below are special tokens in some vocabularies
WARM_PAIRS = 3


@dataclass(frozen=True, slots=True)
class TtftBenchConfig:
    """Sizes in tokens; `pairs` requests go each way."""

    pairs: int = 30
    prompt_tokens: int = 256
    output_tokens: int = 8
    seed: int = 0


def alternating_requests(config: TtftBenchConfig, vocab_size: int) -> tuple[LoadRequest, ...]:
    """Two requests a pair, one each way, the first way changing from pair to pair; warm-up pairs come first."""
    rng = random.Random(config.seed)
    requests = []
    for pair in range(WARM_PAIRS + config.pairs):
        ways = [Route.DISAGGREGATED, Route.COLOCATED]
        for way in ways if pair % 2 == 0 else reversed(ways):
            prompt = tuple(rng.randrange(ORDINARY_FROM, vocab_size) for _ in range(config.prompt_tokens))
            requests.append(LoadRequest(prompt, config.output_tokens, way))
    return tuple(requests)


def run_ttft(cluster: ServedCluster, vocab_size: int, config: TtftBenchConfig, say: Say) -> Report:
    """Send all requests, one at a time."""
    say(f"ttft: {config.pairs} prompts of {config.prompt_tokens} tokens each way")
    requests = alternating_requests(config, vocab_size)
    plan = LoadPlan(Protocol.GRPC, cluster.grpc, cluster.model, concurrency=1, requests=requests)
    answers = run_load(plan)[2 * WARM_PAIRS :]
    if any(answer.cached_tokens for answer in answers):
        raise LoadFailed("a prompt was found in a prefix cache: the prompts were to share nothing")
    return ttft_report(answers, cluster.model, config)


def ttft_report(answers: Sequence[LoadAnswer], model: str, config: TtftBenchConfig) -> Report:
    """TTFT and the gap to the second token each way, and what the hand-offs took."""
    ways = {way: [a for a in answers if a.route is way] for way in (Route.DISAGGREGATED, Route.COLOCATED)}
    ttft = {way: spread([a.times.ttft_s for a in some], 1e3) for way, some in ways.items()}
    gap = {way: spread([a.times.itl_s[0] for a in some], 1e3) for way, some in ways.items()}
    added = ttft[Route.DISAGGREGATED].median - ttft[Route.COLOCATED].median
    pairs = zip(ttft[Route.DISAGGREGATED].runs, ttft[Route.COLOCATED].runs, strict=True)
    measures = [measure(f"TTFT, {way.value}", "ms", s) for way, s in ttft.items()]
    measures.append(Measure("TTFT, disaggregated - colocated, pair by pair", "ms", tuple(d - c for d, c in pairs)))
    measures += [measure(f"gap to the second token, {way.value}", "ms", s) for way, s in gap.items()]
    measures += _handoff_measures(ways[Route.DISAGGREGATED])
    tails = ", ".join(f"{way.value} {s.at(99):.0f} ms" for way, s in ttft.items())
    connectors = {answer.handoff.connector for answer in ways[Route.DISAGGREGATED]}
    return Report(
        name="ttft",
        title="Time to first token, two pools against one",
        command=f"python -m bench ttft --pairs {config.pairs}",
        method=f"{model}; router, 1 prefill and 1 decode worker, one thread each, idle machine. "
        f"{config.prompt_tokens}-token prompts one at a time over gRPC, alternately through both pools and through the "
        "decode worker alone; TTFT is measured by the client.",
        measures=tuple(measures),
        verdicts=(Verdict("median TTFT, disaggregated - colocated", added, "ms", TTFT_BAR_MS, False),),
        notes=(f"99th percentile of TTFT: {tails}.", f"Connector: {', '.join(sorted(connectors))}."),
    )


def _handoff_measures(answers: Sequence[LoadAnswer]) -> list[Measure]:
    def row(name: str, unit: str, values: Sequence[float]) -> Measure:
        return measure(name, unit, Spread(tuple(values)))

    handoffs = [answer.handoff for answer in answers]
    return [
        row("hand-off, bytes", "MB", [h.kv_bytes / 1e6 for h in handoffs]),
        row("hand-off, writes under way", "ms", [h.transfer_s * 1e3 for h in handoffs]),
        row("hand-off, exposed after the last chunk", "ms", [h.exposed_s * 1e3 for h in handoffs]),
        row("hand-off, rate", "GB/s", [h.gb_per_s for h in handoffs]),
    ]
