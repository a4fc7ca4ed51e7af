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
    """Which door of the router a question takes."""

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
    Question("What is the capital of France?", "What is the capital of France?", Protocol.OPENAI, 48),
    Question("Why is the sky blue?", "Why is the sky blue? Explain it to a child.", Protocol.GRPC, 72),
    Question(
        "A story about a lighthouse",
        "Tell me a very short story about a lighthouse keeper and a lost ship.",
        Protocol.OPENAI,
        72,
        temperature=0.8,
        top_p=0.9,
        seed=7,
    ),
    Question(
        "Advice for a rainy day",
        "Give me three ideas for what to do on a rainy day.",
        Protocol.GRPC,
        72,
        temperature=0.7,
        top_p=0.95,
        seed=42,
    ),
    Question(
        "The Gettysburg Address in one sentence",
        f"Summarise this speech in one sentence.\n\n{GETTYSBURG}",
        Protocol.GRPC,
        64,
    ),
    Question(
        "Who gave this speech?",
        f"Here is a famous speech.\n\n{GETTYSBURG}\n\nWho gave it, and why?",
        Protocol.OPENAI,
        48,
        temperature=0.5,
        seed=1863,
    ),
)
