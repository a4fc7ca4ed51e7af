"""Every op in one table: who calls it, its slow truth, its implementations, its test, and how near to the limit it was measured.

`tools/gen_kernels.py` writes it into kernels/README.md, and a test holds that page, and every name here, to what there is.
Shares come from bench/results/kernels.json, as `python -m bench kernels` leaves it there. Imports no torch.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results" / "kernels.json"


@dataclass(frozen=True, slots=True)
class Row:
    """One op. Places are `file` or `file:name`, relative to kernels/ (callers and tests: to the root); "" where there is none.

    `measured` names the op in kernels.json.
    """

    op: str
    caller: str
    reference: str
    cpu: str
    triton: str
    test: str
    measured: tuple[str, ...] = ()


ROWS = (
    Row(
        "linear",
        "kernels/stack.py:Layer",
        "reference.py:ReferenceLinear",
        "cpu/src/linear.h",
        "triton/linear.py:TorchLinear",
        "tests/contract/test_kernels.py",
        ("linear",),
    ),
    Row(
        "embedding",
        "kernels/stack.py:Stack",
        "reference.py:ReferenceEmbedding",
        "cpu/src/linear.h",
        "triton/linear.py:TorchEmbedding",
        "tests/contract/test_kernels.py",
    ),
    Row(
        "linear, int8 and int4",
        "kernels/stack.py:Layer",
        "quantised.py:QuantisedLinear",
        "cpu/src/quantised.h",
        "",
        "tests/unit/kernels/test_quantised.py",
        ("quantised",),
    ),
    Row(
        "paged attention",
        "kernels/one_by_one.py:OneByOne",
        "reference.py:ReferenceAttention",
        "cpu/src/attention.h",
        "triton/cache.py:TritonAttention",
        "tests/contract/test_kernels.py",
        ("attention",),
    ),
    Row(
        "RMS norm",
        "kernels/one_by_one.py:OneByOne",
        "reference.py:rms_norm",
        "cpu/src/small.h",
        "triton/small.py:rms_norm",
        "tests/contract/test_kernels.py",
    ),
    Row(
        "rotation, KV write",
        "kernels/one_by_one.py:OneByOne",
        "reference.py:rotary",
        "cpu/src/attention_write.h",
        "triton/kv_write.py:rotate_write",
        "tests/gpu/test_attention.py",
    ),
    Row(
        "SiLU·mul",
        "kernels/one_by_one.py:OneByOne",
        "reference.py:silu_mul",
        "cpu/src/small.h",
        "triton/small.py:silu_mul",
        "tests/contract/test_kernels.py",
    ),
    Row(
        "all layers of a step",
        "engine/models/decoder.py:Decoder",
        "one_by_one.py:OneByOne",
        "cpu/src/layers.h",
        "triton/forward.py:TritonForward",
        "tests/unit/kernels/test_bits.py",
        ("step",),
    ),
    Row(
        "sampling",
        "engine/sampling/sampler.py:Sampler",
        "../engine/sampling/choice.py:choose",
        "cpu/src/sampling.h",
        "triton/choosing.py:choose_tokens",
        "tests/gpu/test_sampling.py",
        ("sampling",),
    ),
    Row(
        "KV pack, unpack",
        "worker/packed_memory.py:PackedMemory",
        "packing.py:pack",
        "cpu/src/packing.h",
        "triton/pack.py:pack",
        "tests/unit/kernels/test_packing.py",
    ),
)


def shares(results: Path = RESULTS) -> dict[str, dict[str, float]]:
    """op → what was measured → its share of the limit, 1 being all that the machine has; empty before any measuring."""
    if not results.exists():
        return {}
    found: dict[str, dict[str, float]] = {}
    for measure in json.loads(results.read_text(encoding="utf-8"))["report"]["measures"]:
        if measure["unit"] == "of the limit":
            op, _, what = measure["name"].partition(": ")
            found.setdefault(op, {})[what] = statistics.median(measure["runs"])
    return found


def rendered(results: Path = RESULTS) -> str:
    """The table in Markdown."""
    measured = shares(results)
    lines = [
        "| op | called by | reference | CPU | Triton | test | share of the limit |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in ROWS:
        places = (row.caller, row.reference, row.cpu, row.triton, row.test)
        of = [f"{what} {share:.0%}" for op in row.measured for what, share in measured.get(op, {}).items()]
        cells = [row.op, *(f"`{place}`" if place else "–" for place in places), ", ".join(of) or "–"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
