"""`diptych bench latency` and `throughput`: what the engine alone does, without doors.

A terminal gets a few lines, a pipe or a file the JSON. Does not know servers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypedDict, Unpack

import click
import msgspec

from bench.cluster import vocab_size_of
from bench.serving.measures import JsonObject
from bench.serving.offline import batch_latency, throughput
from bench.serving.requests import Form
from bench.serving.synthetic import Shape, random_prompts
from bench.serving.writer import Writer
from cli.commands import flags
from cli.commands.benchflags import NUM_PROMPTS, SHAPE_OPTIONS
from cli.modelsource import fetch
from cli.options import SectionedCommand, apply, option
from cli.progress import working
from engine.build import ModelRuntimeConfig
from engine.engine import Engine
from offline.run import build_engine

_MANY = click.IntRange(1, 10_000)


class OfflineFlags(TypedDict):
    """What click hands over of `latency` and `throughput`."""

    model: str
    cache_dir: Path | None
    dtype: str
    quantization: str
    max_model_len: int | None
    kv_memory: int | None
    threads: int | None
    input_len: int
    output_len: int | None
    range_ratio: float
    seed: int


class ThroughputFlags(OfflineFlags):
    """What click hands over of `throughput`."""

    num_prompts: int


class LatencyFlags(OfflineFlags):
    """What click hands over of `latency`."""

    batch_size: int
    num_iters: int
    num_iters_warmup: int


OFFLINE_OPTIONS = (
    flags.model_option,
    flags.dtype_option,
    flags.quantization_option,
    flags.max_model_len_option,
    flags.cache_dir_option,
    *SHAPE_OPTIONS,
    flags.kv_memory_option(None, "KV memory. [default: measured, half of what is free]"),
    flags.threads_option("Compute threads. [default: all cores]"),
)


@click.command("latency", cls=SectionedCommand, short_help="How long the engine alone takes for a batch.")
@option("--batch-size", section="Batch", type=_MANY, default=8, help="Prompts at once.")
@option("--num-iters", section="Batch", type=_MANY, default=10, help="Batches that are measured.")
@option("--num-iters-warmup", section="Batch", type=click.IntRange(0, 10_000), default=2, help="Batches before them.")
def latency(**given: Unpack[LatencyFlags]) -> None:
    """Measure how long the engine alone takes for a batch of one shape. JSON where stdout is no terminal."""
    engine, vocab_size = _engine(given, given["batch_size"])
    shape = _shape(given, given["batch_size"])
    count = given["num_iters"] + given["num_iters_warmup"]
    batches = [random_prompts(shape, Writer(Form.IDS, given["seed"] + number, vocab_size)) for number in range(count)]
    with working("Measuring") as say:
        done = iter(range(1, count + 1))
        result = batch_latency(engine, batches, given["num_iters_warmup"], lambda: say(f"{next(done)} of {count}"))
    _show(result, _latency_lines)


@click.command("throughput", cls=SectionedCommand, short_help="Tokens a second of the engine alone.")
def throughput_command(**given: Unpack[ThroughputFlags]) -> None:
    """Measure how many tokens a second the engine alone computes when all prompts are there at once. JSON where stdout is no
    terminal."""
    engine, vocab_size = _engine(given, given["num_prompts"])
    warm = random_prompts(_shape(given, 1), Writer(Form.IDS, given["seed"] + 1, vocab_size))
    requests = random_prompts(_shape(given, given["num_prompts"]), Writer(Form.IDS, given["seed"], vocab_size))
    with working("Measuring") as say:
        throughput(engine, warm)
        done = iter(range(1, len(requests) + 1))
        result = throughput(engine, requests, lambda: say(f"{next(done)} of {len(requests)}"))
    _show(result, _throughput_lines)


apply(OFFLINE_OPTIONS, latency)
apply((NUM_PROMPTS, *OFFLINE_OPTIONS), throughput_command)


def _shape(given: OfflineFlags, count: int) -> Shape:
    return Shape(count, given["input_len"], given["output_len"] or 64, given["range_ratio"])


def _engine(given: OfflineFlags, count: int) -> tuple[Engine, int]:
    model_dir = fetch(given["model"], given["cache_dir"])
    runtime = ModelRuntimeConfig(
        model_dir,
        dtype=given["dtype"],
        quantization=given["quantization"],
        max_model_len=given["max_model_len"],
        threads=given["threads"],
    )
    with working("Loading the model"):
        engine = build_engine(runtime, given["kv_memory"], max_waiting=count)
    return engine, vocab_size_of(model_dir)


def _show(result: JsonObject, lines: Callable[[JsonObject], Sequence[tuple[str, str]]]) -> None:
    if not sys.stdout.isatty():
        click.echo(msgspec.json.encode(result).decode())
        return
    for name, value in lines(result):
        click.echo(f"{name:<28}{value:>20}")
    click.echo("every field: stdout into a file", err=True)


def _latency_lines(result: JsonObject) -> list[tuple[str, str]]:
    percentiles = result["percentiles"]
    assert isinstance(percentiles, dict)  # as batch_latency makes it
    shown = {"mean": result["avg_latency"], **{f"p{q}": seconds for q, seconds in percentiles.items()}}
    return [(f"a batch, {name}", f"{seconds:,.3f} s") for name, seconds in shown.items()]


def _throughput_lines(result: JsonObject) -> list[tuple[str, str]]:
    units = {
        "elapsed_time": "s",
        "requests_per_second": "requests/s",
        "tokens_per_second": "tokens/s",
        "output_tokens_per_second": "tokens/s",
    }
    return [(name.replace("_", " "), f"{result[name]:,.2f} {unit}") for name, unit in units.items()]
