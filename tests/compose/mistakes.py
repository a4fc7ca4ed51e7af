"""What operators type wrong: what serves goes on; what cannot serve says why, once. A step of the kind that scene.py has."""

from __future__ import annotations

from tests.compose.journal import NotSo
from tests.compose.questions import PROMPTS, Asked, right
from tests.compose.scene import Scene
from tests.compose.stack import Stack
from tests.compose.watching import until

MANY = {"PREFILL_WORKERS": "2", "DECODE_WORKERS": "3"}
SERVING = ("router", "prefill", "decode")


async def all_that_serve(stack: Stack) -> set[str]:
    """Ids of the containers of our three services."""
    return {one for service in SERVING for one in await stack.containers(service)}


async def mistaken(scene: Scene) -> None:
    """A model that is not there, an `up` without --scale, a flag that is not one."""
    stack = scene.stack
    before = await all_that_serve(stack)
    with scene.journal.check(
        "`docker compose run --rm model` with a misspelt MODEL fails, and nothing is stopped"
    ) as line:
        try:
            await stack.compose("run", "--rm", "-T", "model", MODEL="smollm3-135m-instruct", **MANY)
        except NotSo as error:
            line.said = str(error).strip().rpartition("error: ")[2][:100]
        assert line.said, "the fetch of a model that is not there went well"
        assert await all_that_serve(stack) == before
        await right(scene.client, Asked(PROMPTS[0], 32), scene.truth)
    with scene.journal.check(
        "`docker compose up -d` leaves the numbers of PREFILL_WORKERS and DECODE_WORKERS as they are"
    ):
        await stack.compose("up", "-d", "--no-build", "--wait", "--wait-timeout", "300", **MANY)
        assert await all_that_serve(stack) == before
    with scene.journal.check(
        "a flag that is wrong: its worker says so once and is not started again and again"
    ) as line:
        await stack.compose("up", "-d", "--no-build", "prefill", PREFILL_FLAGS="--no-such-flag", **MANY)

        async def refused() -> bool:
            said = await stack.compose("logs", "prefill", **MANY)
            return said.count("not started again with these flags") == 2

        await until(refused, "both workers said it", 60)
        states = [await stack.inspect(one) for one in await stack.containers("prefill")]
        line.said = str([(one["RestartCount"], one["State"]["Status"]) for one in states])
        assert line.said == "[(0, 'running'), (0, 'running')]"
    with scene.journal.check("the flag put right: up again, and the answer is right"):
        await stack.compose("up", "-d", "--no-build", "--wait", "--wait-timeout", "300", **MANY)
        await scene.watch.until_ready(2, 3)
        await right(scene.client, Asked(PROMPTS[4], 32), scene.truth)
