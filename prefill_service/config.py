"""What a prefill worker is told at its start. Frozen; reads no environment. Does not know how it got its values."""

from __future__ import annotations

from dataclasses import dataclass, field

from prefill_service.run import RunConfig
from worker.config import WorkerConfig


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """One prefill worker process: what every worker is told, and how its runs are handed off."""

    worker: WorkerConfig
    run: RunConfig = field(default_factory=RunConfig)
