"""A cluster of real processes with TLS at every port and keys at the users': the same tokens, and nobody else gets in."""

import os
import ssl
import subprocess
import sys

import grpc
import httpx
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from contracts.pb.diptych.v1 import inference_pb2 as pb
from contracts.pb.diptych.v1 import inference_pb2_grpc, types_pb2
from rpc.authority import CA_FILE, CERT_FILE, KEY_FILE
from tests.integration.test_up import ROOT, STOP_S, up

SAMPLING = types_pb2.SamplingParams(max_tokens=24, seed=7, temperature=0.8)
PROMPT = "It is a truth universally acknowledged, that a single man in possession of a good fortune"


def make_key(folder) -> str:
    line = [sys.executable, "-m", "cli", "key", "new", "--name", "alice", "--file", str(folder / "keys.json")]
    return subprocess.run(line, cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def credentials(folder, *, own: bool) -> grpc.ChannelCredentials:
    ca, cert, key = ((folder / name).read_bytes() for name in (CA_FILE, CERT_FILE, KEY_FILE))
    return grpc.ssl_channel_credentials(ca, key, cert) if own else grpc.ssl_channel_credentials(ca)


def serving(address: str, given: grpc.ChannelCredentials | None) -> bool:
    """Whether health checking at `address` is reached; over TLS with `given`."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    channel = grpc.insecure_channel(address, options) if given is None else grpc.secure_channel(address, given, options)
    with channel:
        try:
            health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
        except grpc.RpcError:
            return False
        return True


def answer(stub, key, route) -> tuple[list[int], pb.GenerateResponse]:
    asked = pb.GenerateRequest(text=PROMPT, sampling=SAMPLING, route=route)
    pieces = list(stub.Generate(asked, metadata=(("authorization", f"Bearer {key}"),), timeout=60))
    return [token for piece in pieces for token in piece.token_ids], pieces[-1]


def test_every_hop_is_tls_and_the_tokens_are_the_same(tmp_path):
    key, tls = make_key(tmp_path), tmp_path / "tls"
    flags = ["--tls", "--tls-dir", str(tls), "--api-keys", str(tmp_path / "keys.json"), "--connector", "tcp"]
    with up(tmp_path, *flags) as cluster:
        facts = cluster.facts
        mine, theirs = credentials(tls, own=True), credentials(tls, own=False)
        with grpc.secure_channel(facts["grpc"], theirs) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            pushed, last = answer(stub, key, pb.ROUTE_DISAGGREGATED)
            alone, _ = answer(stub, key, pb.ROUTE_COLOCATED)
            assert pushed == alone and len(pushed) == 24
            assert last.route == pb.ROUTE_DISAGGREGATED and last.handoff.kv_bytes > 0
            with pytest.raises(grpc.RpcError) as caught:
                list(stub.Generate(pb.GenerateRequest(text=PROMPT, sampling=SAMPLING), timeout=10))
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED

        context = ssl.create_default_context(cafile=str(tls / CA_FILE))
        with httpx.Client(base_url=facts["http"], verify=context, trust_env=False, timeout=60) as http:
            assert http.get("/v1/models").status_code == 401
            http.headers["Authorization"] = f"Bearer {key}"
            body = {"prompt": PROMPT, "max_tokens": 24, "seed": 7, "temperature": 0.8, "return_token_ids": True}
            assert http.post("/v1/completions", json=body).json()["choices"][0]["token_ids"] == pushed

        workers = [process["address"] for process in facts["processes"] if process["kind"] != "router"]
        announce_at = {option(process, "--router") for process in facts["processes"] if process["kind"] != "router"}
        assert len(announce_at) == 1 and facts["grpc"] not in announce_at
        for address in [*workers, *announce_at]:
            assert serving(address, mine)
            assert not serving(address, theirs), f"{address} lets in who shows no certificate"
            assert not serving(address, None), f"{address} talks to who does not talk TLS"
        assert not serving(facts["grpc"], None)

        lines = [" ".join(psutil.Process(child.pid).cmdline()) for child in cluster.children]
        assert not [line for line in lines if key in line]
        cluster.process.terminate()
        assert cluster.process.wait(STOP_S) == 0, cluster.log.read_text()
    assert key not in cluster.log.read_text()
    assert "PRIVATE KEY" not in cluster.log.read_text()


def option(process: dict, flag: str) -> str:
    line = psutil.Process(process["pid"]).cmdline()
    return line[line.index(flag) + 1]


def complaint(*line: str) -> str:
    done = subprocess.run([sys.executable, "-m", "cli", *line], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    return done.stderr


def test_a_tls_file_that_cannot_be_used_ends_a_process_with_one_line(tmp_path):
    """Before a model is loaded."""
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    line = ["decode", "--model", str(ROOT / "tests" / "fixtures" / "tiny-austen"), "--log-level", "error"]
    said = complaint(*line, "--router", "127.0.0.1:1", "--tls-cert", str(cert), "--tls-key", str(key))
    assert said == f"error: --tls-cert {cert}: No such file or directory\n"


def test_keys_are_made_listed_and_revoked(tmp_path):
    key = make_key(tmp_path)
    path = tmp_path / "keys.json"
    assert path.stat().st_mode & 0o777 == 0o600
    assert key.startswith("sk-diptych-") and key not in path.read_text()
    line = [sys.executable, "-m", "cli", "key"]

    def run(*more: str) -> subprocess.CompletedProcess:
        return subprocess.run([*line, *more, "--file", str(path)], cwd=ROOT, capture_output=True, text=True)

    (entry,) = run("list").stdout.splitlines()
    assert "alice" in entry and key not in entry
    assert run("revoke", "alice").returncode == 0
    assert "disabled=True" in run("list").stdout
    assert run("revoke", "alice").returncode == 2
    assert run("new", "--name", "bad name").returncode == 2
    before = path.read_bytes()
    path.chmod(0o644)
    assert run("new", "--name", "alice", "--weight", "3").returncode == 2, "another weight than the first key's"
    assert path.read_bytes() == before
    assert run("new", "--name", "bob").returncode == 0
    assert path.stat().st_mode & 0o777 == 0o644, "what its owner let others read stays so"
    assert sorted(os.listdir(tmp_path)) == [".keys.json.lock", "keys.json"]
