"""`diptych decode`: one decode worker process, from flags to `decode_service`. Does not know what the worker does."""

from __future__ import annotations

from dataclasses import replace
from typing import Unpack

import click

from cli.commands import flags, workerflags
from cli.commands.workerflags import WorkerFlags
from cli.options import SectionedCommand, apply
from contracts.worker import WorkerKind
from decode_service.config import DecodeConfig
from decode_service.worker import AnswerConfig
from kv_transfer.config import Integrity, ReceiverConfig


def decode_config(given: WorkerFlags) -> DecodeConfig:
    """The worker that these flags describe. Raises ConfigError for flags that contradict each other."""
    return DecodeConfig(
        workerflags.worker_config(given, WorkerKind.DECODE),
        answers=AnswerConfig(ReceiverConfig(integrity=Integrity(given["integrity"]))),
    )


@click.command("decode", cls=SectionedCommand)
@click.pass_context
def decode(ctx: click.Context, /, **given: Unpack[WorkerFlags]) -> None:
    """Run one decode worker. It takes KV from prefill workers and writes answers; it
    can also do both alone. It announces itself to routers.

    `diptych up` starts workers for you.
    """
    config = decode_config(given)
    config = replace(config, worker=workerflags.settled(config.worker, given))
    from decode_service.main import serve  # the process that computes imports torch

    code = flags.run_service(
        "decode", given["log_level"], given["exit_with"], lambda: serve(config), log_prompts=given["log_prompts"]
    )
    ctx.exit(code)


apply(workerflags.OPTIONS, decode)
