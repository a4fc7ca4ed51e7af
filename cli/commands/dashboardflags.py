"""The flag that says what requests are measured by, alike in `router` and `up`. Does not know who shows it."""

from __future__ import annotations

from dataclasses import fields
from typing import TypedDict

import click

from cli.options import option
from contracts.errors import ConfigError
from dashboard.slo import SloConfig

_NAMES = tuple(field.name.removesuffix("_s") for field in fields(SloConfig))
_OFF = "off"


class DashboardFlags(TypedDict):
    """What click hands over."""

    slo: tuple[tuple[str, float | None], ...]


class SloType(click.ParamType[tuple[str, float | None]]):
    """NAME:MILLISECONDS, or NAME:off."""

    name = "slo"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, float | None]:
        """The name and its limit in seconds."""
        name, _, limit = str(value).partition(":")
        wanted = (
            f"{value!r} is not NAME:MILLISECONDS with a name of {', '.join(_NAMES)}, such as ttft:500, or NAME:{_OFF}"
        )
        if name not in _NAMES:
            self.fail(wanted, param, ctx)
        if limit == _OFF:
            return name, None
        try:
            return name, float(limit) / 1e3
        except ValueError:
            self.fail(wanted, param, ctx)


slo_option = option(
    "--slo",
    section="Running",
    type=SloType(),
    multiple=True,
    metavar="NAME:MS",
    show_default=False,
    help="What the dashboard and the metrics of goodput measure requests by: ttft:MS, itl:MS (mean time between a "
    "request's tokens), e2e:MS, or "
    f"NAME:{_OFF}; may be given several times. [default: ttft:1000 itl:100]",
)


def slo_config(given: DashboardFlags) -> SloConfig:
    """The limits. Raises ConfigError for a name that is given twice, and for a limit that says nothing."""
    limits = dict(given["slo"])
    if len(limits) < len(given["slo"]):
        raise ConfigError(f"--slo: got {', '.join(name for name, _ in given['slo'])}; each name once")
    return SloConfig(**{f"{name}_s": limit for name, limit in limits.items()})
