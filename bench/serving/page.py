"""One page of a sweep that needs nothing beside it: tables, the plots inside, light and dark.

Does not know how anything was measured.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment

from bench.machine import machine_facts
from bench.serving.measures import METRICS, JsonObject
from bench.serving.serve import Point

_TEMPLATE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ label }} under load</title>
<style>
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; margin: 1rem 0; }
th, td { padding: .25rem .75rem; border-bottom: 1px solid #8886; text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
img { max-width: 100%; background: #fff; }
.failed { color: #c22; }
</style></head><body>
<h1>{{ label }} under load</h1>
<p>{{ head }}</p>
<p>Latencies count from the time at which a request should have been sent; ITL is between events that brought tokens.</p>
<h2>Throughput</h2>
<div class="wide"><table><tr><th>load</th><th>answered</th><th>failed</th><th>seconds</th>
{%- for title in rates.values() %}<th>{{ title }}</th>{% endfor %}</tr>
{%- for name, fields in points %}
<tr><td>{{ name }}</td><td>{{ fields.completed }}</td><td{% if fields.failed %} class="failed"{% endif %}>{{ fields.failed }}</td>
<td>{{ shown(fields.duration) }}</td>
{%- for rate in rates %}<td>{{ shown(fields[rate]) }}</td>{% endfor %}</tr>
{%- endfor %}</table></div>
{%- for metric in metrics %}
<h2>{{ metric|upper }}, ms</h2>
<div class="wide"><table><tr><th>load</th>{% for name in statistics %}<th>{{ name }}</th>{% endfor %}</tr>
{%- for label, fields in points %}
<tr><td>{{ label }}</td>{% for name in statistics %}<td>{{ shown(fields[name ~ "_" ~ metric ~ "_ms"]) }}</td>{% endfor %}</tr>
{%- endfor %}</table></div>
{%- endfor %}
{%- for name, picture in pictures %}
<p><img alt="{{ name }}" src="data:image/png;base64,{{ picture }}"></p>
{%- endfor %}
</body></html>
"""
_RATES = {
    "request_throughput": "requests/s",
    "request_goodput": "goodput, requests/s",
    "output_throughput": "output tokens/s",
    "total_token_throughput": "tokens/s",
}


def page(label: str, points: Sequence[tuple[Point, JsonObject]], pictures: Sequence[Path]) -> str:
    """HTML; the pictures are read and put inside. Whatever is in names and labels is escaped."""
    first = points[0][1]
    machine = machine_facts()
    names = [name.removesuffix("_ttft_ms") for name in first if name.endswith("_ttft_ms")]
    return (
        Environment(autoescape=True)
        .from_string(_TEMPLATE)
        .render(
            label=label,
            head=f"{first['model_id']}, {first['backend']}, {first['dataset_name']}; {machine.date}; client on {machine.cpu}, "
            f"{machine.cores} cores",
            points=[(point.label, fields) for point, fields in points],
            rates=_RATES,
            metrics=METRICS,
            statistics=names,
            pictures=[(path.name, base64.b64encode(path.read_bytes()).decode()) for path in pictures],
            shown=_shown,
        )
    )


def _shown(value: object) -> str:
    if not isinstance(value, int | float):
        return "–" if value is None else str(value)
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.2f}"
