"""The truths that the field gets wrong: one row each, a question and what its answer must be like whoever makes it.

What a row claims (how many tokens, why it ends) is checked against the slow truth too, so that no row loses its point.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from contracts.sampling import SamplingParams
from tests.equivalence.truths.case import Chat, Question
from tests.equivalence.truths.house import BOS, EOS

PROMPT = "It is a truth universally acknowledged, that a single man in possession of a good fortune, must be"
GREEDY = SamplingParams(
    temperature=0.0, max_tokens=12
)  # '\n' 'd' 'is' 'ag' 'ree' 'able' ',' ' and' ' the' ' c' 'ir' 'c'
WARM = SamplingParams(temperature=0.9, top_p=0.95, top_k=200, seed=3, max_tokens=12)
ALWAYS_EOS = replace(GREEDY, logit_bias=((EOS, 100.0),))
# The likeliest of what was said least: the three bytes of one character, over and over, one in each token.
SUN = replace(GREEDY, logit_bias=((100, 98.0), (164, 100.0), (247, 99.0)), frequency_penalty=2.0)
# ' the', then ' and', then ' of', and from then on ' the': presence counts once.
EACH_ONCE = replace(GREEDY, logit_bias=((270, 100.0), (283, 99.0), (285, 99.5)), presence_penalty=2.0)
WHOLE, STREAM, GRPC = "openai", "openai-stream", "grpc"


@dataclass(frozen=True, kw_only=True)
class Row:
    """`stop`, `finish` and `num_tokens` are those of answer 0. `cuts`: after how many tokens its worker is lost."""

    name: str
    question: Question
    finish: str = "length"
    stop: str | int | None = None
    num_tokens: int = 12
    at_prefill: bool = False  # the first token is the last, and the worker that makes it knows
    doors: tuple[str, ...] = (WHOLE, STREAM, GRPC)


def ask(sampling: SamplingParams = GREEDY, prompt: str | tuple[int, ...] | Chat = PROMPT, **more: object) -> Question:
    return Question(prompt=prompt, sampling=sampling, **more)


def _length(name: str, question: Question, num_tokens: int = 12, **more: object) -> Row:
    return Row(name=name, question=question, num_tokens=num_tokens, **more)


def _stopped(name: str, question: Question, num_tokens: int, stop: str | int, **more: object) -> Row:
    return Row(name=name, question=question, finish="stop", stop=stop, num_tokens=num_tokens, **more)


FIRST_TOKEN = [
    _stopped("EOS first", ask(ALWAYS_EOS), 1, EOS, at_prefill=True),
    _stopped("EOS first, shown", ask(ALWAYS_EOS, skip_special_tokens=False), 1, EOS, at_prefill=True),
    _stopped("EOS first, kept", ask(ALWAYS_EOS, skip_special_tokens=False, include_stop=True), 1, EOS, at_prefill=True),
    _stopped("EOS first, n", ask(ALWAYS_EOS, n=3), 1, EOS, at_prefill=True),
    _stopped("stop id first", ask(replace(GREEDY, stop_token_ids=(200, 5), logprobs=2)), 1, 200, at_prefill=True),
    _length("max_tokens 1", ask(replace(GREEDY, max_tokens=1, logprobs=3)), 1, at_prefill=True),
    _length("max_tokens 1, n", ask(replace(WARM, max_tokens=1), n=2), 1, at_prefill=True),
    _stopped("stop string first", ask(stop=("\n",)), 1, "\n"),
    _stopped("stop string first, kept", ask(stop=("\n",), include_stop=True), 1, "\n"),
    _stopped(
        "stop string is all of one token", ask(replace(GREEDY, max_tokens=1), stop=("\n",)), 1, "\n", at_prefill=True
    ),
    _length("max_tokens 2", ask(replace(GREEDY, max_tokens=2, logprobs=1)), 2),
]

BORDERS = [
    _stopped("min_tokens 1", ask(replace(ALWAYS_EOS, min_tokens=1)), 2, EOS),
    _stopped("min_tokens 3", ask(replace(ALWAYS_EOS, min_tokens=3, logprobs=1)), 4, EOS),
    _stopped(
        "min_tokens holds back a stop id", ask(replace(GREEDY, min_tokens=7, stop_token_ids=(200, 13, 270))), 8, 200
    ),
    _length("min_tokens is max_tokens", ask(replace(ALWAYS_EOS, min_tokens=12))),
    _length("ignore_eos", ask(replace(ALWAYS_EOS, ignore_eos=True), skip_special_tokens=False)),
    _length("ignore_eos after min_tokens", ask(replace(ALWAYS_EOS, ignore_eos=True, min_tokens=2, logprobs=0))),
    _stopped("stop id at the second token", ask(replace(GREEDY, stop_token_ids=(69,))), 2, 69),
    _stopped(
        "stop id at the third token, kept", ask(replace(GREEDY, stop_token_ids=(276,)), include_stop=True), 3, 276
    ),
    _stopped("stop id in the middle", ask(replace(GREEDY, stop_token_ids=(13,), logprobs=2)), 7, 13),
    _stopped("stop string over tokens 1|2", ask(stop=("\nd",)), 2, "\nd"),
    _stopped("stop string over tokens 2|3", ask(stop=("x", "di")), 3, "di"),
    _stopped(
        "stop string over six tokens", ask(replace(GREEDY, logprobs=1), stop=("isagreeable,",)), 7, "isagreeable,"
    ),
    _stopped(
        "stop string over all, kept", ask(stop=("\ndisagreeable, and",), include_stop=True), 8, "\ndisagreeable, and"
    ),
    _stopped("stop string behind min_tokens", ask(replace(GREEDY, min_tokens=8), stop=("d", "c")), 10, "c"),
    _stopped("min_tokens in the middle of a character", ask(replace(SUN, min_tokens=4), stop=("日",)), 6, "日"),
    _length("a stop string that never ends", ask(stop=("\ndisagreeable, and the circum",))),
    _length("characters of several tokens", ask(SUN)),
    _length("half a character at the end", ask(replace(SUN, max_tokens=11, logprobs=1)), 11),
    _stopped("stop string of many bytes", ask(SUN, stop=("日日",)), 6, "日日"),
    _stopped("stop string of one character, kept", ask(SUN, stop=("日",), include_stop=True), 3, "日"),
]

NUMBERS = [
    _length("logprobs", ask(replace(GREEDY, logprobs=5))),
    _length("logprobs 0", ask(replace(WARM, logprobs=0))),
    _length("chat logprobs", ask(replace(GREEDY, logprobs=4), Chat("What is a good fortune?"))),
    _length("prompt_logprobs", ask(replace(GREEDY, prompt_logprobs=2, logprobs=2)), doors=(WHOLE, GRPC)),
    _length("repetition penalty", ask(replace(GREEDY, repetition_penalty=1.3, logprobs=1))),
    _length("repetition reward", ask(replace(GREEDY, repetition_penalty=0.8))),
    _length("presence penalty", ask(EACH_ONCE)),
    _length("frequency reward", ask(replace(WARM, frequency_penalty=-1.5, presence_penalty=0.7))),
    _length(
        "all penalties",
        ask(replace(WARM, repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.8, logprobs=1)),
    ),
    _length("seeded", ask(WARM)),
    _length("seeded, top_k", ask(replace(WARM, top_p=1.0, top_k=7, seed=2**63 - 1))),
    _length("seeded, top_p", ask(replace(WARM, top_p=0.5, top_k=0, temperature=1.7))),
    _length("seeded, min_p", ask(replace(WARM, top_p=1.0, top_k=0, min_p=0.05, temperature=1.3, seed=11))),
    _length("seeded, nothing cut", ask(replace(WARM, top_p=1.0, top_k=0, temperature=1.0, seed=4))),
    _length("n", ask(replace(WARM, logprobs=2), n=3)),
    _length("n, greedy", ask(n=2)),
    _stopped("n, stopped at their own places", ask(WARM, stop=("e",), n=4), 6, "e"),
]

COUNTS = [
    _length("asked before", ask(warm=2)),
    _length("asked before, n", ask(WARM, warm=2, n=2)),
    _length("asked before, whole blocks", ask(replace(GREEDY, max_tokens=8), tuple(range(40, 88)), warm=2), 8),
    _stopped(
        "asked before, stop id first", ask(replace(GREEDY, stop_token_ids=(200,)), warm=2), 1, 200, at_prefill=True
    ),
    _length("asked before, prompt_logprobs", ask(replace(GREEDY, prompt_logprobs=0), warm=2), doors=(WHOLE, GRPC)),
    _length("one token asked", ask(prompt=(270,))),
    _length("a prompt that says BOS", ask(prompt="<|bos|>" + PROMPT)),
    _length("a conversation, whose template says BOS", ask(replace(WARM, seed=9), Chat("Who is Mr. Knightley?"))),
    _length("BOS given twice as tokens", ask(prompt=(BOS, BOS, 270, 281))),
]

ECHO = [
    _length("echo", ask(echo=True), doors=(WHOLE, STREAM)),
    _length("echo of tokens", ask(prompt=(270, 164, 247, 100, 281), echo=True), doors=(WHOLE, STREAM)),
    _length("echo, logprobs", ask(replace(WARM, logprobs=2, prompt_logprobs=2), echo=True, n=2), doors=(WHOLE, STREAM)),
    _length(
        "echo alone",
        ask(replace(GREEDY, max_tokens=1), echo=True, prompt_only=True),
        0,
        at_prefill=True,
        doors=(WHOLE, STREAM),
    ),
    _length(
        "echo alone, logprobs",
        ask(replace(GREEDY, max_tokens=1, logprobs=3, prompt_logprobs=3), echo=True, prompt_only=True),
        0,
        at_prefill=True,
        doors=(WHOLE, STREAM),
    ),
    _stopped(
        "echo, the stop string is in the prompt",
        ask(stop=("tr", "ruth", "cir"), echo=True),
        11,
        "cir",
        doors=(WHOLE, STREAM),
    ),
]

ROWS = [*FIRST_TOKEN, *BORDERS, *NUMBERS, *COUNTS, *ECHO]
EVERY_CUT = [row for row in ROWS if row.name in ("characters of several tokens", "all penalties")]
SENT_TWICE = [row for row in (*BORDERS[::4], *NUMBERS[::3], *COUNTS[::2]) if row.num_tokens > 1]
