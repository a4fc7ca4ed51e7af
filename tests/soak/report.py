"""What a soak says at its end: a table for people, and bench's kind of record for bench/results."""

from __future__ import annotations

from collections import Counter

from bench.report import Measure, Report, Verdict
from tests.soak.asking import Outcome
from tests.soak.judging import Bounds, Findings, unexplained, violations
from tests.soak.run import SoakConfig


def rows(found: Findings, bounds: Bounds) -> list[tuple[str, float, str]]:
    """(what, how many, unit) of everything that must be 0."""
    tally = found.tally
    return [
        ("wrong answers", len(tally.wrong), ""),
        ("hung requests", len(tally.hung), ""),
        ("failed requests", len(tally.failed), ""),
        ("workers that hold blocks when idle", sum(usage > 0 for usage in found.kv_usage.values()), ""),
        ("processes, sockets and segments left over", len(found.left_over), ""),
        ("processes whose memory is not flat", len(bounds.grown(found)), ""),
        ("log lines of errors", len(unexplained(found)), ""),
    ]


def memory_rows(found: Findings, bounds: Bounds) -> list[tuple[str, float, float, float]]:
    """(process, seconds, MiB gained in the second half, MiB a minute) of the lives that are long enough to judge."""
    judged = [life for life in found.lives if life.length_s >= bounds.flat.life_s]
    return [(life.name, life.length_s, *life.second_half()) for life in judged]


def table(found: Findings, kinds: Counter[str], bounds: Bounds) -> str:
    """The summary."""
    tally = found.tally
    lines = ["", f"{'requests':44} {sum(tally.outcomes.values()):8}"]
    lines += [f"{'  ' + outcome:44} {tally.outcomes[outcome]:8}" for outcome in Outcome]
    lines += [f"{'  failed as DESIGN section 7 allows':44} {len(tally.allowed):8}"]
    lines += [f"{'  failed with their router':44} {len(tally.excused):8}"]
    lines += [f"{'disturbances: ' + kind:44} {kinds[kind]:8}" for kind in sorted(kinds)]
    lines += [f"{what:44} {count:8}" for what, count, _ in rows(found, bounds)]
    lines += [f"{'slowest complete answer, s':44} {tally.slowest_s:8.1f}"]
    for name, length_s, gain_mib, slope in memory_rows(found, bounds):
        lines.append(
            f"{f'memory of {name} over {length_s:.0f} s':44} {gain_mib:+8.2f} MiB in its second half ({slope:+.2f}/min)"
        )
    return "\n".join([*lines, ""])


def report(config: SoakConfig, found: Findings, kinds: Counter[str], bounds: Bounds) -> Report:
    """The same as a record."""
    tally = found.tally
    counts = [("requests", "", sum(tally.outcomes.values()))]
    counts += [(f"requests {outcome}", "", tally.outcomes[outcome]) for outcome in Outcome]
    counts += [("requests failed as allowed", "", len(tally.allowed))]
    counts += [(f"disturbances: {kind}", "", kinds[kind]) for kind in sorted(kinds)]
    measures = [Measure(name, unit, (float(value),)) for name, unit, value in counts]
    measures.append(Measure("slowest complete answer", "s", (tally.slowest_s,)))
    for name, length_s, gain_mib, _ in memory_rows(found, bounds):
        measures.append(Measure(f"gained in the second half of {length_s:.0f} s: {name}", "MiB", (gain_mib,)))
    verdicts = [Verdict(what, float(count), unit, 0.0, False) for what, count, unit in rows(found, bounds)]
    verdicts.append(Verdict("violations of any kind", float(len(violations(found, bounds))), "", 0.0, False))
    size = config.size
    return Report(
        name=f"soak-{config.connector}",
        title=f"{config.minutes:g} minutes of load, kills and clients that leave",
        command=f"python -m tests.soak --minutes {config.minutes:g} --seed {config.seed} --connector {config.connector}",
        method=f"tiny-austen, {size.prefill} prefill + {size.decode} decode workers behind `diptych up`, float32; "
        f"{config.num_questions} questions, each answer compared with that of one undisturbed worker.",
        measures=tuple(measures),
        verdicts=tuple(verdicts),
    )
