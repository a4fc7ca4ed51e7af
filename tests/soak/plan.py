"""What is asked when, and who is disturbed when: everything drawn from one seed before anything runs.

    seed ──▶ questions(…)      a catalogue, each with one true answer per index
         ──▶ requests(…)       endless: pause, question, protocol, whether and when its client leaves
         ──▶ disturbances(…)   until the end: at, kind, victims, how long

Whether a planned disturbance happens also depends on who is up at that time; all else repeats. Does not know
clusters or clients.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

ORDINARY_FROM = 3  # token ids below are BOS, EOS and the like
TEMPERATURE = 0.9  # of seeded questions
STOPS = (" the", "e ", ".", "and", "ing")  # common in what the tiny model writes, so that they match at any place


class Door(StrEnum):
    """How the router is spoken to."""

    GRPC = "grpc"
    SSE = "sse"
    WHOLE = "whole"  # HTTP, not streamed


class Kind(StrEnum):
    """What is done to a process."""

    KILL = "kill"  # SIGKILL
    TERM = "term"  # SIGTERM
    STOP = "stop"  # SIGSTOP, later SIGCONT
    FLUSH = "flush"  # the rest befalls a Redis: emptied
    FULL = "full"  # takes no writes
    SILENT = "silent"  # answers nobody


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt and how to answer it; `seed` None is greedy."""

    prompt: tuple[int, ...]
    max_tokens: int
    seed: int | None = None
    n: int = 1
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    penalty: float = 0.0


@dataclass(frozen=True, slots=True)
class Planned:
    """One request. Its client leaves after `leave_s` or after `leave_pieces` pieces, whichever is set; else it stays."""

    pause_s: float
    question: int  # index in the catalogue
    door: Door
    leave_s: float | None = None
    leave_pieces: int | None = None


@dataclass(frozen=True, slots=True)
class Disturbance:
    """At `at_s` after the begin, `kind` happens to the first of `victims` that is up; a stopped one goes on after `length_s`."""

    at_s: float
    kind: Kind
    victims: tuple[str, ...]
    length_s: float = 0.0


def questions(seed: int, count: int, vocab_size: int, longest: int) -> tuple[Question, ...]:
    """A catalogue: shared beginnings, short, unlike and long prompts up to `longest` tokens; greedy and seeded."""
    rng = random.Random(f"{seed}/questions")

    def tokens(number: int) -> tuple[int, ...]:
        return tuple(rng.randrange(ORDINARY_FROM, vocab_size) for _ in range(number))

    beginnings = [tokens(rng.choice((33, 64, 96, 130))) for _ in range(4)]
    made = []
    for _ in range(count):
        shape = rng.choices(("shared", "short", "unlike", "long"), (40, 25, 25, 10))[0]
        if shape == "shared":
            prompt = rng.choice(beginnings) + tokens(rng.randint(1, 40))
        elif shape == "short":
            prompt = tokens(rng.randint(1, 15))
        elif shape == "unlike":
            prompt = tokens(rng.randint(16, 200))
        else:
            prompt = tokens(rng.randint(longest // 2, longest))
        seeded = rng.random() < 0.5
        made.append(
            Question(
                prompt=prompt,
                max_tokens=rng.choice((1, 2, 8, 24, 48, 96, 200)),
                seed=rng.randrange(2**31) if seeded else None,
                n=2 if seeded and rng.random() < 0.25 else 1,
                stop=(rng.choice(STOPS),) if rng.random() < 0.25 else (),
                ignore_eos=rng.random() < 0.5,
                penalty=rng.choice((0.0, 0.0, 0.5)),
            )
        )
    return tuple(made)


def requests(seed: int, count: int, rate_hz: float) -> Iterator[Planned]:
    """Requests without end over a catalogue of `count` questions, `rate_hz` a second on average, three in four together with
    the one before; one in six leaves.
    """
    rng = random.Random(f"{seed}/requests")
    while True:
        door = rng.choices(tuple(Door), (45, 40, 15))[0]
        leave_s = leave_pieces = None
        if rng.random() < 1 / 6:
            if door is Door.WHOLE or rng.random() < 0.5:
                leave_s = min(rng.expovariate(1 / 0.3), 10.0)
            else:
                leave_pieces = rng.randrange(0, 12)
        pause_s = rng.expovariate(rate_hz / 4) if rng.random() < 1 / 4 else 0.0
        yield Planned(pause_s, rng.randrange(count), door, leave_s, leave_pieces)


def disturbances(seed: int, victims: tuple[str, ...], length_s: float, every_s: float) -> tuple[Disturbance, ...]:
    """All of a run of `length_s`, `every_s` apart on average. In the second half the first victim of each pool is only
    ever stopped, never ended: its memory can be watched.
    """
    rng = random.Random(f"{seed}/disturbances")
    spared = {next(v for v in victims if v.startswith(pool)) for pool in ("prefill", "decode")}
    made: list[Disturbance] = []
    at_s = 0.0
    while True:
        at_s += 1.0 + rng.expovariate(1 / max(every_s - 1.0, 0.1))
        kind = rng.choices((Kind.KILL, Kind.TERM, Kind.STOP), (45, 25, 30))[0]
        order = tuple(rng.sample(victims, len(victims)))
        pause_s = rng.choice((0.05, 0.5, 2.0, 4.0, 8.0)) * rng.uniform(0.5, 1.5)
        if at_s >= length_s:
            return tuple(made)
        if at_s > length_s / 2 and kind is not Kind.STOP:
            order = tuple(victim for victim in order if victim not in spared)
        made.append(Disturbance(at_s, kind, order, pause_s if kind is Kind.STOP else 0.0))


def shared_disturbances(seed: int, redis: str, router: str, length_s: float, every_s: float) -> tuple[Disturbance, ...]:
    """The same for what routers share, and for one of them: one after the other, each with its length, then a rest."""
    rng = random.Random(f"{seed}/shared")
    of_redis = (Kind.KILL, Kind.STOP, Kind.FLUSH, Kind.FULL, Kind.SILENT)
    made: list[Disturbance] = []
    at_s = 0.0
    while True:
        at_s += 1.0 + rng.expovariate(1 / max(every_s - 1.0, 0.1))
        victim = rng.choices((redis, router), (60, 40))[0]
        kind = rng.choice(of_redis if victim == redis else (*of_redis[:2], Kind.TERM))
        lengths = (0.1, 1.0, 3.0, 7.0, 20.0) if victim == redis and length_s >= 600.0 else (0.1, 1.0, 3.0, 7.0)
        lasts_s = 0.0 if kind in (Kind.FLUSH, Kind.TERM) else rng.choice(lengths) * rng.uniform(0.5, 1.5)
        if at_s + lasts_s >= length_s:
            return tuple(made)
        made.append(Disturbance(at_s, kind, (victim,), lasts_s))
        at_s += lasts_s
