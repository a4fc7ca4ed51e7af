"""A real Prometheus server with deploy/prometheus as it is, but for ports, folders and how often it looks."""

import os
import shutil
import subprocess
import time
from pathlib import Path

import httpx
import pytest

DEPLOYED = Path(__file__).resolve().parents[2] / "deploy" / "prometheus"
SCRAPE_S = 0.25
JOBS = ("diptych-router", "diptych-prefill", "diptych-decode")


def binary(name: str) -> str:
    """Path of prometheus or promtool; without it the test is skipped with a reason, or fails in CI, where it must be."""
    found = shutil.which(name)
    if found is not None:
        return found
    if os.environ.get("CI") == "true":  # noqa: TID251
        pytest.fail(f"{name} is not installed; CI installs it (.ci/run)")
    pytest.skip(f"{name} is not installed (Debian: apt-get install --no-install-recommends prometheus)")


class PrometheusProcess:
    """Owns one server. It scrapes what `targets` name for each job, several times a second."""

    def __init__(self, folder: Path, targets: dict[str, list[str]]) -> None:
        self._folder = folder
        self._config = _configured(folder / "config", targets)
        self._process: subprocess.Popen[bytes] | None = None
        self._http = httpx.Client(trust_env=False, timeout=30)

    def start(self) -> None:
        """Returns when it answers queries."""
        address = self._folder / "web.log"
        command = [binary("prometheus"), f"--config.file={self._config}", "--web.listen-address=127.0.0.1:0"]
        command += [f"--storage.tsdb.path={self._folder / 'data'}", "--log.format=json", "--query.lookback-delta=2s"]
        with address.open("wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        until = time.monotonic() + 60
        while not self._answers(address):
            assert self._process.poll() is None, address.read_text()
            assert time.monotonic() < until, address.read_text()
            time.sleep(0.02)

    def _answers(self, log: Path) -> bool:
        for line in log.read_text().splitlines():
            if '"Listening on"' in line:
                self._http.base_url = "http://" + line.partition('"address":"')[2].partition('"')[0]
        try:
            return str(self._http.base_url) != "" and self._http.get("/-/ready").status_code == 200
        except httpx.TransportError:
            return False

    def get(self, path: str, **parameters: str) -> object:
        """`data` of an answer of the HTTP API; an error fails the test in Prometheus's words."""
        answer = self._http.get(f"/api/v1/{path}", params=parameters).json()
        assert answer["status"] == "success", (parameters, answer)
        return answer["data"]

    def values(self, query: str, begin: float, end: float) -> list[list[float]]:
        """The numbers of each series that the query gives between two Unix times, without those that are NaN."""
        data = self.get("query_range", query=query, start=str(begin), end=str(end), step="0.25")
        found = [[float(v) for _, v in series["values"]] for series in data["result"]]
        return [numbers for numbers in ([v for v in series if v == v] for series in found) if numbers]

    def stop(self) -> None:
        """Idempotent."""
        self._http.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


def _configured(folder: Path, targets: dict[str, list[str]]) -> Path:
    shutil.copytree(DEPLOYED, folder)
    path = folder / "prometheus.yml"
    text = path.read_text()
    (router,) = targets["diptych-router"]
    often = {
        "scrape_interval: 5s": f"scrape_interval: {SCRAPE_S * 1000:.0f}ms",
        "scrape_timeout: 4s": f"scrape_timeout: {SCRAPE_S * 1000:.0f}ms",
        "evaluation_interval: 15s": "evaluation_interval: 500ms",
        "127.0.0.1:8000": router,
    }
    for old, new in often.items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    path.write_text(text)
    for pool in ("prefill", "decode"):
        listed = "".join(f"    - {target}\n" for target in targets[f"diptych-{pool}"])
        (folder / "targets" / f"{pool}.yml").write_text(f"- targets:\n{listed}")
    return path
