"""Flags that several commands have in common, so that they read the same everywhere. Does not know the commands."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from pathlib import Path

import click

from cli.options import (
    ADVERTISE,
    DTYPE,
    LABEL,
    LOG_LEVEL,
    MODEL_DIR,
    NAME,
    PORT,
    QUANTIZATION,
    SECONDS,
    SIZE,
    Decorated,
    option,
)
from contracts.kv_layout import AS_IT_IS, TRANSFER_DTYPES
from engine.build import DEVICES
from engine.config import SchedulerConfig
from kv_transfer.config import Integrity
from observability import lastwords
from observability.log import configure_logging
from router.config import CanaryConfig
from rpc.process import end_with_parent, run_process

CONNECTOR = click.Choice(["auto", "shm", "tcp", "nixl"])
POSITIVE = click.IntRange(min=1)
_ENGINE = SchedulerConfig()
MODEL_HELP = (
    "What to serve: a model directory (config.json, *.safetensors, tokenizer.json), a .gguf file, the built-in name "
    "smollm2-135m-instruct, or a Hugging Face hub id."
)

model_option = option(
    "--model", section="Model", required=True, type=NAME, metavar="DIR|NAME|FILE.gguf|HUB_ID", help=MODEL_HELP
)
served_name_option = option(
    "--served-name",
    section="Model",
    type=LABEL,
    metavar="NAME",
    help="Name that clients use. [default: the model's own name]",
)
cache_dir_option = option(
    "--cache-dir",
    section="Model",
    type=click.Path(file_okay=False, path_type=Path),
    help="Where fetched and converted models are kept. [default: the user's cache folder]",
)
dtype_option = option(
    "--dtype",
    section="Model",
    type=DTYPE,
    default="auto",
    help="Arithmetic and KV memory; auto takes the checkpoint's own.",
)
quantization_option = option(
    "--quantization",
    section="Model",
    type=QUANTIZATION,
    default="auto",
    help="How matrices are held: auto keeps the blocks of a GGUF file (Q8_0, Q4_0, Q4_K) as they are and anything else "
    "unquantised; int8 and int4 round at load, by groups of 32.",
)
device_option = option(
    "--device",
    section="Model",
    type=click.Choice(DEVICES),
    default="auto",
    help="Where the model computes; auto takes a GPU where torch sees one, and cuda refuses to start without.",
)
max_model_len_option = option(
    "--max-model-len",
    section="Model",
    type=POSITIVE,
    metavar="TOKENS",
    help="Longest prompt plus answer. [default: the model's context]",
)
max_num_batched_tokens_option = option(
    "--max-num-batched-tokens",
    section="Memory and batching",
    type=POSITIVE,
    metavar="TOKENS",
    help="Most tokens computed in one step; longer prompts are read in chunks. "
    f"[default: {_ENGINE.max_num_batched_tokens}, or --max-num-seqs if that is more]",
)
max_num_seqs_option = option(
    "--max-num-seqs",
    section="Memory and batching",
    type=POSITIVE,
    metavar="REQUESTS",
    help=f"Most requests in one step. [default: {_ENGINE.max_num_seqs}]",
)
connector_option = option(
    "--connector",
    section="Cluster",
    type=CONNECTOR,
    default="auto",
    help="How KV travels: shm (shared memory, same host), tcp (any host), nixl (NIXL over UCX: RDMA; the extra `nixl`), "
    "auto (the fastest that both ends have).",
)
integrity_option = option(
    "--integrity",
    section="Cluster",
    type=click.Choice([mode.value for mode in Integrity]),
    default=Integrity.SAMPLED.value,
    help="Which blocks of KV are compared by digest after they travelled: none (off), about one in eight (sampled), "
    "all (full). A prefill worker must be at least as strict as its decode workers.",
)
kv_transfer_dtype_option = option(
    "--kv-transfer-dtype",
    section="Cluster",
    type=click.Choice(TRANSFER_DTYPES),
    default=AS_IT_IS,
    help="How KV is stored on its way: auto (as it is, exact), or a byte a value, int8 or fp8 (e4m3), for slow networks: "
    "answers then differ from those of one pool. All workers of a cluster must be given the same.",
)
http_port_option = option(
    "--http-port",
    section="Addresses",
    type=PORT,
    metavar="PORT",
    default=8000,
    help="OpenAI API; 0 takes a free port.",
)
log_level_option = option("--log-level", section="Running", type=LOG_LEVEL, default="warning", help="Least log level.")
# A service on its own has no display beside it: its log says when and where it is ready.
service_log_level_option = option(
    "--log-level", section="Running", type=LOG_LEVEL, default="info", help="Least log level."
)
drain_timeout_option = option(
    "--drain-timeout",
    section="Running",
    type=SECONDS,
    metavar="SECONDS",
    default=10.0,
    help="How long an orderly end may take after Ctrl-C or SIGTERM. Running answers go on; "
    "a worker sends those that take longer than half of it to another worker, if there is one.",
)


def kv_memory_option(default: str | None, note: str) -> Callable[[Decorated], Decorated]:
    """`--kv-memory` with the default that fits the command."""
    return option("--kv-memory", section="Memory and batching", type=SIZE, default=default, metavar="SIZE", help=note)


canary_interval_option = option(
    "--canary-interval",
    section="Cluster",
    type=SECONDS,
    metavar="SECONDS",
    default=CanaryConfig().interval_s,
    help="How long a pair of prefill and decode worker may go without a hand-off before the router proves it by a tiny "
    "request of its own; a pair that fails is left out until it works again. 0 turns both off.",
)
model_dir_option = option(
    "--model",
    section="Model",
    required=True,
    type=MODEL_DIR,
    metavar="DIR",
    help="Model directory (config.json, *.safetensors, tokenizer.json); `diptych model fetch` makes one.",
)
advertise_option = option(
    "--advertise",
    section="Addresses",
    type=ADVERTISE,
    default="",
    show_default=False,
    metavar="HOST[:PORT]",
    help="Address under which others reach this process. [default: where it listens]",
)
exit_with_option = option(
    "--exit-with",
    section="Running",
    type=POSITIVE,
    metavar="PID",
    help="Stop when this process, which must be the parent, ends.",
)


def host_option(text: str) -> Callable[[Decorated], Decorated]:
    """Where a router listens."""
    return option("--host", section="Addresses", metavar="HOST", default="127.0.0.1", help=text)


def grpc_port_option(text: str) -> Callable[[Decorated], Decorated]:
    """The router's gRPC port."""
    return option("--grpc-port", section="Addresses", type=PORT, metavar="PORT", default=50051, help=text)


def threads_option(text: str) -> Callable[[Decorated], Decorated]:
    """`--threads` with the words that fit the command."""
    kind = click.IntRange(1, 1024)
    return option("--threads", section="Memory and batching", type=kind, metavar="N", help=text)


scheduling_option = option(
    "--scheduling",
    section="Memory and batching",
    type=click.Choice(["fcfs", "priority"]),
    default="fcfs",
    help="Who runs first: first come first served, or the lowest priority number.",
)
prefix_caching_option = option(
    "--prefix-caching/--no-prefix-caching",
    section="Memory and batching",
    default=True,
    help="Keep the KV of old prompts to serve the beginnings of new ones.",
)


log_prompts_option = option(
    "--log-prompts",
    section="Running",
    is_flag=True,
    help="Log what users ask and are answered, and all that errors say. Without it nothing of a request but numbers and ids "
    "is logged.",
)


def run_service(
    service: str,
    log_level: str,
    parent_pid: int | None,
    serve: Callable[[], Coroutine[None, None, None]],
    *,
    log_prompts: bool = False,
) -> int:
    """Run one service in this process until a signal; its exit code."""
    configure_logging(service, log_level, private=not log_prompts)
    lastwords.install()
    if parent_pid is not None:
        end_with_parent(parent_pid)
    return run_process(serve)
