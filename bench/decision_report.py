"""What the decision bench says: per cell how far the router's choice is from the better way, and how surely.

    probes of a cell ──by round──▶ (remote, local, auto) ──▶ median of auto / median of the better way, and its interval

The interval is a bootstrap over rounds, whose three probes stand and fall together: they met the machine in the same state.
Does not know how anything is measured.
"""

from __future__ import annotations

import asyncio
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bench.cluster import ServedCluster
from bench.decision import Cell, DecisionBenchConfig, Probe, measure
from bench.load import Route
from bench.progress import Say
from bench.report import Measure, Report, Table, Verdict

WORSE_BAR = 1.15
_SHARE = 0.9  # of resamples that are in the interval
_RESAMPLES = 2000
_NAMES = {Route.DISAGGREGATED: "always remote", Route.COLOCATED: "always local", Route.ANY: "auto"}
Costs = Mapping[Route, Sequence[float]]  # by way, round after round


@dataclass(frozen=True, slots=True)
class Against:
    """Auto's median cost over that of the better way, `ratio`, and the interval that it is in with 90 %."""

    better: Route
    ratio: float
    low: float
    high: float


def against_better(costs: Costs) -> Against:
    """The same rounds of all three ways."""
    medians = {way: statistics.median(some) for way, some in costs.items()}
    better = min((Route.DISAGGREGATED, Route.COLOCATED), key=lambda way: medians[way])
    rounds = list(zip(costs[Route.ANY], costs[better], strict=True))
    rng = random.Random(0)
    ratios = []
    for _ in range(_RESAMPLES):
        autos, betters = zip(*rng.choices(rounds, k=len(rounds)), strict=True)
        ratios.append(statistics.median(autos) / statistics.median(betters))
    ratios.sort()
    outside = int(len(ratios) * (1 - _SHARE) / 2)
    return Against(better, medians[Route.ANY] / medians[better], ratios[outside], ratios[-1 - outside])


def run_decision(cluster: ServedCluster, vocab_size: int, config: DecisionBenchConfig, say: Say) -> Report:
    """Some minutes. Raises LoadFailed."""
    return decision_report(asyncio.run(measure(cluster, vocab_size, config, say)), cluster.model, config)


def decision_report(found: Mapping[Cell, Sequence[Probe]], model: str, config: DecisionBenchConfig) -> Report:
    """Per cell what each way costs, and how far auto is from the better."""
    measures, rows, results = [], [], {}
    for cell, probes in found.items():
        costs = {way: [probe.cost_s(config.weight) for probe in probes if probe.way is way] for way in _NAMES}
        for way, name in _NAMES.items():
            measures.append(Measure(f"{cell.name}: {name}", "ms", tuple(cost * 1e3 for cost in costs[way])))
        results[cell] = result = against_better(costs)
        went = [probe.went for probe in probes if probe.way is Route.ANY]
        rows.append(
            (
                cell.name,
                _NAMES[result.better],
                f"{result.ratio:.2f} ×",
                f"{result.low:.2f} to {result.high:.2f}",
                f"{went.count(Route.DISAGGREGATED)} of {len(went)}",
            )
        )
    worst = max(results, key=lambda cell: results[cell].ratio)
    surest = max(results, key=lambda cell: results[cell].low)
    mean = statistics.fmean(result.ratio for result in results.values())
    unsure = [cell.name for cell, result in results.items() if result.low <= WORSE_BAR < result.high]
    return Report(
        name="decision",
        title="One pool or two: the router's choice against always and never",
        command="python -m bench decision",
        method=f"{model}; router, 1 prefill and 1 decode worker, one thread each. Each cell is asked three ways in turns: "
        "forced over both pools, forced onto the decode worker, left to the router. A probe costs its time to the second token "
        f"plus {config.weight:g} × what all running streams lost meanwhile; the router predicts the same. It learns from all "
        "requests, the forced ones too. Cached prefixes are at the decode worker only. Intervals are a bootstrap over rounds, "
        "90 % wide.",
        measures=tuple(measures),
        verdicts=(
            Verdict("auto against the better way, worst cell", results[worst].ratio, "×", WORSE_BAR, False),
            Verdict("the same, what is sure of it (lower end)", results[surest].low, "×", WORSE_BAR, False),
            Verdict("auto against the better way, mean of cells", mean, "×", WORSE_BAR, False),
        ),
        notes=(
            f"Worst cell: {worst.name}.",
            f"Cells whose interval has the bar in it: {', '.join(unsure) or 'none'}.",
        ),
        tables=(
            Table(
                "Auto against the better way",
                ("cell", "better", "auto / better", "90 % interval", "went remote"),
                tuple(rows),
            ),
        ),
    )
