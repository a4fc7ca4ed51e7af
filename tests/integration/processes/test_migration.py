"""An answer of 24 tokens goes on elsewhere from every index at which its worker can die: the same tokens, the same text.

Many answers run at once, and one kill meets each of them at another index; rounds are played until every index was the one
of a death, for a greedy and for a seeded answer. What counts as proof is what the router sends to the next prefill worker:
the prompt, and exactly so many tokens.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from tokenizers import Tokenizer

from tests.integration.processes.client import Answer, question
from tests.integration.processes.cluster import TINY, Cluster
from tests.integration.processes.messages import batch_of, commit_of, reserve_of, run_of
from tests.integration.processes.moments import LIMIT_S, stopped
from tests.integration.processes.proxy import Passing

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="session")]
NUM_TOKENS = 24
NUM_ANSWERS = 16
MAX_ROUNDS = 40

Point = tuple[bool, int]  # seeded, tokens that the client had when the worker died


@dataclass
class Progress:
    """How far the tokens of each answer have come on the wire, and from where answers went on elsewhere."""

    covered: set[Point]
    need: int
    prompts: dict[str, tuple[int, ...]] = field(default_factory=dict)  # hand-off → prompt
    passed: dict[str, dict[str, int]] = field(default_factory=dict)  # decode worker → hand-off → tokens its client has
    runs: dict[tuple[int, ...], list[int]] = field(default_factory=dict)  # prompt → tokens so far, at each attempt
    seeded: dict[tuple[int, ...], bool] = field(default_factory=dict)

    def note(self, passing: Passing) -> bool:
        """Read who is asked what; never the moment."""
        run, ticket = run_of(passing), commit_of(passing)
        if run is not None:
            so_far = self.runs.setdefault(tuple(run.request.prompt_token_ids), [])
            so_far.append(len(run.request.output_token_ids))
        elif ticket is not None:
            self.prompts[ticket.handoff_id] = tuple(ticket.request.prompt_token_ids)
            self.passed.setdefault(server_of(passing), {})[ticket.handoff_id] = len(ticket.request.output_token_ids)
        return False

    def is_moment(self, passing: Passing) -> bool:
        """Whether enough answers of one decode worker are where none has died yet, before this batch of tokens."""
        batch = batch_of(passing)
        if batch is None:
            return False
        here = self.passed[server_of(passing)]
        new = {(self.seeded[self.prompts[h]], passed) for h, passed in here.items()} - self.covered
        if len(new) >= self.need:
            return True
        for delta in batch.deltas:
            here[delta.request_id] = delta.first_index + len(delta.token_ids)
            if here[delta.request_id] == NUM_TOKENS:
                del here[delta.request_id]
        return False


def server_of(passing: Passing) -> str:
    """The worker whose door it passes."""
    return passing.link.proxy.name.partition(".")[0]


async def played(made: Cluster, label: str, progress: Progress) -> list[Answer]:
    """Many answers at once, and the death of a decode worker where it brings something new."""
    await made.whole()
    made.trap(progress.note, hold=False)
    trap = made.trap(progress.is_moment, lambda passing: made.freeze(server_of(passing)))
    answers = []
    for i in range(NUM_ANSWERS):
        asked = question(f"{label} {i}", 24 + 5 * i, NUM_TOKENS, seeded=i % 2 == 1)
        progress.seeded[asked.prompt] = asked.seed is not None
        answers.append(made.client.ask(asked))
    ended = asyncio.gather(*(answer.end(LIMIT_S) for answer in answers))
    sprung = asyncio.ensure_future(trap.sprung.wait())
    await asyncio.wait((ended, sprung), return_when=asyncio.FIRST_COMPLETED)
    sprung.cancel()
    if trap.passing is not None:
        worker = server_of(trap.passing)
        await stopped(made, worker)
        by_prompt = {answer.question.prompt: answer for answer in answers}
        for handoff_id, passed in tuple(progress.passed[worker].items()):  # what is on its way may still pass
            at = by_prompt[progress.prompts[handoff_id]]
            await at.until(lambda answer, passed=passed: len(answer.token_ids) >= passed, LIMIT_S)
        made.children[worker].signal(signal.SIGKILL)
    else:
        progress.need = max(1, progress.need - 1)
    await ended
    return answers


async def check_all(made: Cluster, answers: Sequence[Answer], tokenizer: Tokenizer) -> None:
    """Each is the answer that one engine alone gives, ids and text."""
    truths = await asyncio.gather(*(made.truth(answer.question) for answer in answers))
    for answer, truth in zip(answers, truths, strict=True):
        assert (answer.status, answer.error, answer.broken, answer.finish_reason) == (200, None, None, "length")
        assert answer.token_ids == truth
        assert answer.text == tokenizer.decode(truth)


@pytest.mark.timeout(300)
async def test_an_answer_goes_on_from_every_index(tcp: Cluster) -> None:
    tokenizer = Tokenizer.from_file(str(TINY / "tokenizer.json"))
    wanted = {(seeded, index) for seeded in (False, True) for index in range(1, NUM_TOKENS)}
    covered: set[Point] = set()
    need = 6
    for round_ in range(MAX_ROUNDS):
        progress = Progress(covered, min(need, len(wanted - covered)))
        answers = await played(tcp, f"round {round_}", progress)
        await check_all(tcp, answers, tokenizer)
        need = progress.need
        for prompt, so_far in progress.runs.items():
            covered |= {(progress.seeded[prompt], index) for index in so_far[1:] if index > 0}
        if wanted <= covered:
            break
    print(f"{len(covered)} points in {round_ + 1} rounds")
    assert wanted <= covered, sorted(wanted - covered)
    await tcp.whole()
    tcp.check_nothing_leaked()


async def test_an_answer_begins_anew_when_no_token_had_come(tcp: Cluster) -> None:
    """Index 0: the prefill worker dies before the first token of all that it has."""
    tokenizer = Tokenizer.from_file(str(TINY / "tokenizer.json"))
    await tcp.whole()
    progress = Progress(set(), NUM_ANSWERS)
    tcp.trap(progress.note, hold=False)
    trap = tcp.trap(lambda p: reserve_of(p) is not None, lambda passing: tcp.freeze(passing.link.client))
    answers = [tcp.client.ask(question(f"index 0 {i}", 200, NUM_TOKENS, seeded=i // 2 % 2 == 1)) for i in range(8)]
    progress.seeded |= {answer.question.prompt: answer.question.seed is not None for answer in answers}
    for answer in answers:
        await tcp.route(answer)
    await asyncio.wait_for(trap.sprung.wait(), LIMIT_S)
    assert trap.passing is not None
    tcp.children[trap.passing.link.client].signal(signal.SIGKILL)
    await asyncio.gather(*(answer.end(LIMIT_S) for answer in answers))
    await check_all(tcp, answers, tokenizer)
    again = {progress.seeded[prompt] for prompt, so_far in progress.runs.items() if so_far == [0, 0]}
    assert again == {False, True}
