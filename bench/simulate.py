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
from router.config import DisaggregationConfig, DisaggregationMode
from router.policies import POLICIES

LOAD_NAMES = ("multi_turn", "shared", "mixed")
NUM_ROUTERS = (1, 4)
BESIDE = "least_loaded"  # in the other pool, where one pool's policy is what differs
WAYS = {mode: DisaggregationConfig(mode) for mode in DisaggregationMode}
_COLUMNS = (
    "TTFT p50",
    "TTFT p99",
    "second token p99",
    "whole answer after the first token, mean",
    "arrival to last token, mean",
    "hits at prefill",
    "hits at decode",
    "busiest that computes prompts",
    "on one worker",
)


def simulate(load: Sequence[Asked], routers: RouterSetup, num_routers: int = 1) -> Numbers:
    """One load under one choice of policies and ways."""
    setup = Setup(routers, num_routers=num_routers)
    return Numbers.of(World(setup, load).run(), setup.num_prefill)


def run_simulate(say: Say) -> Report:
    """A minute."""
    tables, measures, verdicts = [], [], []
    for load_name in LOAD_NAMES:
        load = read_load(LOADS / f"{load_name}.jsonl")
        for num_routers in NUM_ROUTERS:
            say(f"simulate: {load_name}, {num_routers} routers")
            numbers = {name: simulate(load, _both(name), num_routers) for name in sorted(POLICIES)}
            if num_routers == 1:
                measures += [
                    Measure(f"{load_name}: {name}, TTFT p99", "s", (n.ttft_p99_s,)) for name, n in numbers.items()
                ]
                verdicts.append(_verdict(load_name, numbers))
                unnamed = RouterSetup("session_affinity", "session_affinity")
                numbers["session_affinity, no session named"] = simulate(load, unnamed)
            routers = "one router" if num_routers == 1 else f"{num_routers} routers, each with every fourth request"
            tables.append(_table(f"{_title(load_name, load)}; {routers}", "policy (both pools)", numbers))
        say(f"simulate: {load_name}, one pool, ways")
        tables.append(_table(f"{load_name}: the effect in each pool", "policies", _by_pool(load)))
        ways = _by_way(load)
        tables.append(_table(f"{load_name}: two pools or one, prefix_aware in both", "way", ways))
        share = ways["auto"].whole_s / min(ways["always"].whole_s, ways["never"].whole_s)
        name = f"{load_name}: arrival to last token, auto over the better of always and never"
        verdicts.append(Verdict(name, share, "x", 1.15, at_least=False))
    return Report(
        name="simulate",
        title="Policies on recorded loads, simulated",
        command="python -m bench simulate",
        method="4 prefill and 4 decode workers in virtual time: the real chooser, policies, index, choice of the way, scheduler "
        "and prefix caches; steps take what bench/simulation/costs.py says. The loads have the form of Mooncake's traces and are "
        "written by seeded generators: conversations that grow, each a session (multi_turn), a dozen system prompts and bursts "
        "of new ones (shared), independent prompts of unlike lengths (mixed). Over both pools, unless the way is what differs.",
        measures=tuple(measures),
        verdicts=tuple(verdicts),
        tables=tuple(tables),
        exact=True,
    )


def _both(name: str) -> RouterSetup:
    return RouterSetup(name, name, sessions=True)


def _by_pool(load: Sequence[Asked]) -> dict[str, Numbers]:
    rows = {
        f"prefill {name}, decode {BESIDE}": simulate(load, RouterSetup(name, BESIDE, sessions=True))
        for name in sorted(POLICIES)
    }
    for name in sorted(POLICIES):
        rows[f"prefill {BESIDE}, decode {name}"] = simulate(load, RouterSetup(BESIDE, name, sessions=True))
    return rows


def _by_way(load: Sequence[Asked]) -> dict[str, Numbers]:
    return {
        mode.value: simulate(load, RouterSetup("prefix_aware", "prefix_aware", ways=ways))
        for mode, ways in WAYS.items()
    }


def _verdict(load_name: str, numbers: dict[str, Numbers]) -> Verdict:
    best, plain = ("least_loaded", "round_robin") if load_name == "mixed" else ("prefix_aware", "least_loaded")
    share = numbers[best].ttft_p99_s / numbers[plain].ttft_p99_s
    return Verdict(f"{load_name}: TTFT p99, {best} over {plain}", share, "x", 1.0, at_least=False)


def _title(load_name: str, load: Sequence[Asked]) -> str:
    tokens = sum(len(asked.token_ids) for asked in load)
    return f"{load_name}: {len(load)} requests, {tokens:,} prompt tokens in {load[-1].at_s:.0f} s"


def _table(title: str, what: str, numbers: dict[str, Numbers]) -> Table:
    rows = tuple(
        (
            name,
            f"{n.ttft_p50_s:.2f} s",
            f"{n.ttft_p99_s:.2f} s",
            f"{n.second_p99_s * 1e3:.0f} ms",
            f"{n.answer_s:.2f} s",
            f"{n.whole_s:.2f} s",
            f"{n.hits:.0%}",
            f"{n.hits_decode:.0%}",
            f"{n.busiest:.2f} of its share",
            f"{n.alone:.0%}",
        )
        for name, n in numbers.items()
    )
    return Table(title, (what, *_COLUMNS), rows)
