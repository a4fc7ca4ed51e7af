"""`diptych prefill`: one prefill worker process, from flags to `prefill_service`. Does not know what the worker does."""

from __future__ import annotations

from dataclasses import replace
from typing import Unpack

import click

from cli.commands import flags, workerflags
from cli.commands.workerflags import WorkerFlags
from cli.options import SectionedCommand, apply
from contracts.worker import WorkerKind
from kv_transfer.config import Integrity, SenderConfig
from prefill_service.config import PrefillConfig
from prefill_service.run import RunConfig


def prefill_config(given: WorkerFlags) -> PrefillConfig:
    """The worker that these flags describe. Raises ConfigError for flags that contradict each other."""
    return PrefillConfig(
        workerflags.worker_config(given, WorkerKind.PREFILL),
        run=RunConfig(SenderConfig(integrity=Integrity(given["integrity"]))),
    )


@click.command("prefill", cls=SectionedCommand)
@click.pass_context
def prefill(ctx: click.Context, /, **given: Unpack[WorkerFlags]) -> None:
    """Run one prefill worker. It reads prompts and pushes their KV to decode workers.
    It announces itself to routers.

    `diptych up` starts workers for you.
    """
    config = prefill_config(given)
    config = replace(config, worker=workerflags.settled(config.worker, given))
    from prefill_service.main import serve  # the process that computes imports torch

    code = flags.run_service(
        "prefill", given["log_level"], given["exit_with"], lambda: serve(config), log_prompts=given["log_prompts"]
    )
    ctx.exit(code)


apply(workerflags.OPTIONS, prefill)
