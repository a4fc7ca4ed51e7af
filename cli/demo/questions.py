"""The questions of the demo: of unlike length, some greedy and some sampled, over both protocols.

Chosen so that a model of 135 million parameters has something sensible to say. The longest carries a speech of 1863, which
makes its hand-off worth measuring. Does not know how they are asked.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

GETTYSBURG = """Four score and seven years ago our fathers brought forth on this continent, a new nation, conceived in \
Liberty, and dedicated to the proposition that all men are created equal.

Now we are engaged in a great civil war, testing whether that nation, or any nation so conceived and so dedicated, can \
long endure. We are met on a great battle-field of that war. We have come to dedicate a portion of that field, as a final \
resting place for those who here gave their lives that that nation might live. It is altogether fitting and proper that \
we should do this.

But, in a larger sense, we can not dedicate -- we can not consecrate -- we can not hallow -- this ground. The brave men, \
living and dead, who struggled here, have consecrated it, far above our poor power to add or detract. The world will \
little note, nor long remember what we say here, but it can never forget what they did here. It is for us the living, \
rather, to be dedicated here to the unfinished work which they who fought here have thus far so nobly advanced. It is \
rather for us to be here dedicated to the great task remaining before us -- that from these honored dead we take \
increased devotion to that cause for which they gave the last full measure of devotion -- that we here highly resolve \
that these dead shall not have died in vain -- that this nation, under God, shall have a new birth of freedom -- and \
that government of the people, by the people, for the people, shall not perish from the earth."""


class Protocol(StrEnum):
    """Which of the router's APIs a question takes."""

    OPENAI = "OpenAI"
    GRPC = "gRPC"


@dataclass(frozen=True, slots=True)
class Question:
    """One question. `title` is what the screen shows; temperature 0 is greedy."""

    title: str
    content: str
    protocol: Protocol
    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    @property
    def sampling_words(self) -> str:
        """How its tokens are chosen, in words."""
        return "greedy" if self.temperature == 0.0 else f"temperature {self.temperature:g}, seed {self.seed}"


QUESTIONS = (
    Question("The capital of France", "What is the capital of France?", Protocol.OPENAI, 32),
    Question("How a rainbow forms", "Explain in two sentences how a rainbow forms.", Protocol.GRPC, 72),
    Question(
        "Three tips for sleeping well",
        "Give me three tips for sleeping well.",
        Protocol.OPENAI,
        80,
        temperature=0.6,
        top_p=0.9,
        seed=7,
    ),
    Question(
        "A lighthouse keeper and a lost ship",
        "Tell me a very short story about a lighthouse keeper and a lost ship.",
        Protocol.GRPC,
        80,
        temperature=0.6,
        top_p=0.9,
        seed=7,
    ),
    Question(
        "What is the Gettysburg Address about?",
        f"Read this speech and say in one sentence what it is about.\n\n{GETTYSBURG}",
        Protocol.OPENAI,
        80,
    ),
    Question(
        "The main idea of the same speech",
        f"{GETTYSBURG}\n\nWhat is the main idea of this speech?",
        Protocol.GRPC,
        64,
        temperature=0.6,
        top_p=0.9,
        seed=7,
    ),
)
