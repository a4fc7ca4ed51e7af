"""What a prefill and a decode worker on cores of their own cost each other, and how much of that is memory bandwidth.

    this process ──"run S"──▶ prefill child on one core   decode child on another   hog child: reads memory, nothing else
                 ◀── steps' seconds ──┘                          round: each alone · both · each beside the hog

A worker beside another must not be slower than beside the hog, which takes from the memory what a core can take and shares
nothing else: what were more is locks, threads in each other's way, or a core that is not one's own. The children settle as
workers do. Does not know services.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from bench.cluster import stop_child
from bench.progress import Say
from bench.report import Measure, Report, Verdict
from bench.stats import Spread, ratio, spread
from contracts.errors import ConfigError
from engine.placement.choice import choose_cores
from engine.placement.topology import read_topology
from rpc.cores import keep_to
from worker.placement import Wish, settle

HOG_BYTES = 1 << 28
PREFILL_TOKENS = 128
PREFILL, DECODE, HOG = "prefill", "decode", "hog"
# A median of five rounds on a machine that is not quite at rest is this far from the next one.
NOISE = 1.05


@dataclass(frozen=True, slots=True)
class PlacementBenchConfig:
    """How long each window is, how often; `decode_rows` requests decode at once."""

    window_s: float = 1.5
    rounds: int = 5
    decode_rows: int = 8


class Steps(msgspec.Struct):
    """What a child did in a window: each of its steps, in seconds. `place` is where it said at its start that it stands."""

    step_s: list[float]
    place: str = ""


class Child:
    """A child process that runs one kind of work for as long as it is told."""

    def __init__(self, kind: str, cpu: int, config: PlacementBenchConfig, model: Path) -> None:
        command = [sys.executable, "-P", "-m", "bench.placement", kind, str(cpu), str(config.decode_rows), str(model)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.place = ""

    def wait_ready(self) -> None:
        """Until it has loaded and warmed up."""
        self.place = self._answer().place

    def begin(self, seconds: float) -> None:
        """Work for so long, and stop at the end of a step."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{seconds}\n".encode())
        self.process.stdin.flush()

    def median_s(self) -> float:
        """Of the steps since `begin`; waits for their end."""
        return spread(self._answer().step_s).median

    def _answer(self) -> Steps:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise ConfigError("placement: a child has ended; see above")
        return msgspec.json.decode(line, type=Steps)


@dataclass(slots=True)
class Windows:
    """Median step seconds of each round, by who worked and beside whom ("" alone)."""

    alone: dict[str, list[float]] = field(default_factory=lambda: {PREFILL: [], DECODE: []})
    beside_other: dict[str, list[float]] = field(default_factory=lambda: {PREFILL: [], DECODE: []})
    beside_hog: dict[str, list[float]] = field(default_factory=lambda: {PREFILL: [], DECODE: []})


def run_placement(model: Path, config: PlacementBenchConfig, say: Say) -> Report:
    """A minute. Raises ConfigError where there are no two cores."""
    cores = choose_cores(read_topology(), 2)
    if cores is None:
        raise ConfigError("placement: needs two cores")
    first, second = (core.cpus[0] for core in cores)
    with ExitStack() as running:
        children = {
            PREFILL: Child(PREFILL, first, config, model),
            DECODE: Child(DECODE, second, config, model),
            f"{HOG} beside {DECODE}": Child(HOG, first, config, model),
            f"{HOG} beside {PREFILL}": Child(HOG, second, config, model),
        }
        for child in children.values():
            running.callback(stop_child, child.process)
        say("placement: loading the model twice")
        for child in children.values():
            child.wait_ready()
        windows = Windows()
        for number in range(config.rounds + 1):
            say(f"placement: round {number} of {config.rounds}" if number else "placement: warming up")
            _round(children, config.window_s, windows if number else Windows())
        return placement_report(windows, config, (children[PREFILL].place, children[DECODE].place))


def _round(children: dict[str, Child], window_s: float, windows: Windows) -> None:
    for kind in (PREFILL, DECODE):
        windows.alone[kind].append(_together(children, window_s, (kind,))[0])
    for kind, median_s in zip((PREFILL, DECODE), _together(children, window_s, (PREFILL, DECODE)), strict=True):
        windows.beside_other[kind].append(median_s)
    for kind in (PREFILL, DECODE):
        windows.beside_hog[kind].append(_together(children, window_s, (kind, f"{HOG} beside {kind}"))[0])


def _together(children: dict[str, Child], window_s: float, names: Sequence[str]) -> list[float]:
    for name in names:
        children[name].begin(window_s)
    return [children[name].median_s() for name in names]


def placement_report(windows: Windows, config: PlacementBenchConfig, places: tuple[str, str]) -> Report:
    """Each worker's slowdown beside the other, over its slowdown beside the hog."""
    measures: list[Measure] = []
    verdicts: list[Verdict] = []
    notes = [f"The prefill worker: {places[0]}. The decode worker: {places[1]}."]
    for kind, other in ((PREFILL, DECODE), (DECODE, PREFILL)):
        alone, beside, hog = (
            Spread(tuple(1e3 * s for s in which[kind]))
            for which in (windows.alone, windows.beside_other, windows.beside_hog)
        )
        measures += [
            Measure(f"{kind} step, alone", "ms", alone.runs),
            Measure(f"{kind} step, beside {other}", "ms", beside.runs),
            Measure(f"{kind} step, beside the hog", "ms", hog.runs),
        ]
        slower, explained = ratio(beside, alone), ratio(hog, alone)
        verdicts.append(
            Verdict(
                f"{kind}'s slowdown beside {other}, over that beside the hog", slower / explained, "x", NOISE, False
            )
        )
        notes.append(f"{kind.capitalize()} is {slower:.2f}x as slow beside {other}, {explained:.2f}x beside the hog.")
    return Report(
        name="placement",
        title="Two workers on cores of their own",
        command=f"python -m bench placement --rounds {config.rounds}",
        method=f"0.5B-shaped bf16 model, one process and one thread a worker, each kept to a core as workers are. Prefill: "
        f"{PREFILL_TOKENS} tokens a step; decode: {config.decode_rows} rows a step; windows of {config.window_s:g} s, medians of "
        f"each window's steps. The hog sums {HOG_BYTES >> 20} MiB of float32 over and over on the other's core: it shares the "
        "memory and nothing else.",
        measures=tuple(measures),
        verdicts=tuple(verdicts),
        notes=tuple(notes),
    )


def child_main(kind: str, cpu: int, decode_rows: int, model: Path) -> None:
    """One child: settle, load, then a window of steps for each line of stdin."""
    place = ""
    if kind == HOG:
        keep_to("hog", (cpu,))
    else:
        place = settle(Wish((cpu,)), f"bench-{kind}").described()
    step = _hog() if kind == HOG else _worker(kind, decode_rows, model)
    _say(Steps([], place))
    for line in sys.stdin:
        end_s = time.perf_counter() + float(line)
        taken: list[float] = []
        while (begin_s := time.perf_counter()) < end_s:
            step()
            taken.append(time.perf_counter() - begin_s)
        _say(Steps(taken))


def _worker(kind: str, decode_rows: int, model: Path) -> Callable[[], object]:
    from bench.ours import load_runner
    from engine.execution.warm_up import decode_batch, prompt_batch

    runner = load_runner(model, 1)
    batch = prompt_batch(PREFILL_TOKENS, runner.layout.block_size) if kind == PREFILL else decode_batch(decode_rows)
    return lambda: runner.execute(batch)


def _hog() -> Callable[[], object]:
    import torch

    torch.set_num_threads(1)
    numbers = torch.ones(HOG_BYTES // 4)
    return numbers.sum


def _say(steps: Steps) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(steps) + b"\n")
    sys.stdout.flush()


if __name__ == "__main__":
    child_main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
