"""PNG plots of a comparison, by matplotlib, which is an extra (`plots`): without it there are none.

Does not know how anything was measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from bench.compare.numbers import ITL_MAX, ITL_P99, QUANTITIES, Comparison, Quantity
from bench.progress import Say

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_INCHES = (3.6, 3.2)  # of one plot
_MARKERS = "osD^v"
_REST = ("ttft_p50", "output_throughput", "stream_goodput")


def draw(comparison: Comparison, folder: Path, say: Say) -> list[Path]:
    """compare-itl.png, the claim, and compare-rest.png in `folder`; none without matplotlib."""
    if find_spec("matplotlib") is None:
        say("no plots: they need matplotlib, the extra `plots` (pip install matplotlib)")
        return []
    by_key = {quantity.key: quantity for quantity in QUANTITIES}
    drawn = (("compare-itl.png", (ITL_P99, ITL_MAX)), ("compare-rest.png", tuple(by_key[key] for key in _REST)))
    folder.mkdir(parents=True, exist_ok=True)
    return [_figure(comparison, quantities, folder / name) for name, quantities in drawn]


def _figure(comparison: Comparison, quantities: Sequence[Quantity], path: Path) -> Path:
    from matplotlib.figure import Figure

    lengths = sorted({cell.input_len for cell in comparison.cells})
    size = (_INCHES[0] * len(lengths), _INCHES[1] * len(quantities))
    figure = Figure(figsize=size, layout="constrained")
    for row, quantity in enumerate(quantities):
        for column, length in enumerate(lengths):
            axes = figure.add_subplot(len(quantities), len(lengths), row * len(lengths) + column + 1)
            _lines(axes, comparison, quantity, length)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncols=len(comparison.systems))
    figure.savefig(path, dpi=110)
    return path


def _lines(axes: Axes, comparison: Comparison, quantity: Quantity, length: int) -> None:
    """A line a system through its medians, a bar from its lowest run to its highest."""
    from matplotlib.ticker import LogFormatter

    cells = [cell for cell in comparison.cells if cell.input_len == length]
    for system, marker in zip(comparison.systems, _MARKERS * len(comparison.systems), strict=False):
        known = [(cell.rate, runs) for cell in cells if (runs := comparison.runs(cell, system, quantity))]
        middles = [
            comparison.median(cell, system, quantity) for cell in cells if comparison.runs(cell, system, quantity)
        ]
        below = [middle - min(runs) for middle, (_, runs) in zip(middles, known, strict=True)]
        above = [max(runs) - middle for middle, (_, runs) in zip(middles, known, strict=True)]
        rates = [rate for rate, _ in known]
        axes.errorbar(rates, middles, yerr=(below, above), marker=marker, capsize=3, label=system)
    axes.set_title(f"{quantity.title}, {length}-token prompts", fontsize="small")
    axes.set_xlabel("prompts/s", fontsize="small")
    axes.set_ylabel(quantity.unit, fontsize="small")
    if quantity.lower_is_better:
        axes.set_yscale("log")
        for ticks in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
            ticks(LogFormatter(minor_thresholds=(1.5, 0.5)))
    else:
        axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3, which="both")
