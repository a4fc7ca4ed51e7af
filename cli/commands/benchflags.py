"""The flags of `diptych bench`, and what they say as configs. Does not measure."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TypedDict

import click

from bench.serving.measures import parse_limits
from bench.serving.requests import Form
from bench.serving.serve import DATASETS, DataConfig, ServeConfig
from bench.serving.synthetic import Shape
from cli.options import ADDRESS, LABEL, NAME, POSITIVE_SECONDS, SECONDS, FloatType, option
from contracts.errors import ConfigError

BACKENDS = ("diptych", "openai", "openai-chat")
_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_COUNT = click.IntRange(min=1)


class DataFlags(TypedDict):
    """What click hands over of a load."""

    dataset_name: str
    dataset_path: Path | None
    num_prompts: int
    input_len: int
    output_len: int | None
    range_ratio: float
    prefix_len: int
    num_prefixes: int
    turns: int
    think_time: float
    form: str | None
    vocab_size: int
    tokenizer: Path | None
    trace_block_size: int
    seed: int


class ServeFlags(DataFlags):
    """What click hands over of `serve`."""

    backend: str
    address: str
    base_url: str
    model: str | None
    api_key_file: Path | None
    tls_ca: Path | None
    route: str
    no_ignore_eos: bool
    extra_body: str | None
    request_rate: str | None
    burstiness: str
    max_concurrency: str | None
    trace_speed: float
    num_warmups: int
    request_timeout: float
    goodput: tuple[str, ...]
    more_goodput: tuple[str, ...]
    metric_percentiles: str
    save_detailed: bool
    result_dir: Path | None
    label: str | None
    plots: bool


NUM_PROMPTS = option(
    "--num-prompts", section="Data", type=_COUNT, default=100, metavar="N", help="Requests of one load."
)

SHAPE_OPTIONS = (
    option("--input-len", section="Data", type=_COUNT, default=256, metavar="TOKENS", help="Of prompts made up."),
    option(
        "--output-len",
        section="Data",
        type=_COUNT,
        metavar="TOKENS",
        help="Of every answer. [default: what the data say, else 64]",
    ),
    option(
        "--range-ratio",
        section="Data",
        type=FloatType(0, 0.999),
        default=0.0,
        metavar="R",
        help="Lengths are even in [x(1-R), x(1+R)].",
    ),
    option("--seed", section="Data", type=click.IntRange(min=0), default=0, help="Same seed: same load."),
)

SERVE_OPTIONS = (
    option(
        "--backend",
        section="Server",
        type=click.Choice(BACKENDS),
        default="diptych",
        help="Ours over gRPC, or any server's /v1/completions or /v1/chat/completions.",
    ),
    option("--address", section="Server", type=ADDRESS, default="127.0.0.1:50051", help="Of the backend diptych."),
    option(
        "--base-url",
        section="Server",
        type=NAME,
        default="http://127.0.0.1:8000",
        metavar="URL",
        help="Of the others, without /v1.",
    ),
    option(
        "--model",
        section="Server",
        type=NAME,
        metavar="NAME",
        help="What is asked for. [default: the only one that is served]",
    ),
    option("--api-key-file", section="Server", type=_FILE, metavar="FILE", help="Its first line is the API key."),
    option("--tls-ca", section="Server", type=_FILE, metavar="FILE.pem", help="Speak TLS; who vouches for the server."),
    option(
        "--route",
        section="Server",
        type=click.Choice(["any", "disaggregated", "colocated"]),
        default="any",
        help="Force a way through the pools (diptych).",
    ),
    option(
        "--no-ignore-eos",
        section="Server",
        is_flag=True,
        help="Do not send ignore_eos, for servers that refuse it (openai, openai-chat); answers may be shorter.",
    ),
    option(
        "--extra-body",
        section="Server",
        metavar="JSON",
        help="More fields of each request's body, as in '{\"top_p\": 0.9}' (openai, openai-chat).",
    ),
    option(
        "--dataset-name",
        section="Data",
        type=click.Choice(DATASETS),
        default="random",
        help="Made up: random, shared-prefix, multi-turn. From --dataset-path: file (.txt, or .jsonl with prompts or chat logs), "
        "sharegpt (JSON), mooncake (JSONL with hash_ids), azure (CSV).",
    ),
    option("--dataset-path", section="Data", type=_FILE, metavar="FILE", help="What --dataset-name reads."),
    NUM_PROMPTS,
    *SHAPE_OPTIONS,
    option("--prefix-len", section="Data", type=click.IntRange(min=0), default=0, metavar="TOKENS", help="Shared."),
    option("--num-prefixes", section="Data", type=_COUNT, default=1, metavar="N", help="Groups that share one."),
    option("--turns", section="Data", type=_COUNT, default=4, metavar="N", help="Of a conversation of multi-turn."),
    option("--think-time", section="Data", type=SECONDS, default=0.0, metavar="SECONDS", help="Between its turns."),
    option(
        "--form",
        section="Data",
        type=click.Choice([form.value for form in Form]),
        help="Of prompts made up or read. [default: ids, text for files, chat for openai-chat and chat logs]",
    ),
    option("--vocab-size", section="Data", type=_COUNT, default=32_000, metavar="N", help="Ids made up are below."),
    option(
        "--tokenizer",
        section="Data",
        type=click.Path(exists=True, path_type=Path),
        metavar="PATH",
        help="tokenizer.json or a model's directory: counts a file's lengths in tokens, not words.",
    ),
    option("--trace-block-size", section="Data", type=_COUNT, default=512, metavar="TOKENS", help="Of a hash id."),
    option(
        "--request-rate",
        section="Load",
        metavar="R[,R…]",
        help="Requests a second, several for a sweep. [default: a trace's times, else inf: all at once or a closed loop]",
    ),
    option(
        "--burstiness",
        section="Load",
        default="1",
        metavar="B",
        help="1 is Poisson, below it bursts (gamma), above it more even, inf constant.",
    ),
    option(
        "--max-concurrency",
        section="Load",
        metavar="N[,N…]",
        help="Most requests at once, several for a sweep; without a rate a closed loop. [default: no limit]",
    ),
    option(
        "--trace-speed",
        section="Load",
        type=FloatType(0, 1e6, open_low=True),
        default=1.0,
        metavar="X",
        help="A trace's times, divided by it.",
    ),
    option("--num-warmups", section="Load", type=click.IntRange(min=0), default=1, metavar="N", help="Unmeasured."),
    option(
        "--request-timeout",
        section="Load",
        type=POSITIVE_SECONDS,
        default=600.0,
        metavar="SECONDS",
        help="Longest that one request may take; then it has failed.",
    ),
    option(
        "--goodput",
        section="Result",
        multiple=True,
        metavar="ttft:MS tpot:MS e2el:MS",
        help="Also say how many requests a second kept all of these.",
    ),
    option(
        "--metric-percentiles",
        section="Result",
        default="90,99",
        metavar="P[,P…]",
        help="Of each latency, beside mean and median.",
    ),
    option("--save-detailed", section="Result", is_flag=True, help="Each request's times in the JSON, too."),
    option(
        "--result-dir",
        section="Result",
        type=click.Path(file_okay=False, path_type=Path),
        metavar="DIR",
        help="Write a JSON file a load, report.html and PNG plots. [default: JSON to stdout, unless it is a terminal]",
    ),
    option("--label", section="Result", type=LABEL, metavar="NAME", help="Of the result. [default: the backend]"),
    option("--plots/--no-plots", section="Result", default=True, help="PNG plots; need matplotlib, the extra `plots`."),
)


def numbers(flag: str, text: str | None, *, low: float, high: float, whole: bool = False) -> tuple[float, ...]:
    """The numbers of a list with commas, none for None. Raises ConfigError naming flag, value and limits."""
    if text is None:
        return ()
    found = []
    for part in text.split(","):
        try:
            number = float(int(part)) if whole else float(part)
        except ValueError:
            number = math.nan
        if not low <= number <= high:
            kind = "a whole number" if whole else "a number"
            raise ConfigError(f"{flag}: {part!r} must be {kind} from {low:g} to {high:g}")
        if number in found:
            raise ConfigError(f"{flag}: {part!r} is given twice")
        found.append(number)
    return tuple(found)


def burstiness_of(text: str) -> float:
    """Of gaps between requests. Raises ConfigError."""
    found = numbers("--burstiness", text, low=1e-3, high=math.inf)
    if len(found) > 1:
        raise ConfigError(f"--burstiness: {text!r} must be one number")
    return found[0]


def data_config(given: DataFlags, backend: str) -> DataConfig:
    """Which requests. Raises ConfigError."""
    name = given["dataset_name"]
    path = given["dataset_path"]
    shape = Shape(
        num_prompts=given["num_prompts"],
        input_len=given["input_len"],
        output_len=given["output_len"] or 64,
        range_ratio=given["range_ratio"],
        prefix_len=given["prefix_len"],
        num_prefixes=given["num_prefixes"],
        turns=given["turns"],
        think_s=given["think_time"],
    )
    return DataConfig(
        dataset=name,
        shape=shape,
        form=_form(given, backend),
        path=path,
        output_len=given["output_len"],
        seed=given["seed"],
        vocab_size=given["vocab_size"],
        tokenizer=given["tokenizer"],
        block_tokens=given["trace_block_size"],
    )


def _form(given: DataFlags, backend: str) -> Form:
    name, path = given["dataset_name"], given["dataset_path"]
    if given["form"] is not None:
        form = Form(given["form"])
        if (form is Form.CHAT) != (backend == "openai-chat") and backend != "diptych":
            raise ConfigError(f"--form: {form.value} is not what --backend {backend} takes")
    elif backend == "openai-chat" or (backend == "diptych" and path is not None and _is_chat_log(path)):
        form = Form.CHAT
    elif name in ("file", "sharegpt") or (name == "multi-turn" and backend == "openai"):
        form = Form.TEXT  # an answer's tokens are not in an OpenAI stream: what continues it must be text
    else:
        form = Form.IDS
    if form is Form.IDS and name in ("file", "sharegpt"):
        raise ConfigError(f"--form: ids is not a form of {name}'s prompts; must be text or chat")
    if form is Form.IDS and name == "multi-turn" and backend == "openai":
        raise ConfigError("--form: ids is not possible for multi-turn with --backend openai; must be text")
    return form


def _is_chat_log(path: Path) -> bool:
    if path.suffix != ".jsonl":
        return False
    with path.open(encoding="utf-8", errors="replace") as file:
        return '"messages"' in file.readline()


def serve_config(given: ServeFlags) -> ServeConfig:
    """How to send. Raises ConfigError."""
    limits = tuple(int(n) for n in numbers("--max-concurrency", given["max_concurrency"], low=1, high=1e6, whole=True))
    if given["more_goodput"] and not given["goodput"]:
        raise click.UsageError(f"unexpected argument {given['more_goodput'][0]!r}")
    goodput = [part for text in (*given["goodput"], *given["more_goodput"]) for part in text.replace(",", " ").split()]
    return ServeConfig(
        rates=numbers("--request-rate", given["request_rate"], low=1e-6, high=math.inf),
        concurrencies=limits or (None,),
        burstiness=burstiness_of(given["burstiness"]),
        seed=given["seed"],
        num_warmups=given["num_warmups"],
        limits=parse_limits(goodput),
        percentiles=numbers("--metric-percentiles", given["metric_percentiles"], low=0, high=100),
        request_timeout_s=given["request_timeout"],
        trace_speed=given["trace_speed"],
        detailed=given["save_detailed"],
    )
