"""What an engine is told at its start: frozen, small, checked where it is made. Does not know models, flags or files."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from contracts.errors import ConfigError

SchedulingPolicy = Literal["fcfs", "priority"]


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of one step and of the queue. Raises ConfigError naming the field that cannot work.

    `max_num_batched_tokens` bounds the rows of a forward pass, `max_num_seqs` the requests in it, `max_waiting` the queue.
    The budget must give every request of a step at least one token, else a decode could be left out for ever.
    """

    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 64
    policy: SchedulingPolicy = "fcfs"
    enable_prefix_caching: bool = True
    max_waiting: int = 1024

    def __post_init__(self) -> None:
        for name, value in (("max_num_seqs", self.max_num_seqs), ("max_waiting", self.max_waiting)):
            if value < 1:
                raise ConfigError(f"{name}: got {value}, must be at least 1")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens: got {self.max_num_batched_tokens}, must be at least max_num_seqs {self.max_num_seqs}"
            )
        if self.policy not in ("fcfs", "priority"):
            raise ConfigError(f"policy: got {self.policy!r}, must be 'fcfs' or 'priority'")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """All that Engine needs beside its runner, which knows the layout, the pool's size and the context."""

    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
