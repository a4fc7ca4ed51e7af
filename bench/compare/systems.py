"""What is compared: so many workers of each kind, each with cores of its own.

    1P1D           prefill 0    decode 1          colocated 0/1          two workers that do both

Does not start them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from contracts.errors import ConfigError
from rpc.cores import Cores, check_usable, written


@dataclass(frozen=True, slots=True)
class System:
    """A cluster. `prefill` and `decode` are each worker's cores; without prefill workers the others do both.

    `step_tokens` is the most tokens that a worker computes in one step, None as the engine has it.
    """

    name: str
    prefill: tuple[Cores, ...]
    decode: tuple[Cores, ...]
    step_tokens: int | None = None

    @property
    def worker_cores(self) -> tuple[Cores, ...]:
        """Of each worker, prefill workers first."""
        return (*self.prefill, *self.decode)

    @property
    def cores(self) -> Cores:
        """All of them, in order."""
        return tuple(sorted(core for group in self.worker_cores for core in group))

    @property
    def where(self) -> str:
        """In words, who has which cores."""
        pools = (("prefill", self.prefill), ("decode" if self.prefill else "workers", self.decode))
        said = [f"{name} {'/'.join(written(group) for group in groups)}" for name, groups in pools if groups]
        step = [] if self.step_tokens is None else [f"at most {self.step_tokens} tokens a step"]
        return ", ".join([*said, *step])


def apart(prefill: tuple[Cores, ...], decode: tuple[Cores, ...]) -> System:
    """The system of two pools."""
    return System(f"{len(prefill)}P{len(decode)}D", prefill, decode)


def together(workers: tuple[Cores, ...], step_tokens: int | None = None) -> System:
    """The system of workers that do both."""
    step = "" if step_tokens is None else f", {step_tokens} a step"
    return System(f"{len(workers)} colocated{step}", (), workers, step_tokens)


def check_equal(systems: Sequence[System]) -> None:
    """Raises ConfigError where the first system and another one have not the same cores, or a core is nobody's here."""
    first = systems[0]
    if len(set(first.cores)) < len(first.cores):
        raise ConfigError(f"--decode-cores: a core is given to a prefill worker, too ({first.where})")
    for other in systems[1:]:
        if len(other.cores) != len(first.cores):
            raise ConfigError(
                f"--colocated-cores: {len(other.cores)} ({other.where}) must be as many as {first.name} has, "
                f"{len(first.cores)} ({first.where})"
            )
        if other.cores != first.cores:
            raise ConfigError(f"--colocated-cores: {other.where} must be the cores of {first.name} ({first.where})")
    check_usable("--prefill-cores", [core for group in first.prefill for core in group])
    check_usable("--decode-cores", [core for group in first.decode for core in group])
