"""A model by its hub id, from a hub on this machine: the real client, the real requests, another address."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save

ROOT = Path(__file__).parents[2]
COMMIT = "c" * 40
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b"{}",
    "model.safetensors": save({"w": np.arange(100, dtype=np.float32)}),
    "pytorch_model.bin": b"a pickle that nobody should fetch",
    "README.md": b"words",
}


@dataclass
class Hub:
    """What the fake hub serves and what it was asked for."""

    address: str = ""
    files: dict[str, bytes] = field(default_factory=lambda: dict(FILES))
    status: int = 200
    asked: list[str] = field(default_factory=list)


class Handler(BaseHTTPRequestHandler):
    """The part of the hub's HTTP API that a snapshot download uses."""

    hub: Hub

    def do_HEAD(self) -> None:
        self.answer(with_body=False)

    def do_GET(self) -> None:
        self.answer(with_body=True)

    def answer(self, with_body: bool) -> None:
        path = self.path.split("?")[0]
        self.hub.asked.append(path)
        if self.hub.status != 200:
            code = {401: "GatedRepo", 404: "RepoNotFound"}.get(self.hub.status, "")
            self.reply(self.hub.status, b"{}", {"X-Error-Code": code} if code else {}, with_body)
        elif path.startswith("/api/models/org/name/tree/"):
            tree = [{"type": "file", "path": n, "size": len(b), "oid": sha1(b)} for n, b in self.hub.files.items()]
            self.reply(200, json.dumps(tree).encode(), {"Content-Type": "application/json"}, with_body)
        elif path.startswith("/api/models/org/name"):
            siblings = [{"rfilename": n, "size": len(b)} for n, b in self.hub.files.items()]
            info = {"id": "org/name", "sha": COMMIT, "siblings": siblings}
            self.reply(200, json.dumps(info).encode(), {"Content-Type": "application/json"}, with_body)
        elif path.startswith(f"/org/name/resolve/{COMMIT}/"):
            body = self.hub.files[path.rsplit("/", 1)[1]]
            self.reply(200, body, {"X-Repo-Commit": COMMIT, "ETag": f'"{sha1(body)}"'}, with_body)
        else:
            self.reply(404, b"{}", {}, with_body)

    def reply(self, status: int, body: bytes, headers: dict[str, str], with_body: bool) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, *_args: object) -> None:
        """Quiet."""


def sha1(body: bytes) -> str:
    return hashlib.sha1(body, usedforsecurity=False).hexdigest()


@pytest.fixture
def hub() -> Iterator[Hub]:
    state = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("HubHandler", (Handler,), {"hub": state}))
    state.address = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield state
    server.shutdown()
    thread.join()
    server.server_close()


def resolve(monkeypatch, address: str, cache: Path, name: str = "org/name") -> subprocess.CompletedProcess[str]:
    """In a process of its own: the hub's client reads its address when it is imported."""
    code = (
        "import sys; from pathlib import Path; from contracts.errors import ModelLoadError\n"
        "from engine.models.store import resolve_model, model_name\n"
        "try: path = resolve_model(sys.argv[1], Path(sys.argv[2]))\n"
        "except ModelLoadError as error: sys.exit(error.message)\n"
        "print(path); print(model_name(path))"
    )
    monkeypatch.setenv("HF_ENDPOINT", address)
    monkeypatch.setenv("HF_HOME", str(cache / "home"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    command = [sys.executable, "-c", code, name, str(cache)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=100)


def test_a_snapshot_has_what_serving_reads_and_nothing_else(hub, tmp_path, monkeypatch):
    result = resolve(monkeypatch, hub.address, tmp_path)
    assert result.returncode == 0, result.stderr
    folder, name = result.stdout.splitlines()
    assert name == "org/name"
    assert sorted(os.listdir(folder)) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert (Path(folder) / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    assert Path(folder).is_relative_to(tmp_path / "hub")


def test_what_is_in_the_cache_is_served_while_the_hub_is_away(hub, tmp_path, monkeypatch):
    first = resolve(monkeypatch, hub.address, tmp_path)
    second = resolve(monkeypatch, "http://127.0.0.1:9", tmp_path)
    assert second.returncode == 0, second.stderr
    assert second.stdout == first.stdout


def test_a_hub_that_cannot_be_reached_is_said(tmp_path, monkeypatch):
    result = resolve(monkeypatch, "http://127.0.0.1:9", tmp_path)
    assert result.returncode == 1
    assert "org/name: the hub cannot be reached and the model is not in the cache" in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("status", "words"),
    [(404, "the hub knows no such model"), (401, "wants its terms accepted")],
    ids=["unknown", "gated"],
)
def test_a_model_that_the_hub_does_not_give_is_said(hub, tmp_path, monkeypatch, status, words):
    hub.status = status
    result = resolve(monkeypatch, hub.address, tmp_path)
    assert result.returncode == 1
    assert words in result.stderr
    assert "Traceback" not in result.stderr


def test_a_snapshot_without_weights_is_refused(hub, tmp_path, monkeypatch):
    del hub.files["model.safetensors"]
    result = resolve(monkeypatch, hub.address, tmp_path)
    assert result.returncode == 1
    assert "neither model.safetensors nor" in result.stderr
