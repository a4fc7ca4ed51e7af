"""The table at the end of the demo, and whether two runs gave the same token ids. Does not know how they were run."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.table import Table

from cli.demo.asking import Answer

MIB = 2**20


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` (0 to 1) of them do not exceed; nan of none."""
    if not values:
        return math.nan
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def mean(values: Sequence[float]) -> float:
    """Their mean; nan of none."""
    return sum(values) / len(values) if values else math.nan


def measurements(answers: Sequence[Answer]) -> Table:
    """One row a question: what its client saw and what its hand-off moved."""
    table = Table(title="What the clients saw, and what the hand-offs moved", title_justify="left")
    table.add_column("question", overflow="fold")
    table.add_column("door")
    for column in ("prompt\ntokens", "answer\ntokens", "TTFT\nms", "ITL\nmean ms", "ITL\np99 ms"):
        table.add_column(column, justify="right")
    for column in ("hand-off\nMiB", "hand-off\nms", "GB/s"):
        table.add_column(column, justify="right")
    table.add_column("connector")
    for number, answer in enumerate(answers, 1):
        table.add_row(
            f"{number} {answer.question.title}",
            answer.question.protocol,
            str(answer.num_prompt_tokens),
            str(len(answer.token_ids)),
            _ms(answer.ttft_s),
            _ms(mean(answer.gaps_s)),
            _ms(percentile(answer.gaps_s, 0.99)),
            *_handoff_cells(answer),
        )
    return table


def _handoff_cells(answer: Answer) -> tuple[str, str, str, str]:
    stats = answer.handoff
    if stats is None:
        return "-", "-", "-", "none"
    return f"{stats.kv_bytes / MIB:.2f}", f"{stats.transfer_s * 1e3:.2f}", f"{stats.gb_per_s:.2f}", stats.connector


def _ms(seconds: float) -> str:
    return "-" if math.isnan(seconds) else f"{seconds * 1e3:.1f}"


def differences(ours: Sequence[Answer], theirs: Sequence[Answer]) -> list[str]:
    """One line for each question whose token ids differ between two runs, naming the first place."""
    lines = []
    for number, (one, other) in enumerate(zip(ours, theirs, strict=True), 1):
        if one.token_ids == other.token_ids:
            continue
        pairs = zip(one.token_ids, other.token_ids, strict=False)
        shorter = min(len(one.token_ids), len(other.token_ids))
        place = next((index for index, (a, b) in enumerate(pairs) if a != b), shorter)
        lines.append(
            f"question {number}: token {place} is {_at(one, place)} disaggregated and {_at(other, place)} colocated"
        )
    return lines


def _at(answer: Answer, place: int) -> str:
    return str(answer.token_ids[place]) if place < len(answer.token_ids) else "the end"
