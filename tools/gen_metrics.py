"""docs/metrics.md from observability/names.py: every metric of every process. `--check` only says whether it is up to date."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "metrics.md"
sys.path.insert(0, str(ROOT))

from observability.names import ALL, LABELS, At, Metric  # noqa: E402 - found by the line before

WHERE = {
    At.ROUTER: "router",
    At.WORKERS: "workers",
    At.PREFILL: "prefill workers",
    At.DECODE: "decode workers",
    At.ALL: "all",
}
HEAD = """# Metrics

<!-- Written by tools/gen_metrics.py from observability/names.py: change that. -->

Every metric of every process. A router serves them at `/metrics` of its HTTP port, a worker at its `--metrics-port`;
`diptych up` says where those of its processes are. What to do with them: [Monitoring](monitoring.md). A histogram has
`_bucket`, `_sum` and `_count`; take `rate()` of these, never a quotient of sums since the start.

**Where time goes.** `diptych_stage_seconds{stage}` has the stages of each request that succeeded, whose sum is what
its client saw:

* time to the first token = `receive` (its bytes coming) + `admission` + `tokenise` + `route` + `retry` (attempts that
  failed before) + `prefill_queue` + `prefill_compute` + `notify` (the way to the worker and back) + `emit` +
  `ttft_unexplained`
* gap to the second token = `transfer` (after the prompt was computed) + `commit` + `decode_queue` + `first_step` +
  `relay` (by how much longer the second token's way was than the first's) + `recover` (all of it, where another
  attempt had to make the second token) + `gap_unexplained`

A stage that did not happen is not counted. What is below zero is counted by its size under another name, because a
sum that can fall is no counter: `relay_ahead`, and `ttft_overexplained` and `gap_overexplained` where stages say more
than was measured. One request's own stages are in its response (`"diptych": {"stages": true}`), and in the gRPC
trailer `diptych-stages` ([ADR 0033](adr/0033-stages-that-add-up.md)).

**vLLM's names** mean what they mean there. `engine` is `"0"` at a router, which counts users' requests once, and
`"prefill"` or `"decode"` at workers, which count what passed their engine: a request that was handed off is in both.
The `nixl_*` names have the transfers of whichever connector is used. What vLLM has and this has not: LoRA, engines
that sleep, and the lives of single blocks (`kv_block_*`).
"""


def table(title: str, metrics: list[Metric]) -> str:
    """One section."""
    rows = [f"\n## {title}\n", "| metric | kind | where | labels | what |", "|---|---|---|---|---|"]
    for metric in metrics:
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        rows.append(f"| `{metric.name}` | {metric.kind.value} | {WHERE[metric.at]} | {labels} | {metric.what} |")
    return "\n".join(rows) + "\n"


def labels() -> str:
    """What bounds each."""
    rows = ["\n## Labels\n", "No label has values without a bound.\n", "| label | values |", "|---|---|"]
    for label, values in LABELS.items():
        shown = values if isinstance(values, str) else ", ".join(f"`{value}`" for value in values)
        rows.append(f"| `{label}` | {shown} |")
    return "\n".join(rows) + "\n"


def render() -> str:
    """The page."""
    ours = [metric for metric in ALL if metric.name.startswith("diptych_")]
    sections = (
        ("At the router", [metric for metric in ours if metric.at in (At.ROUTER, At.ALL)]),
        ("At workers", [metric for metric in ours if metric.at not in (At.ROUTER, At.ALL)]),
        ("vLLM's names", [metric for metric in ALL if metric.name.startswith("vllm:")]),
        ("Of the process", [metric for metric in ALL if not metric.name.startswith(("diptych_", "vllm:"))]),
    )
    return HEAD + "".join(table(*section) for section in sections) + labels()


if __name__ == "__main__":
    if "--check" in sys.argv[1:]:
        sys.exit(
            0 if PAGE.read_text(encoding="utf-8") == render() else "docs/metrics.md: run python tools/gen_metrics.py"
        )
    PAGE.write_text(render(), encoding="utf-8")
