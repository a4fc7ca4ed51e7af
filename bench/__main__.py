"""`python -m bench`: measures, and writes what came out to bench/results/.

    all          everything below, and the machine's limits
    engine       the engine alone beside transformers
    overhead     what the engine adds to the model's forward
    kernels      each native op as a share of the machine's limits
    step         what `LLM` and a server add to the model's bare step
    placement    what two workers on cores of their own cost each other
    transfer     a hand-off's bytes against memcpy
    overlap      what of a transfer is felt after the last chunk
    peers        the engine alone beside OpenVINO GenAI, vLLM, llama.cpp and transformers (`make bench-peers`)
    ttft         time to first token, two pools against one
    streams      what serving adds to a token at 32 streams
    cancel       how long blocks stay taken when clients leave
    conversation what a chat template and tools cost the router
    router       what one router process carries on one core, with workers that answer at once
    registry     what a registry in Redis costs, and how soon a worker is known
    overload     goodput when up to three times more is asked than there is
    proofs       what it costs that processes prove that they know the cluster's secret
    security     what API keys and TLS cost
    simulate     what each policy does to recorded loads, in virtual time
    index        what the router pays to know who has a prompt's prefix
    decision     one pool or two: the router's choice against always and never

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
from bench.conversation import ConversationBenchConfig, run_conversation
from bench.decision import DecisionBenchConfig
from bench.decision_report import run_decision
from bench.engine import EngineBenchConfig, run_engine
from bench.fake_workers import FakeConfig, serve_until_signal
from bench.index import run_index
from bench.limits import limits_report, measure_limits
from bench.load import LoadFailed, client_main
from bench.machine import MachineFacts, cpu_seconds, foreign_percent, machine_facts
from bench.overhead import run_overhead
from bench.overlap import of_layout, run_overlap
from bench.overload import OverloadBenchConfig, run_overload
from bench.peers.measure import run_peers
from bench.peers.run import PeersConfig
from bench.placement import PlacementBenchConfig, run_placement
from bench.progress import Say, say_on_stderr
from bench.proofs import ProofsBenchConfig, run_proofs
from bench.registry import RegistryBenchConfig, run_registry
from bench.report import Record, Report, joined, markdown, write
from bench.router import PARTS, RouterBenchConfig, run_router
from bench.router_load import router_client_main
from bench.security import SecurityBenchConfig, run_security
from bench.simulate import run_simulate
from bench.step import StepBenchConfig, run_step
from bench.streams import StreamsBenchConfig, run_streams
from bench.transfer import TransferBenchConfig, run_transfer
from bench.ttft import TtftBenchConfig, run_ttft
from contracts.errors import DiptychError
from contracts.kv_layout import KVLayout
from engine.execution.config import prefer_huge_pages
from engine.models.store import resolve_model
from engine.models.store.config import default_cache_dir
from rpc.process import end_with_parent, run_process

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
    quick: bool = False
    parts: tuple[str, ...] = ()


def measure_engine(options: Options, say: Say) -> Report:
    """Some minutes."""
    config = EngineBenchConfig(threads=options.threads)
    config = replace(config, rounds=options.rounds or config.rounds)
    path = half_b_checkpoint(default_cache_dir())
    say("engine: measuring the machine's limits")
    return run_engine(path, measure_limits(options.threads), config, say)


def measure_peers(options: Options, say: Say) -> Report:
    """Ten minutes; needs .venv-peers, with .venv-vllm where vLLM is wanted."""
    config = PeersConfig(threads=options.threads)
    config = replace(config, rounds=options.rounds or config.rounds)
    cache = default_cache_dir()
    return run_peers(half_b_checkpoint(cache), resolve_model(options.model, None, say), cache, config, say)


def measure_overhead(options: Options, say: Say) -> Report:
    """About a minute."""
    config = EngineBenchConfig(threads=options.threads, rounds=options.rounds or 3)
    return run_overhead(half_b_checkpoint(default_cache_dir()), config, say)


def measure_kernels(options: Options, say: Say) -> Report:
    """A minute or two."""
    # With torch, which clients and fake workers are started without.
    from bench.kernels import KernelsBenchConfig, run_kernels

    config = KernelsBenchConfig(threads=options.threads)
    return run_kernels(replace(config, rounds=options.rounds or config.rounds), say)


def measure_step(options: Options, say: Say) -> Report:
    """Two minutes."""
    config = StepBenchConfig(threads=options.threads)
    config = replace(config, rounds=options.rounds or config.rounds)
    return run_step(half_b_checkpoint(default_cache_dir()), config, say)


def measure_placement(options: Options, say: Say) -> Report:
    """A minute."""
    config = PlacementBenchConfig()
    config = replace(config, rounds=options.rounds or config.rounds)
    return run_placement(half_b_checkpoint(default_cache_dir()), config, say)


def measure_transfer(options: Options, say: Say) -> Report:
    """Some seconds."""
    parts = []
    for label, layout in TRANSFER_LAYOUTS.items():
        config = TransferBenchConfig(layout=layout)
        config = replace(config, rounds=config.num_sets * options.rounds if options.rounds else config.rounds)
        parts.append((label, run_transfer(config, say)))
    return joined(parts)


def measure_overlap(options: Options, say: Say) -> Report:
    """A minute."""
    layouts = TRANSFER_LAYOUTS.items()
    return joined([(label, run_overlap(of_layout(layout, options.rounds), say)) for label, layout in layouts])


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


def measure_conversation(options: Options, say: Say) -> Report:
    """Half a minute."""
    config = ConversationBenchConfig()
    config = replace(config, rounds=options.rounds or config.rounds)
    return run_conversation(resolve_model(options.model, None, say), config, say)


def measure_router(options: Options, say: Say) -> Report:
    """Some minutes; --quick a minute."""
    config = RouterBenchConfig()
    config = config.quick if options.quick else config
    config = replace(config, rounds=options.rounds or config.rounds)
    return run_router(resolve_model(options.model, None, say), config, say, options.parts)


def measure_decision(options: Options, say: Say) -> Report:
    """Nine minutes."""
    model = resolve_model(options.model, None, say)
    config = DecisionBenchConfig()
    if options.rounds:
        rounds = dict.fromkeys(config.rounds, options.rounds)
        config = replace(config, rounds=rounds, stream_rounds=rounds)
    say("decision: starting a cluster")
    with serving(model, way="auto") as cluster:
        return run_decision(cluster, vocab_size_of(model), config, say)


def measure_registry(options: Options, say: Say) -> Report:
    """Four minutes; needs a redis-server."""
    config = RegistryBenchConfig()
    config = replace(config, rounds=options.rounds or config.rounds, join_rounds=options.rounds or config.join_rounds)
    return run_registry(config, resolve_model(options.model, None, say), say)


def measure_proofs(options: Options, say: Say) -> Report:
    """Half a minute."""
    config = ProofsBenchConfig()
    return run_proofs(replace(config, rounds=options.rounds or config.rounds), say)


def measure_security(options: Options, say: Say) -> Report:
    """Half a minute."""
    config = SecurityBenchConfig()
    return run_security(replace(config, rounds=options.rounds or config.rounds), say)


def measure_overload(options: Options, say: Say) -> Report:
    """A quarter of an hour; --quick three minutes."""
    config = OverloadBenchConfig()
    if options.quick:
        worlds = tuple(replace(world, duration_s=5.0) for world in config.worlds)
        config = replace(config, worlds=worlds, rounds=1, loads=(0.5, 1.0, 2.0, 3.0))
    config = replace(config, rounds=options.rounds or config.rounds)
    return run_overload(resolve_model(options.model, None, say), config, say)


def measure_machine(options: Options, say: Say) -> Report:
    """A few seconds."""
    say("limits: memory and arithmetic")
    return limits_report(measure_limits(options.threads), f"python -m bench limits --threads {options.threads}")


def measure_simulate(options: Options, say: Say) -> Report:
    """Half a minute, of no machine: virtual time."""
    del options
    return run_simulate(say)


def measure_index(options: Options, say: Say) -> Report:
    """Some seconds."""
    del options
    return run_index(say)


MEASUREMENTS: dict[str, Callable[[Options, Say], Report]] = {
    "limits": measure_machine,
    "engine": measure_engine,
    "overhead": measure_overhead,
    "kernels": measure_kernels,
    "step": measure_step,
    "placement": measure_placement,
    "transfer": measure_transfer,
    "overlap": measure_overlap,
    "ttft": measure_ttft,
    "streams": measure_streams,
    "cancel": measure_cancel,
    "conversation": measure_conversation,
    "router": measure_router,
    "decision": measure_decision,
    "registry": measure_registry,
    "proofs": measure_proofs,
    "security": measure_security,
    "simulate": measure_simulate,
    "index": measure_index,
    "overload": measure_overload,
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
    @click.option("--quick", is_flag=True, help="router and overload only: small sizes.")
    @click.option("--part", "parts", type=click.Choice(PARTS), multiple=True, help="router only: no more than this.")
    def run(results: Path, model: str, threads: int, rounds: int | None, quick: bool, parts: tuple[str, ...]) -> None:
        carry_out(names, Options(results, model, threads, rounds, quick, parts))


_command("all", tuple(MEASUREMENTS), "Everything but peers.")
MEASUREMENTS["peers"] = measure_peers  # not of `all`: it needs other engines
for _name, _measure in MEASUREMENTS.items():
    _command(_name, (_name,), f"Only {_name}: {(_measure.__doc__ or '').splitlines()[0].lower()}")


@main.command("client", hidden=True)
def client() -> None:
    """The load client's process: a plan on stdin, answers on stdout."""
    client_main()


@main.command("router-client", hidden=True)
def router_client() -> None:
    """The load client's process for `router`: a plan on stdin, answers on stdout."""
    router_client_main()


@main.command("fake-workers", hidden=True)
@click.option("--router", required=True, help="host:port of its gRPC door.")
@click.option("--served-name", required=True, help="The model that they say they serve.")
@click.option("--step", type=click.FloatRange(0), default=0.0, help="Seconds; 0 is as fast as the router reads.")
@click.option("--prefill-port", type=click.IntRange(0), default=0, help="0 takes a free one.")
@click.option("--exit-with", type=click.IntRange(1), help="End with this process, which must be the parent.")
def fake_workers(router: str, served_name: str, step: float, prefill_port: int, exit_with: int | None) -> None:
    """A prefill and a decode worker without a model, until a signal."""
    if exit_with is not None:
        end_with_parent(exit_with)
    config = FakeConfig(router, served_name, step, prefill_port)
    sys.exit(run_process(lambda: serve_until_signal(config)))


if __name__ == "__main__":
    main()
