"""The chart's pods as processes of this machine, each at a loopback address of its own: what kubelet would do, done here.

Addresses are the pods', ports are the chart's. Does not know what the containers are for.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import httpx
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kernels.cpu.config import built_dir
from tests.deploy.render import Manifest

DIPTYCH = [sys.executable, "-m", "cli"]
DEADLINE_S = 150  # the chart gives a pod minutes, and here all start on the cores of one machine


@dataclass(frozen=True)
class Pod:
    """One container of a Deployment's pod, running at `address`."""

    manifest: Manifest
    address: str
    process: subprocess.Popen[bytes]
    words: dict[str, str]  # what kubelet and the network put in place of what

    def probe(self, name: str) -> bool:
        """Whether this probe succeeds now."""
        asked = container(self.manifest)[name]
        if "grpc" in asked:
            return self._grpc(f"{self.address}:{asked['grpc']['port']}")
        if "httpGet" in asked:
            where = asked["httpGet"]
            ports = {port["name"]: port["containerPort"] for port in container(self.manifest)["ports"]}
            url = f"{where.get('scheme', 'HTTP').lower()}://{self.address}:{ports[where['port']]}{where['path']}"
            return self._get(url)
        command = [put(word, self.words).replace("127.0.0.1", self.address) for word in asked["exec"]["command"]]
        return subprocess.run(started(command), timeout=30, capture_output=True).returncode == 0

    @staticmethod
    def _grpc(address: str) -> bool:
        with grpc.insecure_channel(address) as channel:
            try:
                answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
            except grpc.RpcError:
                return False
        return answer.status == health_pb2.HealthCheckResponse.SERVING

    @staticmethod
    def _get(url: str) -> bool:
        try:
            return (
                httpx.get(url, verify=False, trust_env=False, timeout=5).status_code == 200
            )  # as kubelet: any certificate
        except httpx.TransportError:
            return False

    def wait(self, probe: str) -> None:
        """Until it succeeds."""
        until = time.monotonic() + DEADLINE_S
        while not self.probe(probe):
            assert self.process.poll() is None, f"{self.address} ended with {self.process.returncode}"
            assert time.monotonic() < until, f"{self.address}: {probe} does not succeed"
            time.sleep(0.1)

    def stop(self) -> float:
        """SIGTERM as kubelet sends it; seconds until it ended in good order, within the pod's grace."""
        begun = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        assert (
            self.process.wait(self.manifest["spec"]["template"]["spec"].get("terminationGracePeriodSeconds", 30)) == 0
        )
        return time.monotonic() - begun


def container(manifest: Manifest) -> Manifest:
    """The one that goes on."""
    (only,) = manifest["spec"]["template"]["spec"]["containers"]
    return only


def put(word: str, words: dict[str, str]) -> str:
    """`word` with everything in place."""
    for there, here in words.items():
        word = word.replace(there, here)
    return word


def started(command: list[str]) -> list[str]:
    """The command as it is started here."""
    return [*DIPTYCH, *command[1:]] if command[0] == "diptych" else command


@contextmanager
def running(manifest: Manifest, address: str, words: dict[str, str], log: Path) -> Iterator[Pod]:
    """A pod of this Deployment until the end of the block."""
    own = {"$(POD_IP)": address, "$(POD_NAME)": f"pod-{address}", "--host=0.0.0.0": f"--host={address}", **words}
    one = container(manifest)
    command = [put(word, own) for word in (*one["command"], *one.get("args", ()))]
    with log.open("wb") as output:
        # A home of its own, but for the native library: the chart's image has one, and building another takes many seconds.
        env = {**os.environ, "HOME": str(log.parent), "XDG_CACHE_HOME": str(built_dir().parents[1])}  # noqa: TID251
        process = subprocess.Popen(started(command), stdout=output, stderr=output, env=env)
    pod = Pod(manifest, address, process, own)
    try:
        yield pod
    except AssertionError:
        sys.stderr.write(log.read_text())
        raise
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(10)
