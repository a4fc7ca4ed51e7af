"""`diptych up` on the tiny model: it answers, it mends itself, and however it ends it leaves nothing behind."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import grpc
import httpx
import psutil
import pytest

from cli.ports import keep_port
from cli.top.watch import Source, events
from contracts.pb.diptych.v1 import handoff_pb2, prefill_pb2, registry_pb2

ROOT = Path(__file__).resolve().parents[2]
TINY = str(ROOT / "tests" / "fixtures" / "tiny-austen")
START_S = 90.0
STOP_S = 40.0


def until(condition, limit_s, what):
    """Wait for a condition with a deadline; returns what it gave."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.05)
    raise AssertionError(f"not within {limit_s} s: {what}")


class Up:
    """A running `diptych up` and what is known of it from its ready file."""

    def __init__(self, process, ready_file, log):
        self.process = process
        self.ready_file = ready_file
        self.log = log
        self.children = []

    @property
    def facts(self):
        return json.loads(self.ready_file.read_text())

    def wait_ready(self):
        def ready():
            assert self.process.poll() is None, self.log.read_text()
            return self.ready_file.exists()

        until(ready, START_S, "ready file")
        self.children = psutil.Process(self.process.pid).children(recursive=True)

    def pid_of(self, name):
        return {p["name"]: p["pid"] for p in self.facts["processes"]}[name]

    def complete(self, prompt="It is a truth universally", **more):
        body = {"model": self.facts["model"], "prompt": prompt, "max_tokens": 8, "temperature": 0.0, **more}
        with httpx.Client(trust_env=False, timeout=60) as client:
            response = client.post(f"{self.facts['http']}/v1/completions", json=body)
        assert response.status_code == 200, response.text
        return response.json()["choices"][0]["text"]


@contextmanager
def up(tmp_path, *flags, wait=True):
    ready_file, log = tmp_path / "ready.json", tmp_path / "up.log"
    line = [sys.executable, "-m", "cli", "up", "--model", TINY, "--http-port", "0", "--grpc-port", "0"]
    line += ["--threads", "1", "--kv-memory", "16MiB", "--ready-file", str(ready_file), "--drain-timeout", "5", *flags]
    with log.open("w") as stream:
        process = subprocess.Popen(line, stdout=stream, stderr=subprocess.STDOUT, cwd=ROOT, start_new_session=True)
    cluster = Up(process, ready_file, log)
    try:
        if wait:
            cluster.wait_ready()
        yield cluster
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        _, alive = psutil.wait_procs(cluster.children, timeout=STOP_S)
        for child in alive:
            child.kill()


def shm_entries():
    return set(os.listdir("/dev/shm"))


def assert_free(address):
    host, _, port = address.removeprefix("http://").rpartition(":")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, int(port)))
        probe.listen()


def assert_only_the_cluster_may_speak(addresses):
    """A process of this machine that does not know the secret which `up` made may neither hand over nor announce."""
    said = {
        "decode-0": ("Handoff/Reserve", handoff_pb2.ReserveRequest(handoff_id="evil", num_tokens=1)),
        "prefill-0": ("Prefill/Session", prefill_pb2.PrefillCommand()),
        "router": ("Registry/Announce", registry_pb2.AnnounceRequest()),
    }
    for name, (method, message) in said.items():
        with grpc.insecure_channel(addresses[name], options=[("grpc.enable_http_proxy", 0)]) as channel:
            streams = method == "Prefill/Session"
            call = (channel.stream_stream if streams else channel.unary_unary)(f"/diptych.v1.{method}")
            body = message.SerializeToString()
            with pytest.raises(grpc.RpcError) as caught:
                list(call(iter([body]) if streams else body, timeout=20))
            assert "--cluster-secret-file" in caught.value.details(), name


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_answers_and_a_signal_leaves_nothing(tmp_path, number):
    before = shm_entries()
    metrics = keep_port("127.0.0.1", 0, "--x")
    metrics.release()
    with up(tmp_path, "--worker-metrics-ports", "0", str(metrics.port)) as cluster:
        facts = cluster.facts
        exported = httpx.get(f"http://{metrics.local_address}/metrics", trust_env=False).text
        assert 'engine="decode"' in exported, exported
        assert [p["state"] for p in facts["processes"]] == ["ready"] * 3
        assert cluster.complete() == cluster.complete()
        assert len(cluster.children) == 3
        assert_only_the_cluster_may_speak({p["name"]: p["address"] for p in facts["processes"]})
        cluster.process.send_signal(number)
        assert cluster.process.wait(STOP_S) == 0, cluster.log.read_text()
        assert not [child for child in cluster.children if child.is_running()]
        assert not cluster.ready_file.exists()
        for address in (facts["http"], facts["grpc"], *(p["address"] for p in facts["processes"])):
            assert_free(address)
        assert shm_entries() <= before
        shown = cluster.log.read_text()
        for name in ("router", "prefill-0", "decode-0"):
            for state in ("starting", "ready", "stopped"):
                assert re.search(rf"^{name} +{state} ", shown, re.M), shown
        assert "Traceback" not in shown
        warnings = [line for line in shown.splitlines() if "WARNING" in line]
        assert len(warnings) == 3, shown
        assert all("a call was refused" in line and "proves nothing" in line for line in warnings), shown


def test_killed_processes_are_started_again_and_the_answers_go_on(tmp_path):
    """Each in turn, in one cluster: the others serve on, whichever of them were killed before."""
    with up(tmp_path) as cluster:
        text = cluster.complete()
        for name in ("prefill-0", "decode-0", "router"):
            pid = cluster.pid_of(name)
            if name == "router":
                os.kill(pid, signal.SIGKILL)
            else:
                kill_before_the_dashboard(cluster, name, pid)

            def back(name=name, pid=pid):
                now = {p["name"]: p for p in cluster.facts["processes"]}[name]
                return now["state"] == "ready" and now["pid"] != pid

            until(back, START_S, f"{name} is back")
            cluster.children = psutil.Process(cluster.process.pid).children(recursive=True)
            until(lambda: models(cluster), START_S, f"the router serves the model after the death of {name}")
            assert cluster.complete() == text, name
            assert re.search(rf"^{name} .*killed by SIGKILL", cluster.log.read_text(), re.M), name
        cluster.process.terminate()
        assert cluster.process.wait(STOP_S) == 0, cluster.log.read_text()
        assert not [child for child in cluster.children if child.is_running()]


def kill_before_the_dashboard(cluster, name, pid):
    """Whoever watches is told within three seconds that this life of the worker is over."""
    watched = events(Source(cluster.facts["http"]))
    epoch = next(w.epoch for said in watched for w in said.workers if (w.id, w.state) == (name, "ready"))
    os.kill(pid, signal.SIGKILL)
    killed_at = time.monotonic()
    for frame in watched:
        if not any(w.id == name and w.epoch == epoch and w.state == "ready" for w in frame.workers):
            break
    assert time.monotonic() - killed_at < 3, name


def models(cluster):
    with httpx.Client(trust_env=False, timeout=5) as client:
        try:
            return client.get(f"{cluster.facts['http']}/v1/models").json()["data"]
        except httpx.TransportError:
            return []


def test_a_worker_that_dies_again_and_again_ends_the_cluster_loudly(tmp_path):
    with up(tmp_path) as cluster:

        def ended():
            for child in psutil.Process(cluster.process.pid).children():
                with suppress(psutil.NoSuchProcess):
                    if "decode" in child.cmdline():
                        child.kill()
            return cluster.process.poll() is not None

        until(ended, START_S, "the cluster gives up")
        assert cluster.process.returncode == 1
        shown = cluster.log.read_text()
        assert re.search(r"^decode-0 +dead ", shown, re.M)
        assert "error: decode-0: killed by SIGKILL; gave up after 5 deaths in a row\n" in shown
        assert not [child for child in cluster.children if child.is_running()]


def test_colocated_gives_the_same_text_and_a_killed_supervisor_takes_its_children_along(tmp_path):
    with up(tmp_path) as two_pools:
        text = two_pools.complete(max_tokens=24, temperature=0.9, seed=3)
        two_pools.process.kill()
        two_pools.process.wait()
        _, alive = psutil.wait_procs(two_pools.children, timeout=STOP_S)
        assert not alive
    (tmp_path / "alone").mkdir()
    with up(tmp_path / "alone", "--prefill", "0") as alone:
        assert [p["name"] for p in alone.facts["processes"]] == ["router", "decode-0"]
        assert alone.complete(max_tokens=24, temperature=0.9, seed=3) == text


def test_a_signal_while_it_starts_leaves_nothing(tmp_path):
    with up(tmp_path, wait=False) as cluster:
        until(lambda: psutil.Process(cluster.process.pid).children(), START_S, "children")
        cluster.children = psutil.Process(cluster.process.pid).children(recursive=True)
        cluster.process.send_signal(signal.SIGINT)
        assert cluster.process.wait(STOP_S) == 0, cluster.log.read_text()
        assert not [child for child in cluster.children if child.is_running()]
        assert "Traceback" not in cluster.log.read_text()


def refused(*flags):
    line = [sys.executable, "-m", "cli", "up", *flags]
    run = subprocess.run(line, capture_output=True, text=True, timeout=100, cwd=ROOT)
    assert run.returncode == 2, run.stderr
    assert run.stderr.count("\n") == 1, run.stderr
    return run.stderr


@pytest.mark.parametrize("option", ["--http-port", "--grpc-port"])
def test_a_busy_port_is_one_line(option):
    other = {"--http-port": "--grpc-port", "--grpc-port": "--http-port"}[option]
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = str(busy.getsockname()[1])
        complaint = refused("--model", TINY, option, port, other, "0")
        assert option in complaint
        assert port in complaint


def test_what_only_a_worker_can_know_is_one_line_too():
    complaint = refused("--model", TINY, "--http-port", "0", "--grpc-port", "0", "--max-model-len", "4096")
    assert "4096" in complaint
    assert "1024" in complaint
