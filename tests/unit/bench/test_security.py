"""The benchmark of keys and TLS runs and compares what it says; the numbers are the machine's."""

from bench.security import SecurityBenchConfig, run_security


def test_a_small_run_measures_both_ways():
    config = SecurityBenchConfig(rounds=1, checks=10, events=200, connections=3, calls=3)
    report = run_security(config, lambda _: None)
    names = [measure.name for measure in report.measures]
    assert len(names) == len(set(names)) == 10
    for kind in ("event", "connection", "gRPC call", "gRPC connect and first call"):
        assert [name for name in names if name.startswith(f"{kind} ")] != []
    assert all(len(measure.runs) == 1 and measure.runs[0] > 0 for measure in report.measures)
