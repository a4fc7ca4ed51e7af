"""PNG plots of a sweep, by matplotlib, which is an extra (`plots`): without it there are none, and it is said.

Does not know how anything was measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from bench.serving.measures import METRICS, JsonObject
from bench.serving.serve import Point

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_INCHES = (9.0, 6.5)
_RATES = {
    "requests/s": {"answered": "request_throughput", "goodput": "request_goodput"},
    "tokens/s": {"output": "output_throughput", "input and output": "total_token_throughput"},
}


@dataclass(frozen=True, slots=True)
class Across:
    """Where points stand: numbers of a unit, or names where `unit` is empty."""

    unit: str
    places: Sequence[float] | Sequence[str]


def draw(points: Sequence[tuple[Point, JsonObject]], folder: Path, say: Callable[[str], None]) -> list[Path]:
    """latency.png and throughput.png in `folder`; none without matplotlib."""
    if find_spec("matplotlib") is None:
        say("no plots: they need matplotlib, the extra `plots` (pip install matplotlib)")
        return []
    from matplotlib.figure import Figure

    points = sorted(points, key=lambda known: (known[0].rate or 0.0, known[0].max_concurrency or 0))
    across = across_of([point for point, _ in points])
    latency = Figure(figsize=_INCHES, layout="constrained")
    for place, metric in enumerate(METRICS, 1):
        ends = f"_{metric}_ms"
        lines = {name.removesuffix(ends): name for name in points[0][1] if name.endswith(ends) and name[:3] != "std"}
        axes = latency.add_subplot(2, 2, place)
        _plot(axes, f"{metric.upper()}, ms", across, points, lines)
    latency.legend(
        *axes.get_legend_handles_labels(), loc="outside upper center", ncols=len(lines)
    )  # the same in all four
    through = Figure(figsize=(_INCHES[0], _INCHES[1] / 2), layout="constrained")
    for place, (unit, names) in enumerate(_RATES.items(), 1):
        lines = {label: name for label, name in names.items() if points[0][1][name] is not None}
        axes = through.add_subplot(1, 2, place)
        _plot(axes, unit, across, points, lines)
        axes.legend(fontsize="small")
    paths = []
    for name, figure in (("latency.png", latency), ("throughput.png", through)):
        figure.savefig(folder / name)
        paths.append(folder / name)
    return paths


def across_of(points: Sequence[Point]) -> Across:
    """By the number that alone differs between the points, where there is one; else by their names."""
    rates = [point.rate for point in points]
    limits = [point.max_concurrency for point in points]
    known_rates = [rate for rate in rates if rate is not None and math.isfinite(rate)]
    known_limits = [float(limit) for limit in limits if limit is not None]
    if len(points) > 1 and len(set(limits)) == 1 and len(known_rates) == len(points):
        return Across("requests/s sent", known_rates)
    if len(points) > 1 and len(set(rates)) == 1 and len(known_limits) == len(points):
        return Across("requests at once", known_limits)
    return Across("", [point.label for point in points])


def _plot(
    axes: Axes, title: str, across: Across, points: Sequence[tuple[Point, JsonObject]], lines: Mapping[str, str]
) -> None:
    """A line a field through numbers in order; through names, which have none, only marks."""
    for label, name in lines.items():
        axes.plot(
            across.places, _values(points, name), marker="o", linestyle="-" if across.unit else "none", label=label
        )
    axes.set_title(title)
    axes.set_ylim(bottom=0)
    axes.set_xlabel(across.unit)
    if not across.unit:
        axes.set_xticks(range(len(across.places)), [str(place) for place in across.places], rotation=30, ha="right")
    axes.grid(alpha=0.3)


def _values(points: Sequence[tuple[Point, JsonObject]], name: str) -> list[float]:
    values = [fields[name] for _, fields in points]
    return [float(value) if isinstance(value, int | float) else math.nan for value in values]
