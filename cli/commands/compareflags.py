"""The flags of `diptych bench compare`, and what they say as configs. Does not measure."""

from __future__ import annotations

from pathlib import Path
from typing import TypedDict

import click

from bench.compare.load import Cell, LoadConfig
from bench.compare.run import CompareConfig
from bench.compare.systems import System, apart, check_equal, together
from bench.serving.measures import parse_limits
from bench.serving.requests import MOST_TOKENS
from cli.commands import flags
from cli.commands.benchflags import burstiness_of, numbers
from cli.options import POSITIVE_SECONDS, option
from contracts.errors import ConfigError
from rpc.cores import Cores, parse_groups, usable_in_order

_COUNT = click.IntRange(1, MOST_TOKENS)
_FEW = click.IntRange(1, 1000)
_GOODPUT = ("ttft:2000", "tpot:100")


class CompareFlags(TypedDict):
    """What click hands over of `compare`."""

    model: str
    dtype: str
    max_model_len: int | None
    cache_dir: Path | None
    kv_memory: int
    prefill_cores: str | None
    decode_cores: str | None
    colocated_cores: tuple[str, ...]
    colocated_step_tokens: tuple[int, ...]
    disaggregate: str
    input_len: str
    input_rate: str | None
    request_rate: str | None
    burstiness: str
    output_len: int
    streams: int
    stream_input_len: int
    stream_output_len: int
    window: float
    rounds: int
    seed: int
    goodput: tuple[str, ...]
    more_goodput: tuple[str, ...]
    result_dir: Path | None
    plots: bool


COMPARE_OPTIONS = (
    flags.model_option,
    flags.dtype_option,
    flags.max_model_len_option,
    flags.cache_dir_option,
    option(
        "--prefill-cores",
        section="Systems",
        metavar="CORES/CORES…",
        help="CPU cores of each prefill worker, as in 0/1 or 0,1/2-3. [default: the first that may be used]",
    ),
    option(
        "--decode-cores",
        section="Systems",
        metavar="CORES/CORES…",
        help="Of each decode worker. [default: the second]",
    ),
    option(
        "--colocated-cores",
        section="Systems",
        multiple=True,
        metavar="CORES/CORES…",
        help="Of each worker that does both: the same cores. May be given several times. [default: workers as above]",
    ),
    option(
        "--colocated-step-tokens",
        section="Systems",
        multiple=True,
        type=_COUNT,
        metavar="TOKENS",
        help="Compare with workers, too, that compute at most so many tokens a step, so that prompts are read in small pieces "
        "between the streams' tokens. May be given several times.",
    ),
    option(
        "--disaggregate",
        section="Systems",
        type=click.Choice(["always", "auto"]),
        default="always",
        help="Whether every prompt goes over both pools, or the router chooses, as it does in `diptych up`.",
    ),
    flags.kv_memory_option("512MiB", "KV memory of each worker."),
    option("--streams", section="Load", type=_FEW, default=4, metavar="N", help="Answers that decode steadily."),
    option("--stream-input-len", section="Load", type=_COUNT, default=64, metavar="TOKENS", help="Of their prompts."),
    option(
        "--stream-output-len",
        section="Load",
        type=_COUNT,
        default=2048,
        metavar="TOKENS",
        help="Of one of them; then it begins anew.",
    ),
    option(
        "--input-len",
        section="Load",
        default="64,512,2048",
        metavar="TOKENS[,TOKENS…]",
        help="Of the prompts that arrive.",
    ),
    option("--output-len", section="Load", type=_COUNT, default=16, metavar="TOKENS", help="Of their answers."),
    option(
        "--input-rate",
        section="Load",
        metavar="R[,R…]",
        help="Prompt tokens a second: so many prompts that they have them. [default: 256,512,1024]",
    ),
    option("--request-rate", section="Load", metavar="R[,R…]", help="Prompts a second, instead."),
    option(
        "--burstiness",
        section="Load",
        default="inf",
        metavar="B",
        help="inf are constant gaps, 1 is Poisson, below it bursts (gamma).",
    ),
    option(
        "--window", section="Load", type=POSITIVE_SECONDS, default=8.0, metavar="SECONDS", help="Of one measurement."
    ),
    option("--rounds", section="Load", type=_FEW, default=3, metavar="N", help="Of every system, in turns; medians."),
    option("--seed", section="Load", type=click.IntRange(min=0), default=0, help="Same seed: same load."),
    option(
        "--goodput",
        section="Result",
        multiple=True,
        metavar="ttft:MS tpot:MS e2el:MS",
        help=f"What a good answer keeps. [default: {' '.join(_GOODPUT)}]",
    ),
    option(
        "--result-dir",
        section="Result",
        type=click.Path(file_okay=False, path_type=Path),
        metavar="DIR",
        help="Write compare.json, compare.md, compare.html and PNG plots. [default: JSON to stdout]",
    ),
    option("--plots/--no-plots", section="Result", default=True, help="PNG plots; need matplotlib, the extra `plots`."),
)


def compare_config(given: CompareFlags, vocab_size: int) -> CompareConfig:
    """What is compared. Raises ConfigError."""
    if given["more_goodput"] and not given["goodput"]:
        raise click.UsageError(f"unexpected argument {given['more_goodput'][0]!r}")
    goodput = (*given["goodput"], *given["more_goodput"]) or _GOODPUT
    limits = parse_limits([part for text in goodput for part in text.replace(",", " ").split()])
    load = LoadConfig(
        streams=given["streams"],
        stream_input_len=given["stream_input_len"],
        stream_output_len=given["stream_output_len"],
        output_len=given["output_len"],
        window_s=given["window"],
        burstiness=burstiness_of(given["burstiness"]),
        seed=given["seed"],
        vocab_size=vocab_size,
    )
    return CompareConfig(systems(given), cells(given), load, given["rounds"], limits)


def systems(given: CompareFlags) -> tuple[System, ...]:
    """The one of two pools first. Raises ConfigError where they have not the same cores."""
    prefill, decode = _pools(given["prefill_cores"], given["decode_cores"])
    colocated = [parse_groups("--colocated-cores", text) for text in given["colocated_cores"]] or [(*prefill, *decode)]
    found = [apart(prefill, decode), *(together(groups) for groups in colocated)]
    found += [together(colocated[0], step) for step in given["colocated_step_tokens"]]
    names = [system.name for system in found]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"--colocated-cores: {twice!r} is there twice")
    check_equal(found)
    return tuple(found)


def _pools(prefill: str | None, decode: str | None) -> tuple[tuple[Cores, ...], tuple[Cores, ...]]:
    if prefill is not None and decode is not None:
        return parse_groups("--prefill-cores", prefill), parse_groups("--decode-cores", decode)
    if prefill is not None or decode is not None:
        raise ConfigError(
            f"--{'decode' if decode is None else 'prefill'}-cores: must be given where the other pool's are"
        )
    usable = usable_in_order()
    if len(usable) < 2:
        raise ConfigError(f"--prefill-cores: {len(usable)} core may be used here; two pools need at least 2")
    return ((usable[0],),), ((usable[1],),)


def cells(given: CompareFlags) -> tuple[Cell, ...]:
    """Every length at every rate. Raises ConfigError."""
    lengths = [int(n) for n in numbers("--input-len", given["input_len"], low=1, high=1e6, whole=True)]
    if given["input_rate"] is not None and given["request_rate"] is not None:
        raise ConfigError("--request-rate: must not be given with --input-rate")
    if given["request_rate"] is not None:
        rates = numbers("--request-rate", given["request_rate"], low=1e-3, high=1e4)
        return tuple(Cell(length, rate) for length in lengths for rate in rates)
    by_tokens = numbers("--input-rate", given["input_rate"] or "256,512,1024", low=1e-3, high=1e7)
    return tuple(Cell(length, rate / length) for length in lengths for rate in by_tokens)
