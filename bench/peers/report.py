"""What the rounds say: a table for each model, every number with its runs, our bars. Ratios are medians of those of each round.

The limit of a decode step is its weights' bytes at the memory's read rate; that of prefill is its arithmetic at the bf16 GEMM rate.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench.checkpoint import Shape
from bench.limits import Limits
from bench.peers.run import BATCHES, Outcome, PeersConfig, Turn
from bench.peers.subjects import OURS, PRECISIONS
from bench.report import Measure, Report, Table, Verdict, number
from bench.stats import Spread

WEIGHT_BYTES = {"bf16": 2.0, "int8": 34 / 32, "int4": 18 / 32}  # quantised ones with a scale for 32, as Q8_0 and Q4_0
HEAD = {
    "bf16": "bf16",
    "int8": "int8",
    "int4": "int8",
}  # with int4 all engines keep the output matrix in six or eight bits
LIMIT_BARS = {"bf16": {1: 1.15, 8: 1.3, 16: 1.5}, "int8": {1: 1.25}, "int4": {1: 1.25}}
LLAMA_CPP, OPENVINO = "llama.cpp", "OpenVINO GenAI"
Figure = Callable[[Turn], float]  # of a turn, the smaller the better


@dataclass(frozen=True, slots=True)
class Part:
    """One model's rounds."""

    name: str
    shape: Shape
    outcome: Outcome


def prefill_s(turn: Turn) -> float:
    """For one token of a prompt."""
    return 1 / turn.prefill_tokens_per_s


def step_s(batch: int) -> Figure:
    """Of a decode step at this batch size."""
    return lambda turn: turn.step_s[batch]


def read_limit_s(shape: Shape, precision: str, limits: Limits) -> float:
    """The shortest decode step that memory allows: every weight read once."""
    head = shape.vocab_size * shape.hidden_size
    weights = (shape.matmul_parameters - head) * WEIGHT_BYTES[precision] + head * WEIGHT_BYTES[HEAD[precision]]
    return weights / limits.read_gb_per_s.high / 1e9


def over_limit(part: Part, label: str, batch: int) -> float:
    """How many times the memory's limit of its round a step takes."""
    _, _, precision = label.rpartition(" ")
    pairs = zip(part.outcome.turns[label], part.outcome.limits, strict=True)
    return statistics.median(t.step_s[batch] / read_limit_s(part.shape, precision, one) for t, one in pairs)


def ahead(part: Part, ours: str, peer: str, figure: Figure) -> float:
    """How many times as long as we the peer takes."""
    turns = part.outcome.turns
    return statistics.median(figure(b) / figure(a) for a, b in zip(turns[ours], turns[peer], strict=True))


def peers_report(parts: Sequence[Part], absent: Sequence[str], config: PeersConfig) -> Report:
    """All of it."""
    return Report(
        name="peers",
        title="Our engine beside others",
        command=f"python -m bench peers --rounds {config.rounds} --threads {config.threads}",
        method=f"{config.threads} threads each, every engine in a process of its own, stopped while others are measured, in "
        f"turns. Prefill: one prompt of {config.prefill_tokens} random tokens to its first token. Decode: prompts of "
        f"{config.decode_prompt_tokens}, {config.decode_tokens} tokens, steps after the first, greedy. int8 and int4 are weights "
        "only: ours, OpenVINO's own (int8 by channel, int4 symmetric in groups of 64) and llama.cpp's Q8_0 and Q4_0; all keep the "
        "output matrix of int4 in more bits. Limits are taken in each round.",
        measures=tuple(m for part in parts for m in (*_measures(part), *_limits(part))),
        verdicts=tuple(v for part in parts for v in _verdicts(part)),
        tables=tuple(_table(part, config) for part in parts),
        notes=(
            *(note for part in parts for note in _notes(part)),
            *(f"{name} is not installed here." for name in absent),
        ),
    )


def _measures(part: Part) -> list[Measure]:
    found = []
    for label, turns in part.outcome.turns.items():
        found.append(
            Measure(f"{part.name}: prefill, {label}", "tokens/s", tuple(t.prefill_tokens_per_s for t in turns))
        )
        for batch in BATCHES:
            runs = tuple(t.step_s[batch] * 1e3 for t in turns)
            found.append(Measure(f"{part.name}: decode step, batch {batch}, {label}", "ms", runs))
    return found


def _limits(part: Part) -> tuple[Measure, ...]:
    limits = part.outcome.limits
    read = tuple(one.read_gb_per_s.high for one in limits)
    gemm = tuple(one.gemm_gflop_per_s.high for one in limits)
    return (Measure(f"{part.name}: memory read", "GB/s", read), Measure(f"{part.name}: bf16 GEMM", "GFLOP/s", gemm))


def _verdicts(part: Part) -> list[Verdict]:
    found = []
    for precision in PRECISIONS:
        ours = f"{OURS} {precision}"
        if ours not in part.outcome.turns:
            continue
        for batch, bar in LIMIT_BARS[precision].items():
            name = f"{part.name}, {precision}: batch {batch} over the memory's limit"
            found.append(Verdict(name, over_limit(part, ours, batch), "x", bar, False))
        found += _against(part, precision, ours)
    return found


def _against(part: Part, precision: str, ours: str) -> list[Verdict]:
    """Ahead of the best of all in bf16's prefill, of llama.cpp at batch 1, of OpenVINO in all else."""
    figures: dict[str, tuple[Figure, str]] = {"prefill": (prefill_s, OPENVINO)}
    figures |= {f"batch {batch}": (step_s(batch), LLAMA_CPP if batch == 1 else OPENVINO) for batch in BATCHES}
    found = []
    for what, (figure, peer) in figures.items():
        peers = [label for label in part.outcome.turns if label.endswith(f" {precision}") and label != ours]
        if precision != "bf16":
            peers = [label for label in peers if label == f"{peer} {precision}"]
        if peers:
            value, best = min((ahead(part, ours, label, figure), label) for label in peers)
            found.append(Verdict(f"{part.name}, {precision}: {what}, {best} over ours", value, "x", 1.0, True))
    return found


def _table(part: Part, config: PeersConfig) -> Table:
    limits = part.outcome.limits
    rows = []
    for precision in PRECISIONS:
        read = statistics.median(read_limit_s(part.shape, precision, one) for one in limits) * 1e3
        gemm = statistics.median(one.gemm_gflop_per_s.high for one in limits) * 1e9
        best = config.prefill_tokens * gemm / part.shape.prefill_flop(config.prefill_tokens)
        rows.append(
            (f"limit, {precision}", number(best) if precision == "bf16" else "", *[number(read)] * len(BATCHES))
        )
        for label, turns in part.outcome.turns.items():
            if label.endswith(f" {precision}"):
                steps = [number(Spread(tuple(t.step_s[b] * 1e3 for t in turns)).median) for b in BATCHES]
                speed = statistics.median(t.prefill_tokens_per_s for t in turns)
                rows.append((label, number(speed), *steps))
    columns = ("", f"prefill {config.prefill_tokens}, tokens/s", *(f"batch {b}, ms a step" for b in BATCHES))
    return Table(f"{part.name}, medians", columns, tuple(rows))


def _notes(part: Part) -> list[str]:
    turns, notes = part.outcome.turns, []
    ours = f"{OURS} bf16"
    if ours in turns:
        wanted = [token for one in turns[ours] for token in one.tokens]
        same = {
            label: statistics.fmean(
                a == b for a, b in zip(wanted, (t for one in them for t in one.tokens), strict=True)
            )
            for label, them in turns.items()
            if label != ours
        }
        said = ", ".join(f"{label} {share:.0%}" for label, share in same.items())
        notes.append(
            f"{part.name}: tokens at batch 1 that are ours in bf16 (near ties in rounding part them for good): {said}."
        )
    notes.append(f"Versions: {', '.join(part.outcome.versions.values())}.")
    return notes + [f"{part.name}: {label} is left out: {reason}" for label, reason in part.outcome.failed.items()]
