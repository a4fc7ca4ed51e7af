"""Measures systems in turns: in each round every system is started, has every cell's load, and is stopped.

    round 1: A B C    round 2: C B A    round 3: A B C      so that what drifts on the machine drifts for all

Only one system's processes exist at a time. Does not know how they are started.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace

from bench.compare.load import Cell, CellRun, LoadConfig, run_cell, warm_up
from bench.compare.numbers import Comparison, Differences, differences, numbers
from bench.compare.systems import System
from bench.progress import Say
from bench.serving.grpc_target import GrpcTarget
from bench.serving.measures import Limits
from bench.serving.requests import Outcome

Start = Callable[[System], AbstractAsyncContextManager[str]]
"""Starts a system; gives its gRPC address when it serves. It is gone when the context is left."""
_ROUND_SEED = 10_007
_CELL_SEED = 101


@dataclass(frozen=True, slots=True)
class CompareConfig:
    """What is compared under which loads."""

    systems: tuple[System, ...]
    cells: tuple[Cell, ...]
    load: LoadConfig = field(default_factory=LoadConfig)
    rounds: int = 3
    limits: Limits = field(default_factory=Limits)


OnRound = Callable[[CompareConfig, Comparison], None]


def turns(systems: Sequence[System], rounds: int) -> list[tuple[int, System]]:
    """(round, system) in the order in which they are run."""
    return [(number, system) for number in range(rounds) for system in systems[:: 1 if number % 2 == 0 else -1]]


async def compare(
    config: CompareConfig, start: Start, say: Say, on_round: OnRound = lambda _config, _comparison: None
) -> Comparison:
    """All of it; `on_round` is told after each round what all until then come to. Raises AskFailed, and what `start` raises."""
    runs: dict[tuple[int, Cell, str], CellRun] = {}
    for number, system in turns(config.systems, config.rounds):
        say(f"round {number + 1} of {config.rounds}: starting {system.name} ({system.where})")
        async with start(system) as address:
            target = GrpcTarget(address)
            try:
                lengths = tuple(sorted({cell.input_len for cell in config.cells}))
                await warm_up(target, lengths, config.load, max(len(system.prefill), len(system.decode)))
                for place, cell in enumerate(config.cells):
                    seed = config.load.seed + number * _ROUND_SEED + place * _CELL_SEED
                    run = await run_cell(target, cell, config.load, seed)
                    runs[number, cell, system.name] = run
                    said = numbers(run, config.limits)
                    say(
                        f"{system.name}: {cell.label}: ITL of streams p50 {said['stream_itl_p50']:.0f} ms, "
                        f"p99 {said['stream_itl_p99']:.0f} ms, longest {said['stream_itl_max']:.0f} ms; "
                        f"TTFT p50 {said['ttft_p50']:.0f} ms"
                    )
            finally:
                await target.close()
        if len(runs) == (number + 1) * len(config.systems) * len(config.cells):
            whole = replace(config, rounds=number + 1)
            on_round(whole, summed_up(whole, runs))
    return summed_up(config, runs)


def summed_up(config: CompareConfig, runs: dict[tuple[int, Cell, str], CellRun]) -> Comparison:
    """What `runs` come to, by round, cell and system's name."""
    names = tuple(system.name for system in config.systems)
    tokens = Differences()
    for number in range(config.rounds):
        for cell in config.cells:
            for name in names[1:]:
                tokens += differences(runs[number, cell, names[0]], runs[number, cell, name])
    return Comparison(
        systems=names,
        cells=config.cells,
        rounds={
            (cell, name): tuple(numbers(runs[number, cell, name], config.limits) for number in range(config.rounds))
            for cell in config.cells
            for name in names
        },
        tokens=tokens,
        failed={name: sum(not outcome.ok for outcome in _prompts(runs, name)) for name in names},
        over_two={name: _over_two(_prompts(runs, name)) for name in names},
    )


def _prompts(runs: Mapping[tuple[int, Cell, str], CellRun], system: str) -> list[Outcome]:
    return [outcome for key, run in runs.items() if key[2] == system for outcome in run.prompts]


def _over_two(prompts: Sequence[Outcome]) -> str:
    good = [outcome.answered for outcome in prompts if outcome.ok]
    return f"{sum(reply.route == 'disaggregated' for reply in good)} of {len(good)}"
