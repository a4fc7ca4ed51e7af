"""`diptych doctor`: asks everything that can be wrong with an environment and says it in words."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict

import click
from rich.console import Console
from rich.text import Text

from cli.doctor import installation, kernels, machine
from cli.doctor.finding import Finding, Level, broken
from cli.options import SectionedCommand, option
from contracts.errors import counted

CHECKS: tuple[Callable[[], Iterator[Finding]], ...] = (
    installation.check_python,
    installation.check_packages,
    installation.check_requirements,
    installation.check_generated_code,
    installation.check_torch,
    kernels.check_kernels,
    machine.check_cores,
    machine.check_memory,
    machine.check_shared_memory,
    machine.check_files,
    machine.check_ports,
    machine.check_model_cache,
    machine.check_environment,
    machine.check_cluster_secret,
)
MARKS = {Level.OK: ("ok     ", "green"), Level.WARNING: ("warning", "yellow"), Level.BROKEN: ("broken ", "bold red")}


def examine() -> Iterator[Finding]:
    """All findings, one check after the other; a check that fails unexpectedly is a finding itself."""
    for check in CHECKS:
        try:
            yield from check()
        except Exception as error:  # noqa: BLE001 - a broken environment may raise anything, and saying so is the task
            subject = check.__name__.removeprefix("check_").replace("_", " ")
            yield broken(subject, f"the check failed: {type(error).__name__}: {error}", "see the words of the error")


def show(console: Console, finding: Finding) -> None:
    """One finding, and under it what to do."""
    mark, style = MARKS[finding.level]
    console.print(Text.assemble((mark, style), f"  {finding.subject:<18} {finding.fact}"), soft_wrap=True)
    if finding.remedy:
        console.print(Text(f"{'':<28} → {finding.remedy}", "bold"), soft_wrap=True)


@click.command("doctor", cls=SectionedCommand)
@option("--json", "as_json", section="Output", is_flag=True, help="The findings as JSON, for scripts.")
@click.pass_context
def doctor(ctx: click.Context, as_json: bool) -> None:
    """Say what is wrong with this environment and what to do about it.

    Looks at Python, the installed packages, torch, cores and memory, shared memory, ports, the model cache and
    environment variables. Exit code 1 when something is broken, 0 otherwise.
    """
    console = Console(highlight=False)
    findings = []
    for finding in examine():
        findings.append(finding)
        if not as_json:
            show(console, finding)
    num_broken = sum(finding.level is Level.BROKEN for finding in findings)
    num_warnings = sum(finding.level is Level.WARNING for finding in findings)
    if as_json:
        click.echo(json.dumps([asdict(finding) for finding in findings], indent=1))
    else:
        warnings = counted(num_warnings, "warning")
        console.print(f"\n{len(findings)} looked at, {warnings}, {num_broken} broken")
    ctx.exit(1 if num_broken else 0)
