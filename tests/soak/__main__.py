"""The command: one soak, a line every ten seconds, a table at the end; exit code 1 when anything is as it must not be."""

from __future__ import annotations

import asyncio
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import click

from bench.machine import cpu_seconds, foreign_percent, machine_facts
from bench.report import Record, write
from tests.soak.judging import Bounds, violations
from tests.soak.report import report, table
from tests.soak.run import Soak, SoakConfig

SHOWN_CHARS = 600


@click.command()
@click.option("--minutes", default=20.0, show_default=True, help="How long the load lasts.")
@click.option("--seed", default=1, show_default=True, help="Of everything that is drawn.")
@click.option("--connector", type=click.Choice(["shm", "tcp", "auto"]), default="shm", show_default=True)
@click.option("--registry", type=click.Choice(["embedded", "redis"]), default="embedded", show_default=True)
@click.option("--questions", default=SoakConfig().num_questions, show_default=True, help="How many are asked in turn.")
@click.option("--rate", default=SoakConfig().rate_hz, show_default=True, help="Requests a second.")
@click.option("--results", type=click.Path(file_okay=False, path_type=Path), help="Where to write soak-CONNECTOR.json.")
@click.option("--keep", is_flag=True, help="Keep the logs of a good run, too.")
def main(
    minutes: float,
    seed: int,
    connector: str,
    registry: str,
    questions: int,
    rate: float,
    results: Path | None,
    keep: bool,
) -> None:
    """Run a real cluster under load while workers are killed and stopped and clients leave, and judge what is left."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the cluster is ended with us
    logs = Path(tempfile.mkdtemp(prefix="diptych-soak-"))
    config = SoakConfig(
        minutes=minutes,
        seed=seed,
        connector=connector,
        shared=registry == "redis",
        num_questions=questions,
        rate_hz=rate,
    )
    print(f"soak: seed {seed}, {minutes:g} minutes, {connector}; logs in {logs}", flush=True)
    bounds, begin, facts = Bounds(), cpu_seconds(), machine_facts()
    soak = Soak(config, logs)
    found = asyncio.run(soak.run())
    said = violations(found, bounds)
    print(table(found, soak.kinds, bounds))
    for sentence in said:
        print(f"VIOLATION  {sentence[:SHOWN_CHARS]}")
    if results is not None:
        foreign = foreign_percent(begin, cpu_seconds(), facts.cores)
        write(Record(facts, report(config, found, soak.kinds, bounds), foreign), results)
    if said:
        print(f"{len(said)} violations; seed {seed}; logs in {logs}")
        sys.exit(1)
    if not keep:
        shutil.rmtree(logs)
    print("nothing wrong, nothing left")


if __name__ == "__main__":
    main()
