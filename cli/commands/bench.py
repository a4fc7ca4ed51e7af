"""`diptych bench`: what a server does under load, two pools against one, what the engine does alone."""

from __future__ import annotations

import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Unpack

import click
import msgspec

from bench.serving.grpc_target import GrpcTarget
from bench.serving.measures import JsonObject
from bench.serving.openai_target import OpenAIConfig, OpenAITarget
from bench.serving.requests import AskFailed, BenchRequest, Outcome, Target
from bench.serving.results import Results, check_folder, table, write_results
from bench.serving.serve import Point, ServeConfig, Watch, requests_maker, serve
from cli.commands.benchflags import SERVE_OPTIONS, ServeFlags, data_config, serve_config
from cli.commands.benchnames import ServeCommand
from cli.commands.benchoffline import latency, throughput_command
from cli.commands.compare import compare_command
from cli.options import apply
from cli.reaching import read_api_key, read_authority
from contracts.errors import ConfigError
from contracts.pb.diptych.v1 import inference_pb2 as pb
from diptych_client import Tls

ROUTES = {
    "any": pb.ROUTE_UNSPECIFIED,
    "disaggregated": pb.ROUTE_DISAGGREGATED,
    "colocated": pb.ROUTE_COLOCATED,
}
_MANY = click.IntRange(1, 10_000)
SAY_EVERY_S = {True: 0.25, False: 10.0}  # on a terminal, elsewhere


@click.group("bench")
def bench() -> None:
    """Measure a server under load, two pools against one, or the engine alone."""


class Progress:
    """How far a load is, on stderr: one line that is written over on a terminal, a line now and then elsewhere.

    It is drawn at most four times a second by whoever ends a request, not by a thread: that would disturb what is measured.
    """

    def __init__(self) -> None:
        self._total = self._done = self._failed = 0
        self._label = ""
        self._began_s = self._next_s = 0.0
        self._terminal = sys.stderr.isatty()

    def point(self, point: Point, count: int) -> None:
        """A load begins."""
        self._total, self._done, self._failed, self._label = count, 0, 0, point.label
        self._began_s = time.monotonic()
        self._next_s = self._began_s + SAY_EVERY_S[self._terminal]

    def done(self, outcome: Outcome) -> None:
        """A request has ended."""
        self._done += 1
        self._failed += not outcome.ok
        now_s = time.monotonic()
        if now_s >= self._next_s or self._done == self._total:
            self._next_s = now_s + SAY_EVERY_S[self._terminal]
            self._draw(now_s - self._began_s)

    def _draw(self, took_s: float) -> None:
        width = 24
        full = width * self._done // self._total
        bar = "#" * full + "." * (width - full)
        failed = f", {self._failed} failed" if self._failed else ""
        line = f"{self._label}: [{bar}] {self._done}/{self._total}{failed}, {took_s:.1f} s"
        last = self._done == self._total
        click.echo(f"\r\x1b[K{line}" if self._terminal else line, err=True, nl=last or not self._terminal)


@bench.command("serve", cls=ServeCommand, short_help="What users of any server see under a load.")
@click.argument("more_goodput", nargs=-1, metavar="")
def serve_command(**given: Unpack[ServeFlags]) -> None:
    """Send a load to a server and say what its users would have seen.

    Latencies count from when a request should have been sent. Result fields have the names of `vllm bench serve`.

    \b
    Examples:
      diptych bench serve --num-prompts 200 --request-rate 4 --input-len 512 --output-len 64
      diptych bench serve --request-rate 1,2,4,8 --goodput ttft:500 tpot:50 --result-dir results/
      diptych bench serve --backend openai --base-url http://127.0.0.1:8080 --max-concurrency 1,4,16
      diptych bench serve --dataset-name mooncake --dataset-path trace.jsonl --trace-speed 2
    """
    import uvloop

    config = serve_config(given)
    data = data_config(given, given["backend"])
    make = requests_maker(data)
    make(0)  # what is wrong with the data is said before anybody is asked
    if given["result_dir"] is not None:
        check_folder(given["result_dir"])
    head: JsonObject = {
        "label": given["label"] or given["backend"],
        "backend": given["backend"],
        "model_id": given["model"],
        "tokenizer_id": None if data.tokenizer is None else data.tokenizer.name,
        "dataset_name": data.dataset,
    }
    progress, measured = Progress(), list[tuple[Point, JsonObject]]()
    watch = Watch(progress.point, progress.done, lambda point, fields: measured.append((point, head | fields)))
    try:
        uvloop.run(_serve(given, head, make, config, watch))
    except KeyboardInterrupt:
        if measured:
            _say(f"interrupted; loads that were measured to their end: {len(measured)}")
            _report(given, measured)
        raise
    results = _report(given, measured)
    if not any(fields["completed"] for _, fields in results.points):
        raise AskFailed(f"no request was answered: {results.first_error}")


def _report(given: ServeFlags, measured: Sequence[tuple[Point, JsonObject]]) -> Results:
    """Show it and write it down; what cannot be written goes to stdout, so that no measurement is lost. Raises ConfigError."""
    results = Results(given["label"] or given["backend"], tuple(measured))
    click.echo(f"\n{table(results)}", err=True)
    if given["result_dir"] is None:
        if sys.stdout.isatty():
            _say("every field: --result-dir DIR, or stdout into a file")
        else:
            _print(results)
        return results
    try:
        for path in write_results(results, given["result_dir"], plots=given["plots"], say=_say):
            _say(f"wrote {path}")
    except ConfigError:
        _print(results)
        raise
    return results


def _print(results: Results) -> None:
    for _, fields in results.points:
        click.echo(msgspec.json.encode(fields).decode())


apply(SERVE_OPTIONS, serve_command)
bench.add_command(compare_command)
bench.add_command(latency)
bench.add_command(throughput_command)


async def _serve(
    given: ServeFlags,
    head: JsonObject,
    make: Callable[[int], tuple[BenchRequest, ...]],
    config: ServeConfig,
    watch: Watch,
) -> None:
    """`head` is told which model it is."""
    head["model_id"], target = await _target(given)
    try:
        await serve(target, make, config, watch)
    finally:
        await target.close()


async def _target(given: ServeFlags) -> tuple[str, Target]:
    """The server, and the name of the model that it is asked for. Raises AskFailed, ConfigError."""
    key, ca = read_api_key(given["api_key_file"]), read_authority(given["tls_ca"])
    model = given["model"] or ""
    if given["backend"] == "diptych":
        if given["extra_body"] is not None:
            raise ConfigError("--extra-body: needs --backend openai or openai-chat")
        tls = None if ca is None else Tls(ca=ca)
        ours = GrpcTarget(given["address"], model=model, api_key=key or None, tls=tls, route=ROUTES[given["route"]])
        return model or await _only(given["address"], ours.models()), ours
    if given["route"] != "any":
        raise ConfigError(f"--route: {given['route']} needs --backend diptych")
    if not given["base_url"].startswith(("http://", "https://")):
        raise ConfigError(f"--base-url: {given['base_url']!r} must begin with http:// or https://")
    wanted = OpenAIConfig(
        base_url=given["base_url"].rstrip("/").removesuffix("/v1"),
        model=model,
        chat=given["backend"] == "openai-chat",
        api_key=key,
        ca_file="" if given["tls_ca"] is None else str(given["tls_ca"]),
        ignore_eos=not given["no_ignore_eos"],
        extra_json=(given["extra_body"] or "{}").encode(errors="replace"),
    )
    if not model:
        asked = OpenAITarget(wanted)
        try:
            model = await _only(wanted.base_url, asked.models())
        finally:
            await asked.close()
    return model, OpenAITarget(replace(wanted, model=model))


async def _only(where: str, asked: Awaitable[list[str]]) -> str:
    names = await asked
    if len(names) != 1:
        raise ConfigError(f"--model: {where} serves {', '.join(names) or 'nothing'}; name one")
    return names[0]


def _say(line: str) -> None:
    click.echo(line, err=True)
