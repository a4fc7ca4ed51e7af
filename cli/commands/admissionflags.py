"""The flags of admission and of rate limits, the same for a router and for a local cluster. Does not know the commands."""

from __future__ import annotations

from typing import TypedDict

import click

from cli.commands import flags
from cli.options import POSITIVE_SECONDS, SECONDS, SIZE, option
from router.config import AdmissionConfig, LimitsConfig

_DEFAULTS = AdmissionConfig()


class AdmissionFlags(TypedDict):
    """What click hands over, checked by the options below."""

    max_running: int | None
    max_waiting: int
    max_waiting_tokens: int | None
    max_wait: float
    requests_per_minute: int | None
    tokens_per_minute: int | None
    max_body: int
    request_timeout: float


ADMISSION_OPTIONS = (
    option(
        "--max-running",
        section="Admission",
        type=flags.POSITIVE,
        metavar="ANSWERS",
        help="Answers that are made at once; a request of n counts n. Of more than workers run at once some wait in theirs, "
        "in order of arrival. [default: what the ready decode workers run at once, and a quarter more]",
    ),
    option(
        "--max-waiting",
        section="Admission",
        type=click.IntRange(min=0),
        metavar="REQUESTS",
        default=_DEFAULTS.max_waiting,
        help="Requests that may wait beyond that, in fair shares per API key; more get 429.",
    ),
    option(
        "--max-waiting-tokens",
        section="Admission",
        type=flags.POSITIVE,
        metavar="TOKENS",
        help="About how many tokens, of prompts and answers, may wait; more get 429. [default: no bound]",
    ),
    option(
        "--max-wait",
        section="Admission",
        type=SECONDS,
        metavar="SECONDS",
        default=_DEFAULTS.max_wait_s,
        help="Longest that a request waits to be let in; who would wait longer gets 429 at once.",
    ),
    option(
        "--requests-per-minute",
        section="Admission",
        type=flags.POSITIVE,
        metavar="REQUESTS",
        help="What one API key may ask, where the key does not say otherwise. [default: no limit]",
    ),
    option(
        "--tokens-per-minute",
        section="Admission",
        type=flags.POSITIVE,
        metavar="TOKENS",
        help="What one API key may use, prompts and answers together, where the key does not say otherwise. "
        "[default: no limit]",
    ),
    option(
        "--max-body",
        section="Admission",
        type=SIZE,
        metavar="SIZE",
        default="8MiB",
        help="Largest request, as an HTTP body or a gRPC message.",
    ),
    option(
        "--request-timeout",
        section="Admission",
        type=POSITIVE_SECONDS,
        metavar="SECONDS",
        default=600.0,
        help="Longest that one request may take; a client's X-Request-Timeout or gRPC deadline may say less.",
    ),
)


def admission_config(given: AdmissionFlags) -> AdmissionConfig:
    """The queue that these flags describe."""
    return AdmissionConfig(
        max_running=given["max_running"],
        max_waiting=given["max_waiting"],
        max_waiting_tokens=given["max_waiting_tokens"],
        max_wait_s=given["max_wait"],
    )


def limits_config(given: AdmissionFlags) -> LimitsConfig:
    """The limits of a key that has none of its own."""
    return LimitsConfig(requests_per_minute=given["requests_per_minute"], tokens_per_minute=given["tokens_per_minute"])
