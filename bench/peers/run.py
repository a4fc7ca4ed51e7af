"""The rounds: every subject loads and is stopped; then, in turns, each goes on alone, prefills, decodes, and is stopped again.

    start ── ready ── SIGSTOP ──▶ (SIGCONT ── one short turn ── SIGSTOP) ──▶ rounds × (SIGCONT ── one turn ── SIGSTOP) ──▶ killed

Who is stopped has no thread that spins, and keeps its weights. The machine's limits are taken in each round, beside what is
measured against them. An engine that does not load or fails is left out, and the report says so. Knows no engine.
"""

from __future__ import annotations

import json
import random
import re
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import IO

from bench.limits import Limits, measure_limits
from bench.peers.forms import ROOT
from bench.peers.subjects import Subject
from bench.progress import Say

BATCHES = (1, 8, 16)
LIMIT_TRIES = 2


@dataclass(frozen=True, slots=True)
class PeersConfig:
    """Sizes in tokens."""

    threads: int = 2
    rounds: int = 5
    prefill_tokens: int = 1024
    decode_prompt_tokens: int = 32
    decode_tokens: int = 16
    warm_tokens: int = 4
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Turn:
    """What one subject did in one round, and the first tokens that it made (a peer of the right model makes ours)."""

    prefill_tokens_per_s: float
    step_s: dict[int, float]  # by batch size
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Outcome:
    """All rounds with one model. `versions` by engine; `failed` has reasons by label."""

    limits: tuple[Limits, ...]
    turns: dict[str, list[Turn]]
    versions: dict[str, str]
    failed: dict[str, str]


class Failed(Exception):
    """A subject's process ended; carries its last words."""


def last_words(said: str) -> str:
    """The last line that tells of an error, else the last with anything in it: some libraries go on to talk when they end."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    errors = [line for line in lines if re.search(r"\b\w*(Error|Exception)\b\W|^error:", line)]
    return (errors or lines or ["no word"])[-1]


@dataclass
class Running:
    """A subject's process. Owns it until `end`."""

    subject: Subject
    process: subprocess.Popen[str]
    words: IO[bytes]
    version: str = ""
    turns: list[Turn] = field(default_factory=list)

    def heard(self) -> dict[str, object]:
        """Its next line."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.words.seek(0)
            raise Failed(last_words(self.words.read().decode(errors="replace")))
        said: dict[str, object] = json.loads(line)
        return said

    def ask(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> tuple[list[float], tuple[int, ...]]:
        """Ends of steps and the first prompt's tokens."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"prompts": prompts, "num_tokens": num_tokens}) + "\n")
        self.process.stdin.flush()
        made = self.heard()
        ends, tokens = made["ends_s"], made["tokens"]
        assert isinstance(ends, list) and isinstance(tokens, list)
        if len(ends) != num_tokens:
            raise Failed(f"{len(ends)} steps for {num_tokens} tokens")
        return ends, tuple(tokens)

    @contextmanager
    def awake(self) -> Iterator[None]:
        """It runs while this is entered."""
        self.process.send_signal(signal.SIGCONT)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGSTOP)

    def end(self) -> None:
        """Gone, whatever it was doing."""
        self.process.kill()
        self.process.communicate()
        self.words.close()


def started(subject: Subject) -> Running:
    """Loaded and stopped. Raises Failed."""
    # It lives as long as the process does: `end` closes it.
    words = tempfile.TemporaryFile()  # noqa: SIM115
    pipe = subprocess.PIPE
    process = subprocess.Popen(subject.command, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=words, text=True)
    running = Running(subject, process, words)
    try:
        running.version = str(running.heard()["ready"])
    except (Failed, json.JSONDecodeError):
        running.end()
        raise
    process.send_signal(signal.SIGSTOP)
    return running


def turn(running: Running, config: PeersConfig, vocab_size: int, seed: int) -> Turn:
    """Prefill once, then decode at each batch size, on the prompts of `seed`; a step is the mean of those after the first."""
    rng = random.Random(seed)

    def prompts(count: int, length: int) -> list[list[int]]:
        return [[rng.randrange(vocab_size) for _ in range(length)] for _ in range(count)]

    with running.awake():
        prefill_s = running.ask(prompts(1, config.prefill_tokens), 1)[0][0]
        steps: dict[int, float] = {}
        tokens: tuple[int, ...] = ()
        for batch in BATCHES:
            ends, made = running.ask(prompts(batch, config.decode_prompt_tokens), config.decode_tokens)
            steps[batch] = (ends[-1] - ends[0]) / (len(ends) - 1)
            tokens = tokens or made
    return Turn(config.prefill_tokens / prefill_s, steps, tokens)


def run_rounds(subjects: Sequence[Subject], vocab_size: int, config: PeersConfig, say: Say) -> Outcome:
    """One model, all subjects; some minutes."""
    failed: dict[str, str] = {}
    running: list[Running] = []

    def tried(one: Running, settings: PeersConfig, seed: int) -> Turn | None:
        try:
            return turn(one, settings, vocab_size, seed)
        except (Failed, BrokenPipeError, json.JSONDecodeError) as error:
            failed[one.subject.label] = str(error) or "its process ended"
            say(f"peers: {one.subject.label} failed: {failed[one.subject.label]}")
            return None

    try:
        for subject in subjects:
            say(f"peers: loading {subject.label}")
            try:
                running.append(started(subject))
            except (Failed, json.JSONDecodeError) as error:
                failed[subject.label] = str(error)
                say(f"peers: {subject.label} does not load: {error}")
        short = replace(config, decode_tokens=config.warm_tokens)
        for one in running:
            tried(one, short, config.seed)
        limits = []
        for number in range(config.rounds):
            say(f"peers: round {number + 1} of {config.rounds}")
            limits.append(measure_limits(config.threads, LIMIT_TRIES))
            for one in running[number % len(running) :] + running[: number % len(running)]:
                done = None if one.subject.label in failed else tried(one, config, config.seed + 1 + number)
                if done is not None:
                    one.turns.append(done)
    finally:
        for one in running:
            one.end()
    whole = {one.subject.label: one.turns for one in running if one.subject.label not in failed}
    return Outcome(tuple(limits), whole, {one.subject.engine: one.version for one in running}, failed)
