"""The port of a worker's metrics: it answers, also beside those who are up to something else."""

import socket
import threading
import time
import urllib.request
from contextlib import ExitStack, closing

import pytest
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.registry import Collector

from contracts.errors import ConfigError
from observability.exposition import SHARE
from rpc.metrics_port import MetricsPort


def served(stall_s: float) -> MetricsPort:
    registry = CollectorRegistry()
    Counter("steps", "Steps.", registry=registry).inc()
    return MetricsPort("127.0.0.1", 0, registry, stall_s)


def scraped(port: int) -> bytes:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as answer:
        return answer.read()


def test_it_answers_and_leaves_who_says_no_more() -> None:
    with closing(served(0.2)) as metrics:
        with socket.create_connection(("127.0.0.1", metrics.port), 20) as silent:
            silent.send(b"GET /metrics HTTP/1.1")
            assert silent.recv(1000) == b""
        assert b"steps_total 1.0" in scraped(metrics.port)


def test_who_dribbles_has_no_more_time_than_who_is_silent() -> None:
    with closing(served(0.3)) as metrics, socket.create_connection(("127.0.0.1", metrics.port), 20) as dribbler:
        dribbler.settimeout(0.05)
        for _ in range(400):
            try:
                dribbler.send(b"x")
                if dribbler.recv(1) == b"":
                    return
            except TimeoutError:
                continue
            except ConnectionError:
                return
        pytest.fail("a byte now and then held its thread")


def test_a_crowd_that_says_nothing_holds_few_threads_and_keeps_no_scraper_out() -> None:
    before = threading.active_count()
    with closing(served(60)) as metrics, ExitStack() as stack:
        for _ in range(200):
            stack.enter_context(socket.create_connection(("127.0.0.1", metrics.port), 20))
        assert b"steps_total 1.0" in scraped(metrics.port)
        assert threading.active_count() - before < 60


class Slow(Collector):
    """Takes long to be asked; notes how often it was."""

    def __init__(self) -> None:
        self.asked = 0

    def collect(self) -> tuple[()]:
        self.asked += 1
        end = time.thread_time() + 0.03
        while time.thread_time() < end:
            pass
        return ()


def test_endless_scrapes_leave_the_rest_of_the_process_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("observability.exposition.MOST_S", 0.0)
    registry, slow = CollectorRegistry(), Slow()
    registry.register(slow)
    slow.asked = 0
    with closing(MetricsPort("127.0.0.1", 0, registry)) as metrics:
        begun = time.monotonic()
        for _ in range(4):
            assert scraped(metrics.port) == b""
        took_s = time.monotonic() - begun
    assert slow.asked == 4
    assert took_s > 3 * 0.03 / SHARE * 0.9


def test_a_port_that_is_taken_is_named() -> None:
    with closing(served(1)) as metrics, pytest.raises(ConfigError, match=f"127.0.0.1:{metrics.port}"):
        MetricsPort("127.0.0.1", metrics.port, CollectorRegistry())
