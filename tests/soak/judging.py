"""From everything that was seen to a list of what must not be. Pure: its tests make every sentence come out.

What DESIGN section 7 allows is no violation, but is counted, and must stay rare: a 503 (UNAVAILABLE) before the first token,
when the retry budget is spent because one worker after the other died, and a 429 (RESOURCE_EXHAUSTED) when the queue is full.

Memory is flat when what a life still gains in its second half is small, or so slow that it is no leak of ours (see `Flat`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from tests.soak.asking import Heard, Outcome
from tests.soak.plan import Kind
from tests.soak.watching import Footprint

ALLOWED_SHARE = 0.01
SHOWN_LINES = 10
STALL_SAID_WITHIN_S = 10.0
_STALLED = re.compile(r"^(\S+) +\| (\S+)Z ERROR .* no progress although there is work")
_BEFORE_THE_FIRST_TOKEN = ("503:", "UNAVAILABLE:")
_FULL = ("429:", "RESOURCE_EXHAUSTED:")
_PLANNED_ENDINGS = {Kind.KILL: "killed by SIGKILL", Kind.TERM: "exited with code 0"}


@dataclass(frozen=True, slots=True)
class Flat:
    """A life of at least `life_s` is judged over its second half: it breaks the bound when it gains more than `gain_mib` there
    and does so faster than `mib_per_min`.
    """

    life_s: float
    gain_mib: float
    mib_per_min: float = 0.5

    def broken_by(self, life: Life) -> bool:
        """Whether this life is long enough to be judged, and not flat."""
        if life.length_s < self.life_s:
            return False
        gain_mib, slope = life.second_half()
        return gain_mib > self.gain_mib and slope > self.mib_per_min


@dataclass(frozen=True, slots=True)
class Life:
    """Private memory of one process over time."""

    name: str
    pid: int
    samples: tuple[tuple[float, float], ...]  # (seconds, MiB)

    @property
    def length_s(self) -> float:
        """From the first sample to the last."""
        return self.samples[-1][0] - self.samples[0][0] if self.samples else 0.0

    def second_half(self) -> tuple[float, float]:
        """(MiB gained, MiB per minute) in the second half, by a line of least squares."""
        middle = self.samples[0][0] + self.length_s / 2
        half = [(t, m) for t, m in self.samples if t >= middle]
        mean_t = sum(t for t, _ in half) / len(half)
        mean_m = sum(m for _, m in half) / len(half)
        spread = sum((t - mean_t) ** 2 for t, _ in half)
        slope = sum((t - mean_t) * (m - mean_m) for t, m in half) / spread if spread else 0.0
        return slope * (half[-1][0] - half[0][0]), slope * 60


@dataclass(slots=True)
class Tally:
    """What became of the requests."""

    outcomes: Counter[Outcome] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    allowed: list[str] = field(default_factory=list)
    hung: list[str] = field(default_factory=list)
    excused: list[str] = field(default_factory=list)  # with the router that was asked
    slowest_s: float = 0.0

    def add(self, name: str, heard: Heard, wrong: Sequence[str], *, excused: bool = False) -> None:
        """One request is over; `wrong` says how its answer differs from the truth. It may have failed when `excused`."""
        self.outcomes[heard.outcome] += 1
        self.wrong += [f"{name}: {what}" for what in wrong]
        if heard.outcome is Outcome.DONE:
            self.slowest_s = max(self.slowest_s, heard.took_s)
        if heard.outcome is Outcome.HUNG:
            self.hung.append(f"{name}: no end after {heard.took_s:.0f} s, {heard.num_pieces} pieces")
        if heard.outcome is Outcome.FAILED:
            where = self.excused if excused else self.allowed if is_allowed(heard) else self.failed
            where.append(f"{name}: after {heard.num_pieces} pieces and {heard.took_s:.1f} s: {heard.error}")


def is_allowed(heard: Heard) -> bool:
    """Whether DESIGN section 7 lets this request fail."""
    return heard.num_pieces == 0 and heard.error.startswith((*_BEFORE_THE_FIRST_TOKEN, *_FULL))


@dataclass(frozen=True, slots=True)
class Pause:
    """A worker was stopped from `begin` to `end`, seconds since 1970."""

    name: str
    begin: float
    end: float

    def explains(self, line: str) -> bool:
        """Whether this log line is what a process says that finds itself stalled when it goes on again."""
        found = _STALLED.match(line)
        if found is None or found[1] != self.name:
            return False
        said_at = datetime.fromisoformat(found[2]).replace(tzinfo=UTC).timestamp()
        return self.begin <= said_at <= self.end + STALL_SAID_WITHIN_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """Everything that was seen of one run. Names are those of the processes."""

    tally: Tally
    all_ready: bool  # at the end, after the last disturbance
    running: float  # requests at the router when idle
    kv_usage: Mapping[str, float]  # when idle; a worker that is missing was not heard of
    workers: Sequence[str]
    ended_by_us: Mapping[str, Sequence[Kind]]
    endings: Sequence[tuple[str, str]]
    pauses: Sequence[Pause]
    complaints: Sequence[str]
    before: Mapping[str, Footprint]  # calm, before the load
    after: Mapping[str, Footprint]  # calm again
    lives: Sequence[Life]
    left_over: Sequence[str]
    exit_code: int | None


@dataclass(frozen=True, slots=True)
class Bounds:
    """What is still no violation.

    A worker keeps a kernel for each size of matrix that it has met, all of them after some thousand prompts, and a decode
    worker meets most of them only when it runs alone. So a worker may have `over_calm_mib` more than those of its pool had
    before the load; and a long life that has more than those at all must be flat. The other processes must be flat.

    `more_fds` is for one process, calm before and after: tcp keeps up to four lines for each pair of workers.
    """

    flat: Flat = Flat(75, 4)
    flat_workers: Flat = Flat(600, 8)
    over_calm_mib: float = 80.0
    more_fds: int = 8

    def grown(self, found: Findings) -> list[Life]:
        """Lives whose memory breaks a bound."""
        return [life for life in found.lives if life.length_s >= self.flat.life_s and self._is_grown(life, found)]

    def _is_grown(self, life: Life, found: Findings) -> bool:
        if life.name not in found.workers:
            return self.flat.broken_by(life)
        pool = life.name.split("-")[0]
        calm_mib = max(before.private_mib for name, before in found.before.items() if name.split("-")[0] == pool)
        over_mib = life.samples[-1][1] - calm_mib
        return over_mib > self.over_calm_mib or (over_mib > 0 and self.flat_workers.broken_by(life))


def violations(found: Findings, bounds: Bounds) -> list[str]:
    """Sentences, each about one thing that must not be; none for a good run."""
    tally = found.tally
    said = [f"wrong: {each}" for each in tally.wrong]
    said += [f"hung: {each}" for each in tally.hung]
    said += [f"failed: {each}" for each in tally.failed]
    asked = sum(tally.outcomes.values())
    if not tally.outcomes[Outcome.DONE]:
        said.append("no request was answered")
    if len(tally.allowed) > ALLOWED_SHARE * asked:
        said.append(f"{len(tally.allowed)} of {asked} requests failed in an allowed way, as {tally.allowed[0]}")
    said += _of_processes(found)
    said += _of_resources(found, bounds)
    said += [f"left over: {each}" for each in found.left_over]
    if found.exit_code != 0:
        said.append(f"the cluster ended with {found.exit_code}, not with 0")
    return said


def _of_processes(found: Findings) -> list[str]:
    said = [] if found.all_ready else ["not every process was ready again at the end"]
    planned = {name: [_PLANNED_ENDINGS[kind] for kind in kinds] for name, kinds in found.ended_by_us.items()}
    for name, how in found.endings:
        if how in planned.get(name, ()):
            planned[name].remove(how)
        else:
            said.append(f"{name} {how}, which nobody asked for")
    said += [
        f"{name}: asked for its end, but it did not come so: {how}" for name, kinds in planned.items() for how in kinds
    ]
    lines = unexplained(found)
    said += [f"log: {line}" for line in lines[:SHOWN_LINES]]
    if len(lines) > SHOWN_LINES:
        said.append(f"log: {len(lines) - SHOWN_LINES} more lines of errors")
    return said


def unexplained(found: Findings) -> list[str]:
    """Complaints that no pause of ours explains."""
    return [line for line in found.complaints if not any(pause.explains(line) for pause in found.pauses)]


def _of_resources(found: Findings, bounds: Bounds) -> list[str]:
    said = [f"{name}: not heard of at the end" for name in found.workers if name not in found.kv_usage]
    said += [f"{name}: {usage:.2%} of its KV blocks held when idle" for name, usage in found.kv_usage.items() if usage]
    if found.running:
        said.append(f"{found.running:g} requests at the router when idle")
    for name, after in found.after.items():
        before = found.before[name]
        more = after.fds - before.fds
        if sum(after.fds.values()) > sum(before.fds.values()) + bounds.more_fds:
            said.append(
                f"{name}: {sum(after.fds.values())} descriptors, before {sum(before.fds.values())}; more: {more}"
            )
        if len(after.memfds) > len(before.memfds):
            said.append(f"{name}: maps {len(after.memfds)} shared segments, before {len(before.memfds)}")
        if len(after.named) > len(before.named):
            said.append(f"{name}: {len(after.named)} abstract sockets, before {len(before.named)}")
        said += [f"{name}: has {file} open" for file in after.shm_files - before.shm_files]
    for life in bounds.grown(found):
        gain_mib, slope = life.second_half()
        said.append(
            f"{life.name} (pid {life.pid}): gained {gain_mib:.1f} MiB in the second half of {life.length_s:.0f} s, "
            f"{slope:.2f} MiB a minute, to {life.samples[-1][1]:.0f} MiB"
        )
    return said
