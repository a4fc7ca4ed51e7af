"""The flags that say which requests go over both pools, alike in `router` and `up`. Does not know what they do."""

from __future__ import annotations

from typing import TypedDict

import click

from cli.options import FloatType, option
from router.config import DisaggregationConfig, DisaggregationMode

_DEFAULTS = DisaggregationConfig()
_WEIGHT = FloatType(0.0, 1e6)


class WayFlags(TypedDict):
    """What click hands over, checked by the options below."""

    disaggregate: str
    disaggregate_above: int | None
    stall_weight: float


WAY_OPTIONS = (
    option(
        "--disaggregate",
        section="Two pools or one",
        type=click.Choice([mode.value for mode in DisaggregationMode]),
        default=_DEFAULTS.mode.value,
        help="Which requests go over both pools: those that delay users less that way (auto), all, none. "
        "A request's own route comes first.",
    ),
    option(
        "--disaggregate-above",
        section="Two pools or one",
        type=click.IntRange(min=0),
        metavar="TOKENS",
        help="With auto: prompts with more tokens that decode has not cached go over both pools, others do not. "
        "[default: what measurements predict]",
    ),
    option(
        "--stall-weight",
        section="Two pools or one",
        type=_WEIGHT,
        metavar="WEIGHT",
        default=_DEFAULTS.stall_weight,
        help="With auto: what a second that running answers wait counts against one that a new one waits. "
        "0: nothing, where tokens come faster than anybody reads.",
    ),
)


def disaggregation_config(given: WayFlags) -> DisaggregationConfig:
    """What these flags say. Raises ConfigError where they contradict each other."""
    return DisaggregationConfig(
        mode=DisaggregationMode(given["disaggregate"]),
        above_tokens=given["disaggregate_above"],
        stall_weight=given["stall_weight"],
    )
