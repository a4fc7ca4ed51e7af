"""What a decode worker is told at its start. Frozen; reads no environment. Does not know how it got its values."""

from __future__ import annotations

from dataclasses import dataclass, field

from decode_service.worker import AnswerConfig
from worker.config import WorkerConfig


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """One decode worker process: what every worker is told, and how hand-offs are received and answers read."""

    worker: WorkerConfig
    answers: AnswerConfig = field(default_factory=AnswerConfig)
