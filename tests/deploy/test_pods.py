"""A cluster of the chart's own words: its commands, flags, ports, secrets and probes, as real processes. Only kubelet is played."""

import hashlib
import json
import subprocess
import sys
from contextlib import ExitStack

import httpx
import pytest

from tests.deploy.mounts import KEYS, write_mounts
from tests.deploy.pods import container, put, running, started
from tests.deploy.test_commands import MODEL
from tests.deploy.values_sets import all_rendered
from tests.native_library import build_native_library
from tests.redis_process import require_redis_server

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(400),
    pytest.mark.skipif(sys.platform != "linux", reason="needs loopback addresses beside 127.0.0.1"),
]
WAYS = ("defaults", "one router, no Redis", "TLS")
KEY = "sk-of-alice"
build_native_library()


@pytest.mark.parametrize("way", WAYS)
def test_a_release_serves_and_ends(way, tmp_path):
    require_redis_server()
    net = f"127.0.{77 + WAYS.index(way)}."  # the pods' network; ways may be tested at once
    rendered = all_rendered()[way]
    mounts = write_mounts(tmp_path)
    (mounts / KEYS).chmod(0o640)
    hashed = "sha256:" + hashlib.sha256(KEY.encode()).hexdigest()
    (mounts / KEYS).write_text(json.dumps({"keys": [{"name": "alice", "hash": hashed}]}))
    words = {
        "/etc/diptych": str(mounts),
        "/model/": f"{tmp_path}/model/",
        "=/models": f"={tmp_path}/models",
        "smollm2-135m-instruct": str(MODEL),
        "demo-diptych-redis:": f"{net}6:",
        "demo-diptych-registry.llm.svc": f"{net}1",
        "redis-server -": f"redis-server - --bind {net}6",
        "redis-cli": f"redis-cli -h {net}6",
        "--kv-memory=1GiB": "--kv-memory=64MiB",
        "--threads=2": "--threads=1",
    }
    router = rendered.one("Deployment", "router")
    (fetch,) = router["spec"]["template"]["spec"]["initContainers"]
    subprocess.run(started([put(word, words) for word in (*fetch["command"], *fetch["args"])]), check=True, timeout=120)
    with ExitStack() as stack:

        def start(part, last):
            manifest = rendered.one("Deployment", part)
            return stack.enter_context(running(manifest, f"{net}{last}", words, tmp_path / f"{part}{last}.log"))

        store = start("redis", 6) if rendered.of("Secret")[0]["metadata"]["name"].endswith("redis") else None
        if store is not None:
            store.wait("readinessProbe")
        routers = [start("router", n + 1) for n in range(router["spec"]["replicas"])]
        for one in routers:
            one.wait("startupProbe")
            assert one.probe("livenessProbe") and not one.probe("readinessProbe")  # it has no workers yet
        workers = [start(part, n) for part, n in (("prefill", 11), ("decode", 21), ("decode", 22))]
        for one in workers:
            one.wait("startupProbe")
            assert one.probe("livenessProbe")
        for one in routers:
            one.wait("readinessProbe")
        assert len({answer(one, way) for one in routers for _ in range(3)}) == 1
        for pool, one in (("prefill", workers[0]), ("decode", workers[1])):
            page = httpx.get(f"http://{one.address}:9100/metrics", trust_env=False).text
            assert f'engine="{pool}"' in page
        taken = {
            f"{one.address}": one.stop()
            for one in (workers[1], workers[0], *routers, workers[2], *([store] if store else ()))
        }
        assert max(taken.values()) < 20, taken


def answer(router, way):
    """What one asks and is told."""
    scheme, headers = ("https", {"Authorization": f"Bearer {KEY}"}) if way == "TLS" else ("http", {})
    (port,) = [p["containerPort"] for p in container(router.manifest)["ports"] if p["name"] == "http"]
    body = {
        "model": MODEL.name,
        "prompt": "It is a truth",
        "max_tokens": 12,
        "temperature": 0,
        "diptych": {"route": "disaggregated"},
    }
    url = f"{scheme}://{router.address}:{port}/v1/completions"
    said = httpx.post(url, json=body, headers=headers, verify=False, trust_env=False, timeout=60)
    assert said.status_code == 200, said.text
    return said.json()["choices"][0]["text"]
