"""docs/metrics.md from observability/names.py: every metric of every process. `--check` only says whether it is up to date."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "metrics.md"
sys.path.insert(0, str(ROOT))

from observability.labels import Label  # noqa: E402 - found by the line before
from observability.metric import At, Metric  # noqa: E402
from observability.names import ALL  # noqa: E402

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
its client saw. Both spans end when a token is written to its client's connection:

To the first token:

* `receive`: until the request is here and understood. Over HTTP from when the kernel got it, which it says in ticks of its
  timer (of 1 to 4 ms; less than 8 ms count as nothing); over gRPC from when the router heard of it
* `admission`: waiting to be let in
* `tokenise`: from text to tokens
* `route`: choosing workers and setting off
* `retry`: attempts that failed before one made the first token
* `prefill_queue`: at the worker, from its door until the first chunk begins
* `prefill_compute`: from there until the first token is made
* `notify`: what the router waited beyond these two. The way to the worker and back, with whatever is late on it: a
  connection that is made, a network, a busy event loop of either process
* `emit`: from hearing the token until it is written to the client, who may read slowly
* `ttft_unexplained`: what is left, which workers did not tell

From there to the second:

* `transfer`: KV on its way after the prompt was computed, as far as the client felt it. What went by before it had the first
  token is in no gap; that goes for the next three as well
* `commit`: from the last byte until the decode worker gives the request to its engine
* `decode_queue`: until the step that makes the second token begins
* `first_step`: that step
* `relay`: by how much longer the second token's way to the router was than the first's, and writing it to the client
* `recover`: all of it, where another attempt had to make the second token
* `gap_unexplained`: what is left, which workers did not tell

A stage that did not happen is not counted, and none is below zero. Where workers say that they took more than there
was, it is in `ttft_overexplained` or `gap_overexplained`: a sum that can fall is no counter. `exposed` is of a
hand-off's bytes, not of a request: what of the transfer came after the last chunk was computed; a decision's regret is
what the way taken did cost above what the other was predicted to. One request's own stages are in its response
(`"diptych": {"stages": true}`, each as `NAME_s`), and in the gRPC trailer `diptych-stages`
([ADR 0033](adr/0033-stages-that-add-up.md)).

**vLLM's names** mean what they mean there. `engine` is `"0"` at a router, which counts users' requests once, and
`"prefill"` or `"decode"` at workers, which count what passed their engine: a request that was handed off is in both, so
put `engine="0"` into queries that mean users. What users wait for (TTFT, ITL, TPOT, E2E) is exported by the router alone:
a worker's part of it, summed with the whole, would make percentiles of neither. The `nixl_*` names have the transfers of
whichever connector is used, at the worker that pushes (none where the decode worker had all blocks already);
`nixl_num_kv_expired_reqs_total` is at the decode worker, whose lease it is. `kv_block_*` has every block, not one in a
hundred.

What vLLM has and this has not, because there is nothing that it could say:

| name | why not |
|---|---|
| `vllm:lora_requests_info` | no LoRA adapters are served |
| `vllm:engine_sleep_state` | an engine never sleeps; whether it works: `diptych_workers{state}`, `diptych_engine_stalled_seconds` |
| `vllm:nixl_post_time_seconds` | a connector's write is one call; nothing is posted before it runs |
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
    has: dict[str, dict[Label, list[str]]] = {}
    for metric in ALL:
        for label in metric.bounds:
            has.setdefault(label.name, {}).setdefault(label, []).append(metric.name)
    rows = ["\n## Labels\n", "No label has values without a bound.\n", "| label | of | values |", "|---|---|---|"]
    for name, bounds in has.items():
        for label, metrics in bounds.items():
            whose = "all that have it" if len(bounds) == 1 else ", ".join(f"`{metric}`" for metric in metrics)
            shown = label.why or ", ".join(f"`{value}`" for value in label.values)
            rows.append(f"| `{name}` | {whose} | {shown} |")
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
