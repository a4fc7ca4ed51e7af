"""What the operating system says of this process, under the names that every Prometheus client gives it (`process_*`).

Their start time is what tells a router that is started again and again; a worker's lives have epochs besides.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, ProcessCollector


def watch_process(registry: CollectorRegistry) -> None:
    """Ask /proc at each scrape; where there is none (macOS), there are no such series."""
    ProcessCollector(registry=registry)
