"""`diptych demo`: the model, two pools, questions at once, and proof that one pool gives the same tokens."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TypedDict, Unpack

import click
from rich.console import Console

from cli.commands import flags
from cli.config import ClusterConfig, WorkerOptions, default_threads
from cli.demo.questions import QUESTIONS
from cli.demo.run import run_demo
from cli.modelsource import fetch
from cli.options import DTYPE, NAME, SectionedCommand, apply, option
from engine.models.store import model_name
from router.config import DisaggregationConfig, DisaggregationMode

NUM_WORKERS = 2
CHUNK_TOKENS = 256  # the long prompts take several steps, so that their KV travels while they compute
LINE_CHARS = 110  # of the table, where there is no terminal to ask


class DemoFlags(TypedDict):
    """What click hands over, checked by the options below."""

    model: str
    cache_dir: Path | None
    dtype: str
    connector: str
    kv_memory: int
    threads: int | None
    log_level: str


OPTIONS = (
    option(
        "--model",
        section="Model",
        type=NAME,
        default="smollm2-135m-instruct",
        metavar="DIR|NAME|FILE.gguf|HUB_ID",
        help="A chat model.",
    ),
    flags.cache_dir_option,
    option(
        "--dtype",
        section="Model",
        type=DTYPE,
        default="float32",
        help="float32 makes the comparison of token ids exact on any CPU.",
    ),
    flags.connector_option,
    flags.threads_option("Compute threads of each worker. [default: half of the cores, at least 1]"),
    flags.kv_memory_option("512MiB", "KV memory of each worker."),
    flags.log_level_option,
)


@click.command("demo", cls=SectionedCommand)
@click.pass_context
def demo(ctx: click.Context, /, **given: Unpack[DemoFlags]) -> None:
    """See it work: fetch a model, start a router, a prefill and a decode worker, and ask several questions at once.

    Half of them go over the OpenAI API, half over gRPC. The answers are streamed to the terminal, then measured: TTFT, ITL,
    and what each hand-off moved and how fast. The same questions are then asked of a single worker that does everything; its
    token ids must be the same. Everything is stopped at the end. Exit code 0 if all of that held.
    """
    model_dir = fetch(given["model"], given["cache_dir"])
    workers = WorkerOptions(
        connector=given["connector"],
        dtype=given["dtype"],
        kv_memory_bytes=given["kv_memory"],
        max_num_batched_tokens=CHUNK_TOKENS,
        threads=given["threads"] or default_threads(NUM_WORKERS),
    )
    config = ClusterConfig(
        model_dir=model_dir,
        model_name=model_name(model_dir),
        http_port=0,
        grpc_port=0,
        disaggregation=DisaggregationConfig(DisaggregationMode.ALWAYS),  # it is what there is to see
        workers=workers,
        log_level=given["log_level"],
    )
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=LINE_CHARS)
    good = asyncio.run(run_demo(config, QUESTIONS, console))
    ctx.exit(0 if good else 1)


apply(OPTIONS, demo)
