"""A real router on free ports in the test's own event loop, with scripted workers beside it."""

import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import httpx

from contracts.clock import MonotonicClock
from router.config import (
    CanaryConfig,
    DisaggregationConfig,
    DisaggregationMode,
    HttpConfig,
    RegistryConfig,
    RetryConfig,
    RouterConfig,
)
from router.server import Ports, RouterServer
from router.text.model_card import load_model_card
from rpc.server import ServerConfig
from tests.integration.scripted_workers import Cluster

TINY = Path(__file__).parents[1] / "fixtures/tiny-austen"
MODEL = "tiny"
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


@dataclass
class Running:
    router: RouterServer
    ports: Ports
    cluster: Cluster
    http: httpx.AsyncClient
    card: object

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.ports.http}"

    @property
    def target(self) -> str:
        return f"127.0.0.1:{self.ports.grpc}"

    def ids(self, text: str) -> list[int]:
        return list(self.card.tokenizer.encode(text, True))

    def text(self, ids) -> str:
        stream = self.card.tokenizer.text_stream(True)
        return stream.push(ids) + stream.flush()

    async def metric(self, name: str, **labels: str) -> float:
        """The sum of its series that have these labels."""
        from prometheus_client.parser import text_string_to_metric_families

        text = (await self.http.get("/metrics")).text
        return sum(
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )


def model_dir(tmp_path: Path) -> Path:
    """The tiny model's files that a router reads, with a chat template."""
    target = tmp_path / "model"
    target.mkdir(exist_ok=True)
    for name in ("config.json", "generation_config.json", "tokenizer.json"):
        shutil.copy(TINY / name, target / name)
    (target / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE, "eos_token": "<|eos|>"}))
    return target


def router_config(tmp_path: Path, **changes) -> RouterConfig:
    config = RouterConfig(
        model_dir=model_dir(tmp_path),
        model_name=MODEL,
        http=HttpConfig(port=0),
        grpc=ServerConfig(port=0),
        retry=RetryConfig(backoff_s=0.01, worker_wait_s=1.0, first_worker_wait_s=0.0, handoff_verdict_s=0.3),
        registry=RegistryConfig(ttl_s=2.0),
        canary=CanaryConfig(interval_s=0.0),  # tests of canaries send them themselves
        disaggregation=DisaggregationConfig(DisaggregationMode.ALWAYS),  # tests of the choice say so
        request_timeout_s=20.0,
    )
    return replace(config, **changes)


@asynccontextmanager
async def running_router(config: RouterConfig) -> AsyncIterator[Running]:
    router = RouterServer(config, MonotonicClock())
    ports = await router.start()
    cluster = Cluster(f"127.0.0.1:{ports.workers}", config.model_name)
    card = load_model_card(config.model_dir, config.model_name)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{ports.http}", timeout=60, trust_env=False) as http:
        try:
            yield Running(router, ports, cluster, http, card)
        finally:
            await cluster.stop()
            await router.stop()


def events(text: str) -> list:
    """The data of each server-sent event; the last is the string [DONE]."""
    lines = [block.removeprefix("data: ") for block in text.split("\n\n") if block]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]
