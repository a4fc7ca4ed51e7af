"""The clients of a fault run: every shape of request at once, so that every edge is crossed."""

from __future__ import annotations

import random

from contracts.request import GenerationRequest
from contracts.sampling import SamplingParams
from engine.execution.fake import expected_tokens
from router.choosing.route import Route
from router.exchange import Ask, TokenPrompt
from tests.faults.workers import MODEL
from tests.faults.world import Client


def clients(seed: int) -> list[Client]:
    """Nine that overlap: long chunked prompts, short ones, one token, seeded, two answers, ended at the first token, alone."""
    rng = random.Random(seed * 1000 + 17)

    def prompt(num_tokens: int) -> tuple[int, ...]:
        return tuple(rng.randrange(1, MODEL.vocab_size) for _ in range(num_tokens))

    shared = prompt(64)
    first = prompt(60)
    (stop, *_) = expected_tokens(GenerationRequest("x", first, SamplingParams(temperature=0.0, max_tokens=1)), MODEL)
    asks = [
        ask(0, (*shared, *prompt(90)), max_tokens=12),
        ask(1, prompt(230), max_tokens=16),
        ask(2, prompt(5), max_tokens=10),
        ask(3, prompt(17), max_tokens=1),
        ask(4, prompt(40), max_tokens=15, temperature=1.0, seed=seed + 5),
        ask(5, prompt(50), max_tokens=8, temperature=1.0, seed=seed, n=2),
        ask(6, first, max_tokens=9, stop_token_ids=(stop,)),
        ask(7, prompt(30), max_tokens=10, route=Route.COLOCATED),
        ask(8, (*shared, *prompt(150)), max_tokens=10),
    ]
    return [Client(number, rng.uniform(0.05, 0.25), ask) for number, ask in enumerate(asks)]


def ask(number: int, prompt: tuple[int, ...], n: int = 1, route: Route | None = None, **sampling) -> Ask:
    """A greedy ask of exactly max_tokens, unless `sampling` says otherwise."""
    params = SamplingParams(**{"temperature": 0.0, "ignore_eos": True, **sampling})
    return Ask(request_id=f"client-{number}", prompt=TokenPrompt(prompt), sampling=params, n=n, route=route)
