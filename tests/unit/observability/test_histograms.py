"""What is counted is what prometheus_client's own histogram would show, under every name."""

from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from observability.histograms import CountedHistogram, HistogramName

BOUNDS = (0.01, 0.05, 1, 40)


def shown(registry: CollectorRegistry, prefix: str) -> dict[tuple[str, str], float]:
    return {
        (sample.name.removeprefix(prefix), sample.labels.get("le", "")): sample.value
        for family in text_string_to_metric_families(generate_latest(registry).decode())
        for sample in family.samples
        if sample.name.startswith(prefix) and not sample.name.endswith("_created")
    }


@settings(deadline=None, max_examples=50)
@given(
    st.lists(
        st.tuples(st.sampled_from((0.0, 0.005, 0.01, 0.03, 0.05, 0.5, 1, 39.0, 100.0)), st.sampled_from((1, 2, 4)))
    )
)
def test_as_the_librarys_own(seen):
    registry = CollectorRegistry()
    names = (
        HistogramName("a_seconds", "A", {"model": "m"}),
        HistogramName("b:seconds", "B", {"model": "m", "engine": "0"}),
    )
    counts = CountedHistogram(registry, BOUNDS, names).series()
    theirs_registry = CollectorRegistry()
    theirs = Histogram("a_seconds", "A", ("model",), registry=theirs_registry, buckets=BOUNDS).labels("m")
    for gap, tokens in seen:
        counts.observe(gap * tokens, tokens)
        for _ in range(tokens):
            theirs.observe(gap)
    ours, expected = shown(registry, "a_seconds"), shown(theirs_registry, "a_seconds")
    assert abs(ours.pop(("_sum", "")) - expected.pop(("_sum", ""))) < 1e-6
    assert ours == expected
    other = shown(registry, "b:seconds")
    del other[("_sum", "")]
    assert other == ours


def test_each_value_of_a_label_has_a_series_of_its_own_once_it_is_asked_for():
    registry = CollectorRegistry()
    histogram = CountedHistogram(registry, BOUNDS, (HistogramName("a_seconds", "A", {"model": "m"}),), "stage")
    assert shown(registry, "a_seconds") == {}
    histogram.series("one").observe(0.02)
    histogram.series("one").observe(1.0)
    histogram.series("two")
    labels = {"model": "m", "stage": "one"}
    assert registry.get_sample_value("a_seconds_bucket", {**labels, "le": "1.0"}) == 2
    assert registry.get_sample_value("a_seconds_sum", labels) == 1.02
    assert registry.get_sample_value("a_seconds_count", {"model": "m", "stage": "two"}) == 0
