"""One page of a comparison that needs nothing beside it: the table, the plots inside, light and dark.

Does not know how anything was measured.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment

from bench.compare.numbers import EVEN, QUANTITIES, Comparison
from bench.compare.report import shown
from bench.report import Record

_TEMPLATE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ report.title }}</title>
<style>
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 80rem; margin: 2rem auto; padding: 0 1rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; margin: 1rem 0; }
th, td { padding: .25rem .75rem; border-bottom: 1px solid #8886; text-align: right; white-space: nowrap; }
th:first-child, td:first-child, td:nth-child(2) { text-align: left; }
tr.first td { border-top: 2px solid #8888; }
.best { font-weight: 700; background: #2a83; }
img { max-width: 100%; background: #fff; }
</style></head><body>
<h1>{{ report.title }}</h1>
<p>{{ report.method }}</p>
<p>Marked is what is best by more than {{ even }}.</p>
<div class="wide"><table><tr><th>prompts</th><th>system</th>
{%- for q in quantities %}<th>{{ q.title }}<br>{{ q.unit }}</th>{% endfor %}</tr>
{%- for label, rows in cells %}{% for system, values in rows %}
<tr{% if loop.first %} class="first"{% endif %}><td>{{ label if loop.first else "" }}</td><td>{{ system }}</td>
{%- for text, best in values %}<td{% if best %} class="best"{% endif %}>{{ text }}</td>{% endfor %}</tr>
{%- endfor %}{% endfor %}</table></div>
<ul>{% for note in report.notes %}<li>{{ note }}</li>{% endfor %}</ul>
{%- for name, picture in pictures %}
<p><img alt="{{ name }}" src="data:image/png;base64,{{ picture }}"></p>
{%- endfor %}
<p>{{ machine.date }}, {{ machine.cpu }}, {{ machine.cores }} cores</p>
</body></html>
"""


def page(comparison: Comparison, record: Record, pictures: Sequence[Path]) -> str:
    """HTML; the pictures are read and put inside. Whatever is in names is escaped."""
    cells = []
    for cell in comparison.cells:
        winners = {quantity.key: comparison.winner(cell, quantity) for quantity in QUANTITIES}
        rows = [
            (system, [(shown(comparison.median(cell, system, q)), winners[q.key] == system) for q in QUANTITIES])
            for system in comparison.systems
        ]
        cells.append((cell.label, rows))
    return (
        Environment(autoescape=True)
        .from_string(_TEMPLATE)
        .render(
            report=record.report,
            machine=record.machine,
            even=f"{EVEN - 1:.0%}",
            quantities=QUANTITIES,
            cells=cells,
            pictures=[(path.name, base64.b64encode(path.read_bytes()).decode()) for path in pictures],
        )
    )
