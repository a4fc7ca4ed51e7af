"""`python -m bench`: measures, and writes what came out to bench/results/.

    all          everything below, and the machine's limits
    engine       the engine alone beside transformers
    overhead     what the engine adds to the model's forward
    transfer     a hand-off's bytes against memcpy
    ttft         time to first token, two pools against one
    streams      what serving adds to a token at 32 streams
    cancel       how long blocks stay taken when clients leave

Does not measure anything itself.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import click

from bench.cancel import WORKER_FLAGS, CancelBenchConfig, run_cancel
from bench.checkpoint import HALF_B, half_b_checkpoint
from bench.cluster import ClusterDidNotStart, serving, vocab_size_of
from bench.engine import EngineBenchConfig, run_engine
from bench.limits import limits_report, measure_limits
from bench.load import LoadFailed, client_main
from bench.machine import MachineFacts, cpu_seconds, foreign_percent, machine_facts
from bench.overhead import run_overhead
from bench.progress import Say, say_on_stderr
from bench.report import Record, Report, joined, markdown, write
from bench.streams import StreamsBenchConfig, run_streams
from bench.transfer import TransferBenchConfig, run_transfer
from bench.ttft import TtftBenchConfig, run_ttft
from contracts.errors import DiptychError
from contracts.kv_layout import KVLayout
from engine.execution.config import prefer_huge_pages
from engine.models.store import resolve_model
from engine.models.store.config import default_cache_dir

RESULTS = Path(__file__).parent / "results"
SERVED_MODEL = "smollm2-135m-instruct"
TRANSFER_LAYOUTS = {
    "SmolLM2-135M": KVLayout("bench", "bfloat16", num_layers=30, num_kv_heads=3, head_size=64, block_size=16),
    "0.5B": KVLayout("bench", "bfloat16", HALF_B.num_layers, HALF_B.num_kv_heads, HALF_B.head_size, block_size=16),
}


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line says; `rounds` None leaves each measurement its own number."""

    results: Path
    model: str
    threads: int
    rounds: int | None


def measure_engine(options: Options, say: Say) -> Report:
    """Some minutes."""
    config = EngineBenchConfig(threads=options.threads)
    config = replace(config, rounds=options.rounds or config.rounds)
    path = half_b_checkpoint(default_cache_dir())
    say("engine: measuring the machine's limits")
    return run_engine(path, measure_limits(options.threads), config, say)


def measure_overhead(options: Options, say: Say) -> Report:
    """About a minute."""
    config = EngineBenchConfig(threads=options.threads, rounds=options.rounds or 3)
    return run_overhead(half_b_checkpoint(default_cache_dir()), config, say)


def measure_transfer(options: Options, say: Say) -> Report:
    """Some seconds."""
    parts = []
    for label, layout in TRANSFER_LAYOUTS.items():
        config = TransferBenchConfig(layout=layout)
        config = replace(config, rounds=config.num_sets * options.rounds if options.rounds else config.rounds)
        parts.append((label, run_transfer(config, say)))
    return joined(parts)


def measure_ttft(options: Options, say: Say) -> Report:
    """About a minute."""
    model = resolve_model(options.model, None, say)
    config = TtftBenchConfig(pairs=10 * (options.rounds or 3))
    say("ttft: starting a cluster")
    with serving(model) as cluster:
        return run_ttft(cluster, vocab_size_of(model), config, say)


def measure_streams(options: Options, say: Say) -> Report:
    """A minute or two."""
    model = resolve_model(options.model, None, say)
    config = StreamsBenchConfig()
    config = replace(config, rounds=options.rounds or config.rounds)
    say("streams: starting a cluster")
    with serving(model) as cluster:
        return run_streams(model, cluster, vocab_size_of(model), config, say)


def measure_cancel(options: Options, say: Say) -> Report:
    """Some minutes."""
    model = resolve_model(options.model, None, say)
    config = CancelBenchConfig()
    config = replace(config, rounds=options.rounds or config.rounds)
    say("cancel: starting a cluster")
    with serving(model, worker_flags=WORKER_FLAGS) as cluster:
        return run_cancel(cluster, vocab_size_of(model), config, say)


def measure_machine(options: Options, say: Say) -> Report:
    """A few seconds."""
    say("limits: memory and arithmetic")
    return limits_report(measure_limits(options.threads), f"python -m bench limits --threads {options.threads}")


MEASUREMENTS: dict[str, Callable[[Options, Say], Report]] = {
    "limits": measure_machine,
    "engine": measure_engine,
    "overhead": measure_overhead,
    "transfer": measure_transfer,
    "ttft": measure_ttft,
    "streams": measure_streams,
    "cancel": measure_cancel,
}


def carry_out(names: Sequence[str], options: Options) -> None:
    """Measure in order, write each result as soon as it is there, and show it. Exits 1 when something did not work."""
    prefer_huge_pages()  # as our workers do, before anything here has torch allocate; the peer has them, too
    say = say_on_stderr()
    facts: MachineFacts = machine_facts()
    failed = []
    for name in names:
        begin = cpu_seconds()
        try:
            report = MEASUREMENTS[name](options, say)
            record = Record(facts, report, foreign_percent(begin, cpu_seconds(), facts.cores))
            write(record, options.results)
            print(markdown(record))
        except (DiptychError, LoadFailed, ClusterDidNotStart) as error:
            say(f"{name}: {error}")
            failed.append(name)
    if failed:
        sys.exit(f"did not work: {', '.join(failed)}")


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Measure speed and write tables and JSON to bench/results/."""


def _command(name: str, names: Sequence[str], summary: str) -> None:
    @main.command(name, help=summary)
    @click.option(
        "--results", type=click.Path(file_okay=False, path_type=Path), default=RESULTS, help="Where to write."
    )
    @click.option("--model", default=SERVED_MODEL, show_default=True, help="What ttft, streams and cancel serve.")
    @click.option(
        "--threads", type=click.IntRange(1), default=2, show_default=True, help="Threads of the engine alone."
    )
    @click.option("--rounds", type=click.IntRange(1), help="Repetitions. [default: each measurement's own, at least 3]")
    def run(results: Path, model: str, threads: int, rounds: int | None) -> None:
        carry_out(names, Options(results, model, threads, rounds))


_command("all", tuple(MEASUREMENTS), "Everything.")
for _name, _measure in MEASUREMENTS.items():
    _command(_name, (_name,), f"Only {_name}: {(_measure.__doc__ or '').splitlines()[0].lower()}")


@main.command("client", hidden=True)
def client() -> None:
    """The load client's process: a plan on stdin, answers on stdout."""
    client_main()


if __name__ == "__main__":
    main()
