"""PNG plots of a sweep, by matplotlib, which is an extra (`pip install diptych[plots]`): without it there are none, and it is said.

Does not know how anything was measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from bench.serving.measures import METRICS, JsonObject
from bench.serving.serve import Point

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_INCHES = (9.0, 6.5)


def draw(points: Sequence[tuple[Point, JsonObject]], folder: Path, say: Callable[[str], None]) -> list[Path]:
    """latency.png and throughput.png in `folder`; none without matplotlib."""
    if find_spec("matplotlib") is None:
        say("no plots: they need matplotlib, as `pip install diptych[plots]` brings it")
        return []
    from matplotlib.figure import Figure

    labels = [point.label for point, _ in points]
    latency = Figure(figsize=_INCHES, layout="constrained")
    for place, metric in enumerate(METRICS, 1):
        _latency(latency.add_subplot(2, 2, place), metric, labels, points)
    through = Figure(figsize=(_INCHES[0], _INCHES[1] / 2), layout="constrained")
    _bars(through.add_subplot(1, 2, 1), "requests/s", labels, points, ("request_throughput", "request_goodput"))
    _bars(through.add_subplot(1, 2, 2), "tokens/s", labels, points, ("output_throughput", "total_token_throughput"))
    paths = []
    for name, figure in (("latency.png", latency), ("throughput.png", through)):
        figure.savefig(folder / name)
        paths.append(folder / name)
    return paths


def _latency(axes: Axes, metric: str, labels: Sequence[str], points: Sequence[tuple[Point, JsonObject]]) -> None:
    ends = f"_{metric}_ms"
    names = [name for name in points[0][1] if name.endswith(ends) and not name.startswith("std")]
    for name in names:
        axes.plot(labels, _values(points, name), marker="o", label=name.removesuffix(ends))
    _label(axes, f"{metric.upper()}, ms")


def _bars(
    axes: Axes, unit: str, labels: Sequence[str], points: Sequence[tuple[Point, JsonObject]], names: Sequence[str]
) -> None:
    for name in names:
        if points[0][1][name] is not None:
            axes.plot(labels, _values(points, name), marker="o", label=name)
    _label(axes, unit)


def _label(axes: Axes, title: str) -> None:
    axes.set_title(title)
    axes.set_ylim(bottom=0)
    axes.tick_params(axis="x", rotation=30)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")


def _values(points: Sequence[tuple[Point, JsonObject]], name: str) -> list[float]:
    values = [fields[name] for _, fields in points]
    return [float(value) if isinstance(value, int | float) else 0.0 for value in values]
