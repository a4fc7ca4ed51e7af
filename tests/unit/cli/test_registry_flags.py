"""--registry on every command that has it: bad values are one line and exit 2, and a password is on no command line of a child."""

from pathlib import Path

import pytest

from cli.cluster import router_argv, worker_argv
from cli.commands.registryflags import redis_config
from cli.config import ClusterConfig, environment
from cli.main import run
from cli.ports import keep_port
from registry.config import PASSWORD_VARIABLE, parse_redis_url

TINY = str(Path(__file__).resolve().parents[2] / "fixtures" / "tiny-austen")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            ("--registry", "redis://:hushhush@h:x/0"),
            "--registry: got 'redis://***@h:x/0': must be redis://host:port/db",
        ),
        (("--registry", "h:6379"), "--registry: got 'h:6379': must begin with redis:// or rediss://"),
        (("--registry", ""), "--registry: got '': must begin with redis:// or rediss://"),
        (("--registry", "redis://h", "--registry-password-file", "/no/such"), "--registry-password-file: /no/such"),
        (("--registry-password-file", "/no/such"), "--registry-password-file: needs --registry beside it"),
    ],
)
@pytest.mark.parametrize("command", ["router", "prefill", "decode", "up"])
def test_bad_flags_are_one_line_and_exit_2(command, flags, said, capsys):
    assert run([command, "--model", TINY, *flags]) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"error: {said}")
    assert told.count("\n") == 1
    assert "hushhush" not in told


def test_a_cluster_passes_all_but_the_password_on(monkeypatch):
    url = "redis://me%40x:hushhush@h:7/2"
    redis = redis_config({"registry": url, "registry_password_file": None})
    config = ClusterConfig(model_dir=Path(TINY), model_name="m", redis=redis)
    port = keep_port("127.0.0.1", 0, "--host")
    try:
        for argv in (router_argv(config, port, port), worker_argv(config, "decode", "decode-0", port, "r:1")):
            assert "hushhush" not in " ".join(argv)
            assert "--router" not in argv
            passed = parse_redis_url(argv[argv.index("--registry") + 1])
            assert (passed.host, passed.port, passed.db, passed.username) == ("h", 7, 2, "me@x")
    finally:
        port.release()
    assert redis.address.secrets == {PASSWORD_VARIABLE: "hushhush"}
    assert "hushhush" not in repr(config)
    monkeypatch.setenv(PASSWORD_VARIABLE, "hushhush")
    assert environment()[PASSWORD_VARIABLE] == "***", "diptych doctor shows the environment"


def test_a_token_of_the_hub_is_not_shown(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hushhush")
    monkeypatch.setenv("HF_ENDPOINT", "https://mirror.example")
    assert environment()["HF_TOKEN"] == "***"
    assert environment()["HF_ENDPOINT"] == "https://mirror.example"
