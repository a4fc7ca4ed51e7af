"""What the chart's containers run is what our commands take: each flag is there, and together they mean what was meant."""

import signal
import socket
import subprocess
import time
from pathlib import Path

import click
import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from cli.commands.router import RouterFlags, router_config
from cli.commands.workerflags import WorkerFlags, worker_config
from cli.main import ROOT
from contracts.worker import WorkerKind
from tests.deploy.mounts import PASSWORD, write_mounts
from tests.deploy.render import Rendered
from tests.deploy.values_sets import SETS, all_rendered
from tests.redis_process import require_redis_server

MODEL = Path(__file__).resolve().parents[1] / "fixtures" / "tiny-austen"
POOLS = {"prefill": WorkerKind.PREFILL, "decode": WorkerKind.DECODE}


@pytest.fixture(scope="module")
def mounts(tmp_path_factory):
    """A folder with what pods have in /etc/diptych."""
    return write_mounts(tmp_path_factory.mktemp("etc"))


def parsed(said: list[str], mounts: Path) -> click.Context:
    """What the command's own parser makes of a container's words; kubelet's part is done here."""
    inside = {
        "/etc/diptych": str(mounts),
        "/model/current": str(MODEL),
        "/models/llama": str(MODEL),
        "/opt/llama": str(MODEL),
        "$(POD_NAME)": "demo-diptych-decode-7d4f-x2x9k",
        "$(POD_IP)": "10.1.2.3",
    }
    words = said
    for there, here in inside.items():
        words = [word.replace(there, here) for word in words]
    assert not [word for word in words if "$(" in word]
    command, context = ROOT, click.Context(ROOT)
    while isinstance(command, click.Group):
        name, command, words = command.resolve_command(context, words)
    return command.make_context(name, list(words))


def words(rendered: Rendered, part: str) -> list[str]:
    (container,) = rendered.one("Deployment", part)["spec"]["template"]["spec"]["containers"]
    assert container["command"] == ["diptych", part]
    return [part, *container["args"]]


@pytest.mark.parametrize("name", SETS)
def test_processes_take_their_flags(name, mounts):
    one = all_rendered()[name]
    given: RouterFlags = parsed(words(one, "router"), mounts).params
    router = router_config(given)
    assert (router.http.host, router.http.port, router.grpc.port) == (SETS[name].get("listen", "0.0.0.0"), 8000, 50051)
    assert router.access.workers is not None and router.access.workers.port == 50054
    assert (router.redis is None) == (
        not SETS[name].get("redis", {"enabled": True}).get("enabled", True) and name != "external Redis"
    )
    for part, kind in POOLS.items():
        flags: WorkerFlags = parsed(words(one, part), mounts).params
        worker = worker_config(flags, kind)
        assert worker.worker_id == "demo-diptych-decode-7d4f-x2x9k"
        assert (worker.server.port, worker.metrics_port, worker.network.port) == (50052, 9100, 50053)
        assert worker.server.advertise == "10.1.2.3" and worker.connectors == ("tcp",)
        assert (worker.secret is None) == (name == "a model that is there")
        assert worker.redis == router.redis
        gpu = SETS[name].get(part, {}).get("gpu", {}).get("count", 0)
        assert flags["device"] == ("cuda" if gpu else "auto")
        assert worker.model_name == router.model_name == SETS[name].get("model", {}).get("servedName", MODEL.name)
        assert (worker.server.tls is not None) == name.startswith("TLS")
        if worker.server.tls is not None:
            assert worker.server.tls.client_ca is not None and worker.server.tls.server_name == "diptych.internal"
    if name == "external Redis":
        assert router.redis is not None and str(router.redis.address) == "rediss://redis.data:6380/3"
        assert router.redis.address.password == PASSWORD and router.redis.address.ca_file is not None


def test_what_both_pools_have_comes_before_what_one_has(mounts):
    one = all_rendered()["unlike nodes, a quantised model and a GPU that is filled"]
    prefill, decode = (parsed(words(one, part), mounts).params for part in ("prefill", "decode"))
    assert prefill["quantization"] == decode["quantization"] == "int8"
    assert (prefill["max_model_len"], decode["max_model_len"]) == (512, 256)
    assert (prefill["kv_memory"], decode["kv_memory"]) == (2**30, None)  # of a GPU: what it has left
    assert (decode["gpu_memory_utilisation"], decode["kv_staging"]) == (0.8, 2 * 2**30)
    named = [
        {
            e["name"]: e["value"]
            for e in one.one("Deployment", part)["spec"]["template"]["spec"]["containers"][0]["env"]
            if "value" in e
        }
        for part in ("prefill", "decode")
    ]
    common = {"HOME": "/tmp", "DIPTYCH_KERNELS": "avx2"}
    assert named == [{**common, "OMP_PROC_BIND": "true"}, common]


@pytest.mark.parametrize("name", SETS)
def test_what_runs_beside_them_takes_its_flags(name, mounts):
    """Probes and the fetching of models."""
    for deployment in all_rendered()[name].of("Deployment"):
        spec = deployment["spec"]["template"]["spec"]
        for container in spec.get("initContainers", ()):
            model = SETS[name].get("model", {}).get("name", "smollm2-135m-instruct")
            given = parsed([*container["command"][1:], *container["args"]], mounts).params
            assert given == {"name": model, "cache_dir": Path("/models"), "link": MODEL}
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            asked = spec["containers"][0][probe].get("exec", {}).get("command", [""])
            if asked[0] == "diptych":
                assert parsed(asked[1:], mounts).params["target"] == "127.0.0.1:50052"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def test_redis_starts_as_the_chart_says_and_asks_for_the_password(mounts):
    require_redis_server()
    (container,) = all_rendered()["defaults"].one("Deployment", "redis")["spec"]["template"]["spec"]["containers"]
    port = free_port()
    (script,) = container["args"]
    script = script.replace("/etc/diptych", str(mounts)).replace(
        "requirepass", f"port {port}\nbind 127.0.0.1\nrequirepass"
    )
    process = subprocess.Popen([*container["command"], script], stdout=subprocess.DEVNULL)
    try:
        once = Retry(NoBackoff(), 0)
        known = redis.Redis(port=port, password=PASSWORD, retry=once)
        with known, redis.Redis(port=port, retry=once) as stranger:
            until = time.monotonic() + 20
            while True:
                try:
                    known.ping()
                    break
                except redis.ConnectionError:
                    assert process.poll() is None and time.monotonic() < until
                    time.sleep(0.01)
            assert known.config_get("save", "appendonly", "maxmemory", "maxmemory-policy") == {
                "save": "",
                "appendonly": "no",
                "maxmemory": str(128 * 2**20),
                "maxmemory-policy": "noeviction",
            }
            with pytest.raises(redis.AuthenticationError):
                stranger.ping()
            assert PASSWORD not in Path(f"/proc/{process.pid}/cmdline").read_text()
            probe = container["livenessProbe"]["exec"]["command"]
            asked = probe[2].replace("/etc/diptych", str(mounts)).replace("redis-cli", f"redis-cli -p {port}")
            assert subprocess.run([*probe[:2], asked], timeout=20).returncode == 0
            wrong = asked.replace(str(mounts / "redis"), str(mounts / "cluster")).replace("password", "secret")
            assert subprocess.run([*probe[:2], wrong], stderr=subprocess.DEVNULL, timeout=20).returncode != 0
    finally:
        process.send_signal(signal.SIGTERM)  # the shell has become the server
        assert process.wait(20) == 0
