"""What the cluster's Prometheus has for each panel of each Grafana dashboard, and for its own targets, rules and alerts."""

from __future__ import annotations

import time
from dataclasses import dataclass

import httpx

from tests.monitoring.queries import DASHBOARDS, filled, panels

RATE_INTERVAL = "20s"  # what Grafana makes of a scrape interval of 5 s
# What has data only of a cluster that is configured otherwise: when the certificate of a router with TLS expires.
OF_OTHERS = frozenset({"router / Certificate"})


@dataclass
class Prometheus:
    """Its HTTP API."""

    port: int

    def get(self, path: str, **parameters: str) -> dict:
        """`data` of an answer."""
        url = f"http://127.0.0.1:{self.port}/api/v1/{path}"
        with httpx.Client(trust_env=False, timeout=30) as http:
            answer = http.get(url, params=parameters).json()
        assert answer["status"] == "success", (parameters, answer)
        return answer["data"]

    def value(self, query: str) -> float:
        """Of the first series that it gives now; 0 for none."""
        found = self.get("query", query=query)["result"]
        return float(found[0]["value"][1]) if found else 0.0

    def up(self) -> dict[str, int]:
        """How many targets of each job answer."""
        found = self.get("query", query="sum by (job) (up)")["result"]
        return {one["metric"]["job"]: int(float(one["value"][1])) for one in found}

    def has_data(self, expr: str, begin: float) -> bool:
        """Whether the query gives a number at some time since `begin`."""
        asked = {"query": filled(expr, RATE_INTERVAL), "start": str(begin), "end": str(time.time()), "step": "5"}
        series = self.get("query_range", **asked)["result"]
        return any(value == value for one in series for value in (float(v) for _, v in one["values"]))

    def empty_panels(self, begin: float) -> tuple[int, list[str]]:
        """How many panels there are, and which of them have nothing to show since `begin` (Unix time)."""
        count, empty = 0, []
        for path in DASHBOARDS:
            for panel in panels(path):
                if panel["type"] == "row":
                    continue
                count += 1
                if not any(self.has_data(target["expr"], begin) for target in panel["targets"]):
                    empty.append(f"{path.stem} / {panel['title']}")
        return count, empty
