"""`diptych prefill`: one prefill worker process, from flags to `prefill_service`. Does not know what the worker does."""

from __future__ import annotations

from typing import Unpack

import click

from cli.commands import flags, workerflags
from cli.commands.workerflags import WorkerFlags
from cli.options import SectionedCommand, apply
from kv_transfer.config import Integrity, SenderConfig
from prefill_service.config import PrefillConfig
from prefill_service.run import RunConfig


def prefill_config(given: WorkerFlags) -> PrefillConfig:
    """The worker that these flags describe. Raises ConfigError for flags that contradict each other."""
    scheduler = workerflags.scheduler_config(given)
    return PrefillConfig(
        worker_id=workerflags.worker_id(given, "prefill"),
        model_name=workerflags.served_name(given),
        model=workerflags.runtime_config(given, scheduler),
        scheduler=scheduler,
        kv_memory_bytes=given["kv_memory"],
        connectors=workerflags.connectors(given),
        network=workerflags.network_config(given),
        server=workerflags.server_config(given),
        routers=given["router"],
        run=RunConfig(SenderConfig(integrity=Integrity(given["integrity"]))),
        lifecycle=workerflags.lifecycle_config(given),
        metrics_host=given["host"],
        metrics_port=given["metrics_port"],
    )


@click.command("prefill", cls=SectionedCommand)
@click.pass_context
def prefill(ctx: click.Context, /, **given: Unpack[WorkerFlags]) -> None:
    """Run one prefill worker. It reads prompts and pushes their KV to decode workers.
    It announces itself to routers.

    `diptych up` starts workers for you.
    """
    config = prefill_config(given)
    from prefill_service.main import serve  # the process that computes imports torch

    ctx.exit(flags.run_service("prefill", given["log_level"], given["exit_with"], lambda: serve(config)))


apply(workerflags.OPTIONS, prefill)
