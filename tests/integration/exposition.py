"""Reads what a process exports and says what is wrong with it: series that nobody declared, that are missing, that have labels
or values which they may not have.
"""

import re
from collections.abc import Collection, Mapping

from prometheus_client.parser import text_string_to_metric_families

from observability.labels import ENGINE, MODEL
from observability.metric import At, Kind, Metric
from observability.names import ALL

# Without a series until something has happened; all others are there from the start.
LATE = {
    metric.name
    for metric in ALL
    if not all(label.whole and metric.kind is Kind.COUNTER for label in metric.bounds if label not in (MODEL, ENGINE))
}
ONE_EACH = ("block_size", "num_gpu_blocks", "cache_dtype")  # label values of which a process has one
_OF = {
    "router": {At.ALL, At.ROUTER},
    "prefill": {At.ALL, At.WORKERS, At.PREFILL},
    "decode": {At.ALL, At.WORKERS, At.DECODE},
}


class Scrape:
    """One answer of `/metrics`."""

    def __init__(self, text: str) -> None:
        self.families = list(text_string_to_metric_families(text))
        self._samples = [sample for family in self.families for sample in family.samples]

    def ones(self) -> dict[str, set[str]]:
        """The values of labels of which a process has one each, as `known` wants them: of the first series that has them."""
        for sample in self._samples:
            if ONE_EACH[0] in sample.labels:
                return {label: {sample.labels[label]} for label in ONE_EACH}
        return {}

    def total(self, name: str, **labels: str) -> float:
        """The sum of the series of this name that have these labels; KeyError where there is none."""
        found = [s.value for s in self._samples if s.name == name and labels.items() <= s.labels.items()]
        if not found:
            raise KeyError(name, labels)
        return sum(found)

    def by(self, name: str, *labels: str) -> dict[tuple[str, ...], float]:
        """The series of this name that are not 0, by the values of these labels."""
        out: dict[tuple[str, ...], float] = {}
        for sample in self._samples:
            if sample.name == name and sample.value:
                key = tuple(sample.labels[label] for label in labels)
                out[key] = out.get(key, 0.0) + sample.value
        return out


def declared(pool: str) -> dict[str, Metric]:
    """What a process of this pool is to export, by the name of its family."""
    mine = [metric for metric in ALL if metric.at in _OF[pool]]
    return {m.name.removesuffix("_total") if m.kind is Kind.COUNTER else m.name: m for m in mine}


def faults(scrape: Scrape, pool: str, known: Mapping[str, Collection[str]], *, whole: bool = True) -> list[str]:
    """What is wrong with it. `known` has the values that open labels may have in this cluster. `whole`: nothing is missing."""
    wanted = declared(pool)
    names = [family.name for family in scrape.families]
    wrong = [f"{name}: twice" for name in {name for name in names if names.count(name) > 1}]
    wrong += [f"{name}: missing" for name in wanted.keys() - set(names) if whole]
    for family in scrape.families:
        metric = wanted.get(family.name)
        if metric is None:
            wrong.append(f"{family.name}: not declared for {pool}")
            continue
        if family.type != metric.kind.value:
            wrong.append(f"{family.name}: a {family.type}")
        if family.documentation != metric.what and not family.name.startswith("process_"):
            wrong.append(f"{family.name}: says {family.documentation!r}")
        if not family.samples and metric.name not in LATE and whole:
            wrong.append(f"{family.name}: no series")
        seen = set()
        for sample in family.samples:
            key = (sample.name, *sorted(sample.labels.items()))
            if key in seen:
                wrong.append(f"{key}: twice")
            seen.add(key)
            wrong += _label_faults(metric, sample.name, dict(sample.labels), known)
    return wrong


def _label_faults(metric: Metric, name: str, labels: dict[str, str], known: Mapping[str, Collection[str]]) -> list[str]:
    if metric.kind is Kind.HISTOGRAM and name.endswith("_bucket"):
        bound = labels.pop("le", "")
        if not re.fullmatch(r"\+Inf|[0-9.e+-]+", bound):
            return [f"{name}: le={bound!r}"]
    if set(labels) != set(metric.labels):
        return [f"{name}: labels {sorted(labels)}, declared {sorted(metric.labels)}"]
    return [
        f"{name}: {label.name}={labels[label.name]!r}"
        for label in metric.bounds
        if labels[label.name] not in (label.values or known.get(label.name, ()))
    ]
