"""Whoever installs the client has its types: mypy sees them as it sees those of any package that says it has some."""

import subprocess
import sys
import sysconfig
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).parents[3]
PACKAGES = ("diptych_client", "contracts")
USE = """
import asyncio
from diptych_client import AsyncClient, Client

with Client("host:1", api_key="k") as client:
    reveal_type(client.generate("a").answer())
    reveal_type(client.models())
    client.generate("a", no_such_option=1)

async def main() -> None:
    async with AsyncClient("host:1") as client:
        async for piece in client.generate("a", max_tokens=1):
            reveal_type(piece)
"""
SEEN = (
    '"diptych_client.answer.Answer"',
    '"list[contracts.pb.diptych.v1.inference_pb2.Model]"',
    '"contracts.pb.diptych.v1.inference_pb2.GenerateResponse"',
    'Unexpected keyword argument "no_such_option"',
)


def test_mypy_sees_the_types_of_the_installed_client(tmp_path):
    """Installed: in a site-packages, where mypy believes only packages with py.typed. Links show what a wheel would hold."""
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    assert {"py.typed", "*.pyi"} <= set(data["*"])
    installed = tmp_path / "installed"
    installed.mkdir()
    for name in PACKAGES:
        (installed / name).symlink_to(ROOT / name)
    venv.create(tmp_path / "venv", with_pip=False)
    own = next((tmp_path / "venv").glob("lib/python*/site-packages"))
    (own / "installed.pth").write_text(f"{installed}\n{sysconfig.get_path('purelib')}\n")
    (tmp_path / "use.py").write_text(USE)
    command = [sys.executable, "-m", "mypy", "--strict", "--python-executable", str(tmp_path / "venv/bin/python")]
    run = subprocess.run([*command, "use.py"], cwd=tmp_path, capture_output=True, text=True)
    assert [seen for seen in SEEN if seen not in run.stdout] == [], run.stdout + run.stderr
    assert "Found 1 error" in run.stdout, run.stdout


EXAMPLES = ("grpc_client.py", "grpc_asyncio.py")


def test_the_examples_are_typed_as_strictly_as_the_product():
    paths = [f"examples/{name}" for name in EXAMPLES]
    run = subprocess.run([sys.executable, "-m", "mypy", "--strict", *paths], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
