"""The command: one run on a real engine, a line for each check, a table at the end; exit code 1 when a check does not hold."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from pathlib import Path

import click

from tests.compose import files, mistakes, scene
from tests.compose.journal import Journal, NotSo
from tests.compose.questions import PROMPTS, Asked, right, truth_of
from tests.compose.scene import Scene
from tests.compose.stack import PROJECT, Engine, Stack, find_engine
from tests.compose.watching import Watch
from tests.integration.processes.client import Client

# For two cores, with a queue that a crowd can fill; every request over both pools, so that faults meet hand-offs.
SETTINGS = {
    "PREFILL_KV_MEMORY": "256MiB",
    "DECODE_KV_MEMORY": "256MiB",
    "ROUTER_FLAGS": "--disaggregate always --max-running 12 --max-waiting 4 --slo ttft:250 --slo e2e:60000",
}
ENDED = 128 + signal.SIGTERM


async def played(stack: Stack, journal: Journal, steps: tuple[str, ...]) -> None:
    """From nothing to nothing."""
    await files.valid(stack, journal)
    await files.built(stack, journal)
    begun = time.time()
    with journal.check("docker compose up: everything is well") as line:
        await stack.compose("up", "-d", "--wait", "--wait-timeout", "300")
        line.said = f"workers run {await files.kernels_run(stack)}"
    await files.hard(stack, journal)
    client = Client(stack.ports["HTTP_PORT"])
    try:
        truth: dict[str, list[int]] = {}
        with journal.check(f"`diptych generate` in a container of its own answers {len(PROMPTS)} prompts") as line:
            truth = await truth_of(stack)
            line.said = f"{sum(map(len, truth.values()))} tokens"
        if not truth:
            raise NotSo("nothing is known to compare answers with")
        acting = Scene(stack, journal, client, Watch(stack), truth, begun)
        for step in (*scene.STEPS, mistakes.mistaken, scene.shrunk, scene.rolled):
            if not steps or step.__name__ in steps:
                if step not in scene.ONE_OF_EACH and not await acting.watch.ready(2, 3):
                    await stack.scale(prefill=2, decode=3)
                await step(acting)
        await again(acting)
    finally:
        await client.close()
    await ended(stack, journal)


async def again(acting: Scene) -> None:
    """Down and up again: what volumes keep is not made or fetched a second time."""
    stack = acting.stack
    with acting.journal.check("docker compose down, and up again: the model and the secrets are kept") as line:
        before = await stack.compose("exec", "-T", "router", "cat", "/secrets/cluster")
        await stack.compose("down", limit_s=120)
        kept = await stack.leftovers()
        assert sorted(kept) == [f"{PROJECT}_{name}" for name in ("grafana", "models", "prometheus", "secrets")], kept
        began = time.monotonic()
        await stack.compose("up", "-d", "--no-build", "--wait", "--wait-timeout", "300")
        line.said = f"up in {time.monotonic() - began:.0f} s"
        assert await stack.compose("exec", "-T", "router", "cat", "/secrets/cluster") == before
        assert "downloading" not in await stack.compose("logs", "model")
        await right(acting.client, Asked(PROMPTS[0], 48), acting.truth)


async def ended(stack: Stack, journal: Journal) -> None:
    """Stopped in order, then gone."""
    with journal.check("docker compose stop: every process ends by itself, with exit code 0") as line:
        services = [c for name in ("router", "prefill", "decode") for c in await stack.containers(name)]
        await stack.compose("stop", limit_s=120)
        line.said = str([(await stack.inspect(one))["State"]["ExitCode"] for one in services])
        assert set(line.said) <= set("[0, ]")
    with journal.check("docker compose down -v leaves nothing"):
        await stack.down()
        assert await stack.leftovers() == []


async def whole(engine: Engine, journal: Journal, steps: tuple[str, ...], keep: bool) -> None:
    """One run; whatever happens, nothing of it stays, but with `keep`. SIGTERM ends it as Ctrl-C does."""
    stack, this = Stack(engine, SETTINGS), asyncio.current_task()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, this.cancel)
    try:
        await stack.down()
        await played(stack, journal, steps)
    except (NotSo, AssertionError) as error:
        with journal.check("the run came to its end"):
            raise NotSo(str(error)) from error
    finally:
        if journal.num_bad:
            journal.say(await stack.compose("logs", "--no-color", "--tail", "60", well=False))
        if not keep:
            await stack.down()


@click.command()
@click.option(
    "--sandbox", type=click.Path(path_type=Path), help="Script that brings an engine up: start, images, env, stop."
)
@click.option("--step", "steps", multiple=True, help="Only this step (after the begin); may be given several times.")
@click.option("--keep", is_flag=True, help="Leave engine and containers as they are at the end.")
def main(sandbox: Path | None, steps: tuple[str, ...], keep: bool) -> None:
    """Bring compose.yaml up on a real engine, break things, and take it down."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(ENDED))
    engine = find_engine(sandbox)
    if isinstance(engine, str):
        sys.exit(f"nothing was tested: {engine}")
    journal = Journal()
    try:
        asyncio.run(whole(engine, journal, steps, keep))
    except asyncio.CancelledError:
        sys.exit(ENDED)
    finally:
        if not keep:
            engine.stop()
    print(f"\n{journal.table()}\n\n{len(journal.lines)} checks, {journal.num_bad} bad")
    sys.exit(1 if journal.num_bad else 0)


if __name__ == "__main__":
    main()
