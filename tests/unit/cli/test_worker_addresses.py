"""Where a worker's flags say that KV is taken, and under which address others reach it."""

import pytest

from cli.commands.decode import decode
from cli.commands.workerflags import network_config
from kv_transfer.choose import NetworkConfig

TINY = "tests/fixtures/tiny-austen"


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], NetworkConfig("127.0.0.1", 0, None, None)),
        (["--host", "0.0.0.0", "--advertise", "node-1"], NetworkConfig("0.0.0.0", 0, "node-1", None)),
        (["--advertise", "node-1:9", "--kv-port", "7"], NetworkConfig("127.0.0.1", 7, "node-1", None)),
        (["--advertise", "[::1]:9"], NetworkConfig("127.0.0.1", 0, "::1", None)),
        (["--advertise", "::1"], NetworkConfig("127.0.0.1", 0, "::1", None)),
        (["--advertise", "a", "--advertise-kv", "b"], NetworkConfig("127.0.0.1", 0, "b", None)),
        (["--advertise", "a:9", "--advertise-kv", "b:8"], NetworkConfig("127.0.0.1", 0, "b", 8)),
        (["--kv-port", "7", "--advertise-kv", "[fe80::1]:8"], NetworkConfig("127.0.0.1", 7, "fe80::1", 8)),
    ],
)
def test_where_kv_is_taken(flags, expected):
    context = decode.make_context("decode", ["--model", TINY, *flags])
    assert network_config(context.params) == expected
