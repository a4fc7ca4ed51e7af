"""The table at the end of the demo, and whether two runs gave the same token ids. Does not know how they were run."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.table import Table

from cli.demo.asking import Answer

MIB = 2**20
NUMBERS_WIDTH = 71  # all columns but the first, at their widest


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` (0 to 1) of them do not exceed; nan of none."""
    if not values:
        return math.nan
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def mean(values: Sequence[float]) -> float:
    """Their mean; nan of none."""
    return sum(values) / len(values) if values else math.nan


def measurements(answers: Sequence[Answer], width: int) -> Table:
    """One row a question: what its client saw and what its hand-off moved, in lines of `width` characters."""
    table = Table(
        title="What the clients saw, and what the hand-offs moved (KV)",
        title_justify="left",
        box=None,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        header_style="bold",
    )
    # Numbers are never cut; the questions have what is left of the line.
    table.add_column("\nquestion", no_wrap=True, overflow="ellipsis", max_width=max(8, width - NUMBERS_WIDTH))
    table.add_column("\nAPI", no_wrap=True)
    for column in ("prompt\ntokens", "answer\ntokens", "TTFT\nms", "ITL ms\nmean", "ITL ms\np99"):
        table.add_column(column, justify="right", no_wrap=True)
    for column in ("KV\nMiB", "KV\nms", "KV\nGB/s"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("\nconnector", no_wrap=True)
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
