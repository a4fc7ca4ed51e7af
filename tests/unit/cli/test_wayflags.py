"""The flags of the way through the pools: from `up` to its router unchanged, and refused by name where they contradict."""

import click
import pytest

from cli.cluster import router_argv
from cli.commands.wayflags import disaggregation_config
from cli.config import ClusterConfig
from cli.main import main
from cli.ports import keep_port
from router.config import DisaggregationConfig, DisaggregationMode


@pytest.mark.parametrize(
    "config",
    [
        DisaggregationConfig(),
        DisaggregationConfig(DisaggregationMode.NEVER, stall_weight=0.25),
        DisaggregationConfig(above_tokens=512, stall_weight=0.0),
    ],
)
def test_a_local_cluster_s_router_is_told_the_same(tmp_path, config):
    from cli.commands.router import router

    port = keep_port("127.0.0.1", 0, "--http-port")
    try:
        line = router_argv(ClusterConfig(model_dir=tmp_path, model_name="m", disaggregation=config), port, port)
    finally:
        port.release()
    context = router.make_context("router", list(line[line.index("cli") + 2 :]))
    assert disaggregation_config(context.params) == config


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--disaggregate", "never", "--disaggregate-above", "5"], "got 5 with mode never; only auto asks"),
        (["--disaggregate", "sometimes"], "'sometimes' is not one of 'auto', 'always', 'never'"),
        (["--stall-weight", "-1"], "'-1' must be a number from 0 to 1e+06"),
        (["--disaggregate-above", "-1"], "-1 is not in the range x>=0"),
    ],
)
def test_what_cannot_be_meant_is_refused_in_one_line(tmp_path, capsys, monkeypatch, flags, said):
    monkeypatch.setattr("sys.argv", ["diptych", "router", "--model", str(tmp_path), *flags])
    with pytest.raises((SystemExit, click.exceptions.Exit)) as ended:
        main()
    assert (ended.value.code if isinstance(ended.value, SystemExit) else ended.value.exit_code) == 2
    complaint = capsys.readouterr().err
    assert said in complaint
    assert complaint.count("\n") == 1
