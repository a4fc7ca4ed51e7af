"""What was measured, written down: a table for the terminal, a JSON file a load, one page, and plots.

    results/LABEL-rate-4.json …, results/report.html, results/latency.png, throughput.png

Does not know how anything was measured.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from bench.serving.measures import METRICS, JsonObject
from bench.serving.page import page
from bench.serving.plots import draw
from bench.serving.serve import Point
from contracts.errors import ConfigError

_STEM_CHARS = 48  # a file's name may have 255 bytes
LATE_MS = 2.0
COLUMNS = ("mean", "median", "std")


@dataclass(frozen=True, slots=True)
class Results:
    """One sweep, point by point."""

    label: str
    points: tuple[tuple[Point, JsonObject], ...]

    @property
    def first_error(self) -> str:
        """What the first failed request failed of."""
        return next((said for _, fields in self.points if (said := _first_error(fields))), "")


def table(results: Results) -> str:
    """Lines for a terminal, one block a point."""
    blocks = []
    for point, fields in results.points:
        counts = f"{fields['completed']} of {fields['num_prompts']} answered in {number(fields['duration'])} s"
        rates = (
            f"{number(fields['request_throughput'])} requests/s, {number(fields['output_throughput'])} output tokens/s, "
            f"{number(fields['total_token_throughput'])} tokens/s"
        )
        if fields["request_goodput"] is not None:
            rates += f", goodput {number(fields['request_goodput'])} requests/s"
        if fields["failed"]:
            counts += f"; {fields['failed']} failed, one of them: {_first_error(fields)}"
        names = statistics_of(fields)
        lines = [f"{results.label} {point.label}: {counts}", rates, *_late(point, fields)]
        lines.append("ms    " + "".join(f"{name:>11}" for name in names))
        for metric in METRICS:
            lines.append(f"{metric:<6}" + "".join(f"{number(fields[f'{name}_{metric}_ms']):>11}" for name in names))
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def _late(point: Point, fields: JsonObject) -> list[str]:
    """A client that could not send in time measured itself; where a place had to be waited for it is meant to be late."""
    lag_ms = fields["mean_send_lag_ms"]
    if point.max_concurrency is not None or not isinstance(lag_ms, float) or lag_ms < LATE_MS:
        return []
    return [
        f"the client was late: it sent requests {number(lag_ms)} ms after they were due, which is in what it measured"
    ]


def _first_error(fields: JsonObject) -> str:
    errors = fields["errors"]
    return next((str(error) for error in errors if error), "") if isinstance(errors, list) else ""


def statistics_of(fields: JsonObject) -> tuple[str, ...]:
    """mean, median, std, and the percentiles that were asked for."""
    ends = "_ttft_ms"
    percentiles = [name.removesuffix(ends) for name in fields if name.startswith("p") and name.endswith(ends)]
    return (*COLUMNS, *percentiles)


def number(value: object) -> str:
    """Three figures behind the point at most, none where the number is large."""
    if not isinstance(value, int | float):
        return "-" if value is None else str(value)
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.2f}"


def check_folder(folder: Path) -> None:
    """Make it and try to write in it, before anything is measured. Raises ConfigError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(f"--result-dir: {folder}: {error.strerror}") from error


def write_results(results: Results, folder: Path, *, plots: bool, say: Callable[[str], None]) -> list[Path]:
    """Write all of it into `folder`, which is made; the paths. Raises ConfigError."""
    stem = "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in results.label[:_STEM_CHARS])
    written: list[Path] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for point, fields in results.points:
            path = folder / f"{stem}-{point.label}.json"
            part = path.with_suffix(".part")  # a full disk leaves no half of a result under a result's name
            try:
                part.write_bytes(msgspec.json.format(msgspec.json.encode(fields), indent=2) + b"\n")
                part.replace(path)
            finally:
                part.unlink(missing_ok=True)
            written.append(path)
        drawn = draw(results.points, folder, say) if plots else []
        path = folder / "report.html"
        path.write_text(page(results.label, results.points, drawn), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--result-dir: {folder}: {error.strerror}") from error
    return [*written, *drawn, path]
