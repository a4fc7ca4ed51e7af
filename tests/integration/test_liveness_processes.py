"""Liveness with real processes: a worker that is stopped as a whole, and canaries through shared memory."""

import os
import signal
import time

import httpx

from tests.integration.test_up import until, up

LIMIT_S = 5.0


def test_a_stopped_decode_worker_is_out_within_five_seconds_and_canaries_prove_the_way_again(tmp_path):
    with up(tmp_path) as cluster, httpx.Client(base_url=cluster.facts["http"], trust_env=False, timeout=10) as client:
        pid = cluster.pid_of("decode-0")

        def health():
            response = client.get("/health")
            return response.status_code, response.json()

        until(lambda: health()[1]["pairs"] == {"unknown": 0, "ok": 1, "bad": 0}, 20, "a canary got through")
        before = cluster.complete()
        os.kill(pid, signal.SIGSTOP)
        stopped_at = time.monotonic()
        try:
            until(lambda: health()[0] == 503, 20, "health says that nobody answers")
            assert time.monotonic() - stopped_at < LIMIT_S
            missing = health()[1]["missing"]
            assert missing == ["no decode worker is ready (1 silent)"], "the prefill worker is well"
        finally:
            os.kill(pid, signal.SIGCONT)
        until(lambda: health()[0] == 200, 20, "it is back")
        until(lambda: health()[1]["pairs"]["ok"] == 1, 20, "its way is proven again, or was never in doubt")
        assert cluster.complete() == before
        text = client.get("/metrics").text
        assert 'diptych_canary_total{outcome="ok"}' in text
        assert "diptych_requests_total{" in text
        assert (
            sum(line.startswith("diptych_requests_total{") and line.endswith(" 2.0") for line in text.split("\n")) == 1
        )
