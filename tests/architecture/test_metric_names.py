"""Each metric is named once, with bounded labels, and docs/metrics.md has all of them."""

import ast
import runpy
import sys

from tree import ROOT, name, parsed, sources

from contracts.errors import ErrorCode
from contracts.request import FinishReason
from contracts.worker import WorkerKind, WorkerState
from kv_transfer.handoff import SourceEvent, TargetEvent, TargetState
from observability import labels as has
from observability.metric import Kind
from observability.names import ALL
from router.choosing.route import Reason, Route
from router.workers.canary import Outcome

NAMES = ROOT / "observability" / "names.py"
BASES = tuple({metric.name.removesuffix("_total") for metric in ALL})
TOTALS = {"vllm:iteration_tokens_total"}  # vLLM's histogram


def test_each_is_there_once_with_an_ending_for_its_kind():
    names = [metric.name for metric in ALL]
    assert len(names) == len(set(names))
    for metric in ALL:
        assert (metric.kind is Kind.COUNTER) == metric.name.endswith("_total") or metric.name in TOTALS, metric.name
        assert metric.what and not metric.what.endswith("."), metric.name


def test_what_bounds_each_label_is_said():
    for label in {label for metric in ALL for label in metric.bounds}:
        assert bool(label.values) != bool(label.why), label
        assert len(set(label.values)) == len(label.values), label
    open_labels = {label.name for metric in ALL for label in metric.bounds if label.why}
    # Each of them is known to be bounded: one more is a decision.
    one_each = {"model_name", "block_size", "num_gpu_blocks", "cache_dtype"}
    assert open_labels == {"worker_id", "method", "policy", *one_each}


def test_closed_labels_have_what_is_counted_under_them():
    """The words are those of enums that this package may not see."""

    def values(*enums):
        return {member.value for enum in enums for member in enum}

    assert set(has.ERROR_CODES) == values(ErrorCode)
    assert set(has.FINISHED_REASON.values) == values(FinishReason)
    assert set(has.WORKER_STATE.values) == values(WorkerState)
    assert set(has.POOLS) == values(WorkerKind)
    assert {*has.PATH.values} == values(Route)
    assert set(has.DECISION_REASON.values) == values(Reason)
    assert set(has.CANARY_OUTCOME.values) == values(Outcome)
    assert set(has.ENDINGS) <= values(SourceEvent)
    assert set(has.LOSSES) <= values(TargetEvent)
    assert set(has.LEASE_STATES) <= values(TargetState)


def test_no_other_file_names_one():
    for path in sources():
        said = [n.value for n in ast.walk(parsed(path)) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
        named = [s for s in said if s.startswith(BASES) and "\n" not in s]
        assert not named or path == NAMES, f"{name(path)}: {named}: take it from observability.names"


def test_the_page_has_all(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    page = runpy.run_path(str(ROOT / "tools" / "gen_metrics.py"))
    assert page["PAGE"].read_text(encoding="utf-8") == page["render"](), "run python tools/gen_metrics.py"
