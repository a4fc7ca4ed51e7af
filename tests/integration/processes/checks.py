"""What must hold for clients and for the cluster, whatever was done to it."""

from __future__ import annotations

from tests.integration.processes.client import Answer
from tests.integration.processes.cluster import Cluster
from tests.integration.processes.moments import LIMIT_S, Scene


async def check_answered(made: Cluster, answer: Answer) -> None:
    """It is whole, and what one engine alone gives."""
    await answer.end(LIMIT_S)
    assert (answer.broken, answer.error, answer.status) == (None, None, 200), made.logs()
    assert answer.finish_reason == "length"
    assert answer.token_ids == await made.truth(answer.question)


async def check_cut_off(scene: Scene) -> None:
    """The client of a router that is gone: a connection that ends, and nothing that is wrong."""
    for answer in (scene.victim, *scene.others):
        await answer.end(LIMIT_S)
        assert answer.broken is not None
        assert (answer.error, answer.finish_reason) == (None, None)
        truth = await scene.cluster.truth(answer.question)
        assert answer.token_ids == truth[: len(answer.token_ids)]
    await scene.cluster.idle()


async def check_whole_again(made: Cluster, before: Answer) -> None:
    """The dead are started again; the same question is answered as before; every block is back and nothing is left over."""
    await made.whole()
    again = made.client.ask(before.question)
    await check_answered(made, again)
    if before.finish_reason is not None:
        assert before.text == again.text
    await made.idle()
    made.check_nothing_leaked()
