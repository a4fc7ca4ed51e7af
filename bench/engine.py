"""The engine alone beside transformers' `generate`: same weights, same prompts, same threads, in turns, in one process.

    round:  ours: prefill, decode at 1, 8, 16 · transformers: the same      (every other round the other way about)

A decode step is (end of the last step - end of the first) / (steps - 1); prefill is from handing the prompt over to its
token. Does not know how either side works.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from bench.checkpoint import HALF_B
from bench.limits import Limits
from bench.progress import Say
from bench.report import Measure, Report, Verdict
from bench.stats import Spread, ratio, spread

PREFILL_BAR = 1.0
DECODE_BARS = {1: 2.0, 8: 2.2, 16: 2.5}
WARM_TOKENS = 4
BF16_BYTES = 2


class Subject(Protocol):
    """Something that generates greedily and can be timed."""

    @property
    def name(self) -> str:
        """How the report calls it."""
        ...

    def step_ends_s(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> tuple[float, ...]:
        """Generate `num_tokens` for prompts of one length; seconds from the call to the end of each step."""
        ...


@dataclass(frozen=True, slots=True)
class EngineBenchConfig:
    """Sizes in tokens."""

    threads: int = 2
    rounds: int = 5
    prefill_tokens: int = 1024
    decode_prompt_tokens: int = 128
    decode_tokens: int = 32
    seed: int = 0


@dataclass(frozen=True, slots=True)
class RoundTimes:
    """One subject's figures of one round."""

    prefill_tokens_per_s: float
    decode_step_s: dict[int, float]  # by batch size


def random_prompts(rng: random.Random, count: int, num_tokens: int, vocab_size: int) -> list[list[int]]:
    """Prompts that share nothing, so that no prefix cache can help."""
    return [[rng.randrange(vocab_size) for _ in range(num_tokens)] for _ in range(count)]


def run_round(subject: Subject, config: EngineBenchConfig, seed: int) -> RoundTimes:
    """Prefill once, then decode at each batch size, on the prompts of `seed`."""
    rng = random.Random(seed)
    prompt = random_prompts(rng, 1, config.prefill_tokens, HALF_B.vocab_size)
    prefill_s = subject.step_ends_s(prompt, 1)[0]
    decode = {}
    for batch in DECODE_BARS:
        prompts = random_prompts(rng, batch, config.decode_prompt_tokens, HALF_B.vocab_size)
        ends = subject.step_ends_s(prompts, config.decode_tokens)
        decode[batch] = (ends[-1] - ends[0]) / (len(ends) - 1)
    return RoundTimes(config.prefill_tokens / prefill_s, decode)


def run_rounds(ours: Subject, peer: Subject, config: EngineBenchConfig, say: Say) -> dict[str, list[RoundTimes]]:
    """All rounds of both, by subject name, after one short round each that does not count."""
    rng = random.Random(config.seed)
    for subject in (ours, peer):
        for batch in DECODE_BARS:
            prompts = random_prompts(rng, batch, config.decode_prompt_tokens, HALF_B.vocab_size)
            subject.step_ends_s(prompts, WARM_TOKENS)
        subject.step_ends_s(random_prompts(rng, 1, config.prefill_tokens, HALF_B.vocab_size), 1)
    times: dict[str, list[RoundTimes]] = {ours.name: [], peer.name: []}
    for number in range(config.rounds):
        order = (ours, peer) if number % 2 == 0 else (peer, ours)
        for subject in order:
            say(f"engine: round {number + 1} of {config.rounds}, {subject.name}")
            times[subject.name].append(run_round(subject, config, config.seed + 1 + number))
    return times


def engine_report(limits: Limits, ours: str, times: dict[str, list[RoundTimes]], config: EngineBenchConfig) -> Report:
    """Both subjects' figures, ours over theirs against the bars, and how far both are from the machine's limits."""
    (peer,) = (name for name in times if name != ours)
    prefill = {name: spread([r.prefill_tokens_per_s for r in rounds]) for name, rounds in times.items()}
    decode = {
        (name, batch): spread([r.decode_step_s[batch] for r in rounds], 1e3)
        for name, rounds in times.items()
        for batch in DECODE_BARS
    }
    measures = [Measure(f"prefill {config.prefill_tokens}, {name}", "tokens/s", s.runs) for name, s in prefill.items()]
    measures += [Measure(f"decode step, batch {b}, {name}", "ms", s.runs) for (name, b), s in decode.items()]
    verdicts = [Verdict("prefill, ours over transformers", ratio(prefill[ours], prefill[peer]), "x", PREFILL_BAR, True)]
    for batch, bar in DECODE_BARS.items():
        faster = ratio(decode[peer, batch], decode[ours, batch])
        verdicts.append(Verdict(f"decode at batch {batch}, transformers over ours", faster, "x", bar, True))
    return Report(
        name="engine",
        title="The engine alone, beside transformers",
        command=f"python -m bench engine --rounds {config.rounds} --threads {config.threads}",
        method=f"0.5B-shaped Llama, random bf16 weights, {config.threads} threads, both in one process in turns. Decode: "
        f"{config.decode_prompt_tokens}-token prompts, {config.decode_tokens} new tokens, steps after the first, the whole "
        "`Engine.step`. transformers: `generate`, greedy, sdpa, KV cache, no end of sequence.",
        measures=(*measures, *limits.measures()),
        verdicts=tuple(verdicts),
        notes=_roofline(limits, prefill[ours], {b: decode[ours, b] for b in DECODE_BARS}, config),
    )


def _roofline(limits: Limits, prefill: Spread, decode: dict[int, Spread], config: EngineBenchConfig) -> tuple[str, ...]:
    """How much of what the machine could do at most is reached: arithmetic in prefill, reading the weights in decode."""
    best_prefill = (
        config.prefill_tokens * limits.gemm_gflop_per_s.high * 1e9 / HALF_B.prefill_flop(config.prefill_tokens)
    )
    read_ms = HALF_B.matmul_parameters * BF16_BYTES / limits.read_gb_per_s.high / 1e6
    gemm_ms = {b: 2 * b * HALF_B.matmul_parameters / limits.gemm_gflop_per_s.high / 1e6 for b in decode}
    shares = ", ".join(f"batch {b} {max(read_ms, gemm_ms[b]) / s.median:.0%}" for b, s in decode.items())
    return (
        f"Roofline of prefill (bf16 GEMM rate): {best_prefill:.0f} tokens/s; reached: {prefill.median / best_prefill:.0%}.",
        f"Roofline of a decode step (weights read once at the memory's rate): {read_ms:.1f} ms; reached: {shares}.",
    )


def run_engine(path: Path, limits: Limits, config: EngineBenchConfig, say: Say) -> Report:
    """Load both sides from the checkpoint at `path` and measure them, some minutes."""
    import torch

    from bench.ours import load_ours
    from bench.peer import TransformersPeer

    torch.set_num_threads(config.threads)
    say("engine: loading the model twice")
    ours, peer = load_ours(path, config.threads), TransformersPeer(path)
    torch.set_num_threads(config.threads)
    return engine_report(limits, ours.name, run_rounds(ours, peer, config, say), config)
