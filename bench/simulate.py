"""Policies beside each other on the recorded loads, in the simulator: time to first token and prefix hits, as one table a load.

Nothing here depends on the machine that runs it; the same tables come out everywhere. Does not know policies.
"""

from __future__ import annotations

from collections.abc import Sequence

from bench.progress import Say
from bench.report import Measure, Report, Table, Verdict
from bench.simulation.routers import RouterSetup
from bench.simulation.table import Numbers
from bench.simulation.trace import LOADS, Asked, read_load
from bench.simulation.world import Setup, World
from router.policies import POLICIES

LOAD_NAMES = ("multi_turn", "shared", "mixed")
NUM_ROUTERS = (1, 4)
_COLUMNS = (
    "policy (both pools)",
    "TTFT p50",
    "TTFT p99",
    "second token p99",
    "whole answer after the first token, mean",
    "hits at prefill",
    "hits at decode",
    "busiest prefill worker",
)


def simulate(name: str, load: Sequence[Asked], *, num_routers: int = 1, expect_s: float = 5.0) -> Numbers:
    """One load under one policy for both pools."""
    setup = Setup(RouterSetup(name, name, expect_s=expect_s), num_routers=num_routers)
    return Numbers.of(World(setup, load).run(), setup.num_prefill)


def run_simulate(say: Say) -> Report:
    """Half a minute."""
    tables, measures, verdicts = [], [], []
    for load_name in LOAD_NAMES:
        load = read_load(LOADS / f"{load_name}.jsonl")
        for num_routers in NUM_ROUTERS:
            say(f"simulate: {load_name}, {num_routers} routers")
            numbers = {name: simulate(name, load, num_routers=num_routers) for name in sorted(POLICIES)}
            tables.append(_table(load_name, load, num_routers, numbers))
            if num_routers == 1:
                measures += [
                    Measure(f"{load_name}: {name}, TTFT p99", "s", (n.ttft_p99_s,)) for name, n in numbers.items()
                ]
                verdicts.append(_verdict(load_name, numbers))
    return Report(
        name="simulate",
        title="Policies on recorded loads, simulated",
        command="python -m bench simulate",
        method="4 prefill and 4 decode workers in virtual time: the real chooser, policies, index, scheduler and prefix caches; "
        "steps take what bench/simulation/costs.py says. Loads in the form of Mooncake's traces: conversations that grow "
        "(multi_turn), a dozen system prompts and bursts of new ones (shared), independent prompts of unlike lengths (mixed).",
        measures=tuple(measures),
        verdicts=tuple(verdicts),
        tables=tuple(tables),
        exact=True,
    )


def _verdict(load_name: str, numbers: dict[str, Numbers]) -> Verdict:
    best, plain = ("least_loaded", "round_robin") if load_name == "mixed" else ("prefix_aware", "least_loaded")
    share = numbers[best].ttft_p99_s / numbers[plain].ttft_p99_s
    return Verdict(f"{load_name}: TTFT p99, {best} over {plain}", share, "x", 1.0, at_least=False)


def _table(load_name: str, load: Sequence[Asked], num_routers: int, numbers: dict[str, Numbers]) -> Table:
    tokens = sum(len(asked.token_ids) for asked in load)
    routers = "one router" if num_routers == 1 else f"{num_routers} routers, each with every fourth request"
    title = f"{load_name}: {len(load)} requests, {tokens:,} prompt tokens in {load[-1].at_s:.0f} s; {routers}"
    rows = tuple(
        (
            name,
            f"{n.ttft_p50_s:.2f} s",
            f"{n.ttft_p99_s:.2f} s",
            f"{n.second_p99_s * 1e3:.0f} ms",
            f"{n.answer_s:.2f} s",
            f"{n.hits:.0%}",
            f"{n.hits_decode:.0%}",
            f"{n.busiest:.2f} of its share",
        )
        for name, n in numbers.items()
    )
    return Table(title, _COLUMNS, rows)
