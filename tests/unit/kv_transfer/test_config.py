"""Settings that cannot work are refused by name."""

import dataclasses
import os

import pytest

from contracts.errors import ConfigError
from kv_transfer.config import ReceiverConfig, SenderConfig, find_dead_peers_ourselves


@pytest.mark.parametrize(
    ("config", "name"),
    [(kind, field.name) for kind in (SenderConfig, ReceiverConfig) for field in dataclasses.fields(kind)],
)
@pytest.mark.parametrize("value", [0, -1, float("nan")])
def test_each_must_be_above_zero(config, name, value):
    with pytest.raises(ConfigError, match=name):
        config(**{name: value})


def test_backoff_has_a_sane_order():
    with pytest.raises(ConfigError, match="max_backoff_s"):
        SenderConfig(reserve_backoff_s=1.0, max_backoff_s=0.5)


def test_ucx_is_left_to_the_user_where_he_said_something(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_KEEPALIVE_INTERVAL", "7s")
    find_dead_peers_ourselves()
    assert os.environ["UCX_KEEPALIVE_INTERVAL"] == "7s"  # noqa: TID251
    monkeypatch.delenv("UCX_KEEPALIVE_INTERVAL")
    find_dead_peers_ourselves()
    assert os.environ["UCX_KEEPALIVE_INTERVAL"] == "inf"  # noqa: TID251
