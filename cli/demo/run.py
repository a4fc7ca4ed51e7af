"""The demo from beginning to end:

    model ─▶ router + prefill + decode ─▶ questions at once ─▶ stop ─▶ router + one worker ─▶ same questions ─▶ stop ─▶ report

Both clusters run the same model, type and number of threads, so the only difference is where the prompt was read.
Returns whether all went well; every cluster is stopped whatever happens. Does not know flags.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

from rich.console import Console
from rich.text import Text

from cli.cluster import LocalCluster
from cli.config import ClusterConfig
from cli.demo.asking import Answer, Asker
from cli.demo.questions import Protocol, Question
from cli.demo.report import differences, measurements
from cli.demo.screen import make_screen
from cli.process import ProcessState, ProcessStatus
from cli.progress import working
from contracts.errors import DiptychError
from rpc.channel import open_channel

KEPT_LINES = 40


class QuietListener:
    """Keeps what the processes said, for the case that something goes wrong."""

    def __init__(self) -> None:
        self.lines: deque[str] = deque(maxlen=KEPT_LINES)
        self.restarts: list[str] = []

    def changed(self, status: ProcessStatus) -> None:
        """See ProcessListener."""
        if status.state in (ProcessState.RESTARTING, ProcessState.DEAD):
            self.restarts.append(f"{status.name}: {status.detail}")

    def line(self, name: str, text: str) -> None:
        """See ProcessListener."""
        self.lines.append(f"{name} | {text}")


async def run_demo(config: ClusterConfig, questions: Sequence[Question], console: Console) -> bool:
    """Ask `questions` of the two-pool cluster of `config` and of a colocated one; whether their token ids are the same."""
    listener = QuietListener()
    try:
        async with _cluster(config, listener, "router + 1 prefill + 1 decode worker") as cluster:
            console.print(Text(f"OpenAI API at {cluster.http_url}/v1, gRPC at {cluster.grpc_address}"))
            with make_screen(questions, console) as screen:
                writers = [screen.writer(index) for index in range(len(questions))]
                two_pools = await _ask_all(cluster, questions, writers)
        colocated_config = replace(config, num_prefill=0)
        async with _cluster(
            colocated_config, listener, "a router and one worker that does both (colocated)"
        ) as cluster:
            with working("Asking the colocated worker the same questions") as say:
                num_pieces = itertools.count(1)
                writers = [lambda _: say(f"pieces of text so far: {next(num_pieces)}")] * len(questions)
                over_grpc = [replace(question, protocol=Protocol.GRPC) for question in questions]
                colocated = await _ask_all(cluster, over_grpc, writers)
    except DiptychError:
        for line in listener.lines:
            console.print(Text(line, "dim"), soft_wrap=True)
        raise
    return _report(console, listener, two_pools, colocated)


@asynccontextmanager
async def _cluster(config: ClusterConfig, listener: QuietListener, what: str) -> AsyncIterator[LocalCluster]:
    """A cluster that answers; stopped at the end, with a word on both."""
    async with LocalCluster(config, listener) as cluster:
        with working(f"Starting {what}"):
            await cluster.wait_ready()
        yield cluster
        with working(f"Stopping {what}"):
            await cluster.stop()


async def _ask_all(
    cluster: LocalCluster, questions: Sequence[Question], writers: Sequence[Callable[[str], None]]
) -> list[Answer]:
    """All questions at once; the answers in their order. The first failure cancels the others."""
    async with open_channel(cluster.grpc_address) as channel:
        asker = Asker(cluster.http_url, channel, cluster.config.model_name)
        tasks = [
            asyncio.create_task(_ask(asker, question, write))
            for question, write in zip(questions, writers, strict=True)
        ]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            await asker.close()


async def _ask(asker: Asker, question: Question, write: Callable[[str], None]) -> Answer:
    """The answer; its last line is ended, so that a screen of lines shows it now and not when the slowest is done."""
    answer = await asker.ask(question, write)
    write("\n")
    return answer


def _report(console: Console, listener: QuietListener, two_pools: list[Answer], colocated: list[Answer]) -> bool:
    console.print()
    console.print(measurements(two_pools, console.width))
    for text in listener.restarts:
        console.print(Text(f"a process died meanwhile: {text}", "bold red"), soft_wrap=True)
    problems = differences(two_pools, colocated)
    num_same = len(two_pools) - len(problems)
    verdict = "no" if problems else "yes"
    style = "bold red" if problems else "bold green"
    console.print(Text(f"same token ids colocated: {verdict} ({num_same} of {len(two_pools)})", style))
    for text in problems:
        console.print(Text(f"  {text}"), soft_wrap=True)
    not_handed_off = [answer.question.title for answer in two_pools if answer.handoff is None]
    for title in not_handed_off:
        console.print(Text(f"  not handed off: {title}"), soft_wrap=True)
    return not problems and not listener.restarts and not not_handed_off
