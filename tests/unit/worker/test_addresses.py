"""Where others reach a worker's KV connector when nobody said so."""

import pytest

from kv_transfer.choose import NetworkConfig
from worker.process import reached_with


@pytest.mark.parametrize(
    ("network", "host"),
    [
        (NetworkConfig("0.0.0.0", 7), "10.0.0.5"),  # 0.0.0.0 would lead a prefill worker to its own connector
        (NetworkConfig("::", 7), "10.0.0.5"),
        (NetworkConfig("127.0.0.1", 7), None),
        (NetworkConfig("10.0.0.9", 7), None),
        (NetworkConfig("0.0.0.0", 7, "proxy", 9), "proxy"),
    ],
)
def test_kv_is_reached_where_calls_are_unless_something_else_is_said(network, host):
    assert reached_with("10.0.0.5:50052", network).advertise_host == host


def test_an_ipv6_host_has_no_brackets():
    assert reached_with("[fe80::1]:50052", NetworkConfig("::")).advertise_host == "fe80::1"
