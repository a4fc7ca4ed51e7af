"""What each question's answer is, and whether what a client heard is that.

The truth is taken once, while nothing disturbs, from a decode worker alone (the colocated way), every question by itself;
after that the same question must get the same answer over both pools, on any worker, after any number of failures, and
whoever leaves early must have heard the beginning of it. Does not know how questions travel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tests.soak.asking import Asker, Heard, Outcome
from tests.soak.plan import Door, Planned, Question


class NoTruth(RuntimeError):
    """The calm cluster did not answer; nothing can be compared."""


@dataclass(frozen=True, slots=True)
class TrueAnswer:
    """One question's answer of one index."""

    text: str
    token_ids: tuple[int, ...]
    reason: str


Truth = tuple[TrueAnswer, ...]


async def take_truth(asker: Asker, questions: Sequence[Question]) -> tuple[Truth, ...]:
    """The answers of a calm cluster's decode workers alone, one question at a time. Raises NoTruth."""
    truths = []
    for number, question in enumerate(questions):
        heard = await asker.ask(question, Planned(0.0, number, Door.GRPC), "colocated")
        if heard.outcome is not Outcome.DONE:
            raise NoTruth(f"question {number} on a calm cluster: {heard.outcome} {heard.error}")
        parts = [heard.parts[index] for index in range(question.n)]
        if any(part.reason is None for part in parts):
            raise NoTruth(f"question {number}: an answer has no ending")
        truth = tuple(TrueAnswer(part.text, part.token_ids, part.reason or "") for part in parts)
        if wrong := differences(heard, truth):
            raise NoTruth(f"question {number}: {wrong}")
        truths.append(truth)
    return tuple(truths)


def differences(heard: Heard, truth: Truth) -> list[str]:
    """What in `heard` is not the truth: none for one that is right, or right as far as its client stayed."""
    found = []
    complete = heard.outcome is Outcome.DONE
    if complete and sorted(heard.parts) != list(range(len(truth))):
        found.append(f"answers {sorted(heard.parts)}, not {len(truth)} of them")
    for index, part in heard.parts.items():
        if index >= len(truth):
            found.append(f"answer {index} was not asked for")
            continue
        true = truth[index]
        ended = part.reason is not None
        if part.token_ids != (true.token_ids if ended else true.token_ids[: len(part.token_ids)]):
            found.append(f"answer {index}: tokens {part.token_ids}, not {true.token_ids}")
        if not (part.text == true.text if ended else true.text.startswith(part.text)):
            found.append(f"answer {index}: text {part.text!r}, not {true.text!r}")
        if ended and part.reason != true.reason:
            found.append(f"answer {index}: ended by {part.reason}, not {true.reason}")
        if complete and not ended:
            found.append(f"answer {index}: closed without an ending after {len(part.token_ids)} tokens")
    made = sum(len(true.token_ids) for true in truth)
    if complete and heard.usage != made:
        found.append(f"usage says {heard.usage} tokens, not {made}")
    return found
