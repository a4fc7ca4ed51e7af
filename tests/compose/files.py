"""Before anything runs: are the files valid, is the image what it should be, is what was started as hard as the file says?"""

from __future__ import annotations

import json
import re

from tests.compose.journal import Journal
from tests.compose.stack import IMAGE, PROJECT, ROOT, Stack

BUILD_TOOLS = ("gcc", "g++", "cc", "c++", "clang", "make", "cmake", "ld", "nvcc", "git")
ONCE = ("secrets", "model")


async def valid(stack: Stack, journal: Journal) -> None:
    """compose.yaml, alone and with the GPUs' file, and with every setting of .env.example taken."""
    with journal.check(
        "compose.yaml and compose.gpu.yaml are valid, with every line of .env.example taken, too"
    ) as line:
        taken = re.findall(r"^#(\w+=.*)$", (ROOT / ".env.example").read_text(), re.M)
        settings = dict(one.split("=", 1) for one in taken)
        for files in ("compose.yaml", "compose.yaml:compose.gpu.yaml"):
            await stack.compose("config", "-q", COMPOSE_FILE=files)
            await stack.compose("config", "-q", COMPOSE_FILE=files, **settings)
        line.said = f"{len(settings)} settings"


async def built(stack: Stack, journal: Journal) -> None:
    """The image: its size, and what must not be in it."""
    with journal.check("the image is built") as line:
        await stack.compose("build", "-q")
        found = json.loads(await stack.docker("image", "inspect", IMAGE))[0]
        line.said = f"{found['Size'] / 1e6:.0f} MB"
    with journal.check("the image has a version, its own user, no build tools, and kernels built for this CPU") as line:
        config = found["Config"]
        version = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.M)[1]
        assert config["Labels"]["org.opencontainers.image.version"] == version
        assert config["User"] == "10001:10001"
        asked = f"for tool in {' '.join(BUILD_TOOLS)}; do command -v $tool || true; done; diptych --version"
        said = await stack.docker("run", "--rm", "--network", "none", "--entrypoint", "sh", IMAGE, "-c", asked)
        assert said.split("\n") == [f"diptych {version}", ""], said
        line.said = await kernels_of(stack)


async def kernels_of(stack: Stack) -> str:
    """Which kernels a process as hard as compose.yaml makes it would run; they must be the best that this CPU has."""
    hard = ("--read-only", "--tmpfs", "/tmp", "--cap-drop", "ALL", "--network", "none")
    # What it does not like of a container without volumes is its exit code.
    said = await stack.docker("run", "--rm", *hard, IMAGE, "doctor", well=False)
    runs = re.search(r"this CPU runs (\w+)(.*); compiler: none$", said, re.M)
    assert runs, said
    best = runs[1] if runs[1] not in ("none", "scalar") else "torch"
    chosen = re.findall(r"^\w+ +(float32|bfloat16) +(.+): (\w+)$", said, re.M)
    assert {dtype: kernels for dtype, _, kernels in chosen} == {"float32": best, "bfloat16": best}, said
    return best


async def kernels_run(stack: Stack) -> str:
    """The libraries of ours that workers have loaded, by what is mapped into them."""
    asked = "cat /proc/[0-9]*/maps 2> /dev/null | sed -n 's,.*/kernels/cpu/built/\\([a-z0-9]*\\)-.*,\\1,p' | sort -u"
    found = {await stack.compose("exec", "-T", name, "sh", "-c", asked) for name in ("prefill", "decode")}
    best = await kernels_of(stack)
    assert {one.strip() or "torch" for one in found} == {best}, found
    return best


async def hard(stack: Stack, journal: Journal) -> None:
    """As Docker sees the containers that run and those that ran once."""
    ids = (await stack.docker("ps", "-aq", "--filter", f"label=com.docker.compose.project={PROJECT}")).split()
    found = [await stack.inspect(one) for one in ids]
    with journal.check("containers: not root, read-only, no capabilities, no new privileges, bounded") as line:
        for one in found:
            name, host = one["Name"], one["HostConfig"]
            assert one["Config"]["User"].split(":")[0] not in ("", "0", "root"), name
            assert host["ReadonlyRootfs"], name
            assert host["CapDrop"] == ["ALL"] and not host["CapAdd"], name
            assert "no-new-privileges:true" in host["SecurityOpt"], name
            assert host["Memory"] > 0 and host["NanoCpus"] > 0 and host["PidsLimit"] > 0, name
            assert not host["Privileged"] and host["PidMode"] == "", name
        line.said = f"{len(found)} containers"
    with journal.check("published ports are on loopback, workers and Redis have none and no way out") as line:
        published = {}
        for one in found:
            bound = [b for ports in (one["HostConfig"]["PortBindings"] or {}).values() for b in ports]
            assert {b["HostIp"] for b in bound} <= {"127.0.0.1"}, one["Name"]
            published[one["Config"]["Labels"]["com.docker.compose.service"]] = len(bound)
        expected = {"router": 2, "prometheus": 1, "grafana": 1, "prefill": 0, "decode": 0, "redis": 0}
        assert published == expected | dict.fromkeys(ONCE, 0)
        (network,) = json.loads(await stack.docker("network", "inspect", f"{PROJECT}_cluster"))
        assert network["Internal"]
    with journal.check("secrets are in no file, setting or command line, and readable by one user") as line:
        said = await stack.compose("exec", "-T", "router", "sh", "-c", "stat -c '%a %u' /secrets/*; cat /secrets/*")
        *rights, secrets = said.strip().split("\n")
        assert rights == ["600 10001", "600 10001"]
        assert re.fullmatch(r"[0-9a-f]{128}", secrets)
        everything = (
            json.dumps(found) + await stack.compose("config") + await stack.docker("history", "--no-trunc", IMAGE)
        )
        # Not Compose's logs: those leave out a last line that has no end.
        logs = 'for one in "$@"; do docker logs "$one" 2>&1; done'
        everything += await stack.compose("top") + await stack.run("sh", "-c", logs, "sh", *ids)
        assert not [s for s in (secrets[:64], secrets[64:]) if s in everything]
