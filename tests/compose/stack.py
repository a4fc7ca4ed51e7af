"""Docker and Compose as commands, for one project of its own, on ports that are free. Does not know what the services are."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import shutil
import socket
import subprocess
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests.compose.journal import NotSo

ROOT = Path(__file__).resolve().parents[2]
PROJECT = "diptych-test"
IMAGE = "diptych:compose-test"
# Of an operator's settings (.env) the run takes those that this machine needs; all others are as they come.
OPERATORS = {"TORCH", "TORCH_INDEX", "HF_TOKEN", "REDIS_IMAGE", "PROMETHEUS_IMAGE", "GRAFANA_IMAGE"}
SANDBOX_FILE = "tests/compose/compose.sandbox.yaml"


def free_ports(count: int) -> list[int]:
    """Of this machine, each another; below those that the kernel gives away, for Docker binds them minutes later."""
    found: list[int] = []
    for port in random.sample(range(20000, 32000), 200):
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            found.append(port)
        if len(found) == count:
            return found
    raise NotSo("no free ports between 20000 and 32000")


@dataclass(frozen=True)
class Engine:
    """A Docker engine that can be reached with `environment`. `sandboxed`: it has neither a registry nor a way out."""

    environment: dict[str, str]
    sandboxed: bool
    stop: Callable[[], object]


def find_engine(recipe: Path | None) -> Engine | str:
    """The one that `recipe` (a script with start, images, env and stop) brings up, else one that is there; or why there is none."""
    ours = dict(os.environ)  # noqa: TID251
    if recipe is not None:
        if not recipe.is_file():
            return f"{recipe} is not there"
        if os.geteuid() != 0:
            return f"{recipe} needs root"
        try:
            for verb in ("start", "images"):
                subprocess.run([str(recipe), verb], check=True)
        except BaseException:
            subprocess.run([str(recipe), "stop"], check=False)
            raise
        said = subprocess.run([str(recipe), "env"], check=True, capture_output=True, text=True).stdout
        given = dict(re.findall(r"(\w+)=(\S+)", said))
        given["PATH"] = given["PATH"].replace("$PATH", ours["PATH"])
        return Engine(ours | given, True, lambda: subprocess.run([str(recipe), "stop"], check=True))
    if shutil.which("docker") is None:
        return "no docker here, and no COMPOSE_SANDBOX=…/recipe.sh that would bring one up"
    for asked in (["docker", "info"], ["docker", "compose", "version"]):
        if subprocess.run(asked, capture_output=True).returncode != 0:
            return f"`{' '.join(asked)}` fails"
    return Engine(ours, False, lambda: None)


@dataclass
class Stack:
    """One project. Owns its containers, networks and volumes until `down`."""

    engine: Engine
    settings: dict[str, str]
    ports: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        names = ("HTTP_PORT", "GRPC_PORT", "PROMETHEUS_PORT", "GRAFANA_PORT")
        self.ports = dict(zip(names, free_ports(len(names)), strict=True))
        files = ["compose.yaml", *([SANDBOX_FILE] if self.engine.sandboxed else [])]
        settings = set(re.findall(r"^#?(\w+)=", (ROOT / ".env.example").read_text(), re.M)) - OPERATORS
        self._environment = self.engine.environment | {
            **dict.fromkeys(settings, ""),  # their defaults, whatever .env has
            "COMPOSE_FILE": ":".join(files),
            "COMPOSE_PROJECT_NAME": PROJECT,
            "DIPTYCH_IMAGE": IMAGE,
            **{name: str(port) for name, port in self.ports.items()},
            **self.settings,
        }

    async def run(self, *words: str, limit_s: float = 600.0, well: bool = True, **more: str) -> str:
        """What the command says on stdout. NotSo when it fails and should not."""
        process = await asyncio.create_subprocess_exec(
            *words,
            cwd=ROOT,
            env=self._environment | more,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        try:
            async with asyncio.timeout(limit_s):
                out, err = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
        if well and process.returncode != 0:
            raise NotSo(f"{' '.join(words)[:200]}: exit {process.returncode}: {err.decode()[-1500:]}")
        return out.decode()

    async def compose(self, *words: str, limit_s: float = 600.0, well: bool = True, **more: str) -> str:
        """`docker compose …`."""
        return await self.run("docker", "compose", *words, limit_s=limit_s, well=well, **more)

    async def docker(self, *words: str, well: bool = True) -> str:
        """`docker …`."""
        return await self.run("docker", *words, limit_s=120, well=well)

    async def scale(self, **services: int) -> None:
        """`docker compose up`, waiting until all are well; what runs already is left as it is."""
        many = [f"--scale={name}={number}" for name, number in services.items()]
        await self.compose("up", "-d", "--no-build", "--no-recreate", "--wait", "--wait-timeout", "300", *many)

    async def containers(self, service: str) -> list[str]:
        """Ids of those that run, the oldest first."""
        listed = await self.compose("ps", "--format", "json", service)
        found = [json.loads(line) for line in listed.splitlines()]
        return [one["ID"] for one in sorted(found, key=lambda one: int(one["Name"].rpartition("-")[2]))]

    async def inspect(self, container: str) -> dict:
        """All that Docker knows of it."""
        (found,) = json.loads(await self.docker("inspect", container))
        return found

    async def address(self, container: str) -> str:
        """In the cluster's network; "" when it is not in it."""
        networks = (await self.inspect(container))["NetworkSettings"]["Networks"]
        return networks.get(f"{PROJECT}_cluster", {}).get("IPAddress", "")

    async def pause(self, container: str) -> None:
        """`docker pause`, asked again where the freezer of control groups v1 gives up on threads that are busy in the kernel."""
        for _ in range(5):
            await self.docker("pause", container, well=False)
            if (await self.inspect(container))["State"]["Paused"]:
                return
        raise NotSo("the container cannot be paused")

    async def down(self) -> None:
        """Everything, volumes too."""
        await self.compose("down", "-v", "--remove-orphans", limit_s=180)

    async def leftovers(self) -> list[str]:
        """Containers, networks and volumes of the project that are there."""
        of_ours = ("--filter", f"label=com.docker.compose.project={PROJECT}")
        found = (await self.docker("ps", "-a", *of_ours, "--format", "{{.Names}}")).split()
        found += (await self.docker("network", "ls", *of_ours, "--format", "{{.Name}}")).split()
        return found + (await self.docker("volume", "ls", *of_ours, "--format", "{{.Name}}")).split()
