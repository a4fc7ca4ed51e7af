"""What one response may become is bounded before any worker is asked, and nobody is refused who asks for what is usual."""

from dataclasses import replace
from pathlib import Path

import pytest

from contracts.errors import InvalidRequest
from contracts.sampling import SamplingParams
from router.exchange import Ask, TokenPrompt
from router.reply_size import MAX_BYTES, fitted
from router.serving.progress import Job
from router.text.model_card import load_model_card

TOKENIZER = load_model_card(Path(__file__).parents[2] / "fixtures/tiny-austen", "tiny").tokenizer
LONG, LONGER = 32_768, 131_071


def asked(num_prompt, num_prompts=1, *, sampling=None, **more):
    prompt = TokenPrompt((300,) * num_prompt)
    sampling = sampling or SamplingParams()
    ask = Ask(request_id="r", prompt=prompt, more_prompts=(prompt,) * (num_prompts - 1), sampling=sampling, **more)
    return ask, [
        Job(request_id="r", prompt_token_ids=p.token_ids, sampling=sampling, deadline=1.0) for p in ask.prompts
    ]


def refused(ask, jobs):
    with pytest.raises(InvalidRequest) as caught:
        fitted(ask, jobs, TOKENIZER)
    return caught.value


def with_prompt(count):
    return SamplingParams(prompt_logprobs=count)


@pytest.mark.parametrize(
    ("ask", "field"),
    [
        (asked(LONG, n=128, each_says_prompt=True, sampling=with_prompt(20)), "n"),
        (asked(LONG, n=128, each_says_prompt=True, sampling=with_prompt(0)), "n"),
        (asked(LONG, 64, n=2, each_says_prompt=True, sampling=with_prompt(20)), "prompt_logprobs"),
        (asked(LONGER, 2, sampling=with_prompt(20)), "prompt_logprobs"),
        (asked(2**21 + 1, 1, n=128, each_says_prompt=True), "n"),
        (asked(2**24, 2, n=2, each_says_prompt=True), "echo"),
    ],
)
def test_what_is_said_of_prompts_again_and_again_is_refused_by_name_with_what_is_possible(ask, field):
    error = refused(*ask)
    assert error.field == field
    assert str(MAX_BYTES) in error.message
    if field == "n":
        most = int(error.limit.removeprefix("at most ").partition(",")[0])
        fewer = replace(ask[0], n=most)
        assert fitted(fewer, ask[1], TOKENIZER) == ask[1]
        assert refused(replace(ask[0], n=most + 1), ask[1]).field == "n"


@pytest.mark.parametrize(
    "ask",
    [
        asked(LONG, n=128),
        asked(LONG, n=128, each_says_prompt=True),  # the text alone: 20 MB
        asked(LONG, sampling=with_prompt(20), each_says_prompt=True),
        asked(LONGER, sampling=with_prompt(20), each_says_prompt=True),
        asked(LONGER, n=128, sampling=with_prompt(20)),  # said once
        asked(4096, 128, sampling=with_prompt(1), each_says_prompt=True),  # an evaluation harness's batch
        asked(5, sampling=SamplingParams(logprobs=20, max_tokens=LONGER), gathered=True),
        asked(5, n=128, sampling=SamplingParams(max_tokens=LONGER), gathered=True),
        asked(5, n=128, sampling=SamplingParams(max_tokens=LONGER, logprobs=20)),  # a stream
    ],
)
def test_what_is_usual_is_served_as_it_was_asked_for(ask):
    assert fitted(*ask, TOKENIZER) == ask[1]


def test_log_probabilities_that_are_held_until_the_end_are_bounded():
    ask, jobs = asked(5, n=128, sampling=SamplingParams(logprobs=20, max_tokens=LONG), gathered=True)
    error = refused(ask, jobs)
    assert (error.field, error.value) == ("max_tokens", str(LONG))
    most = int(error.limit.removeprefix("at most ").partition(" ")[0])
    assert 1000 < most < LONG
    least = replace(jobs[0], sampling=replace(jobs[0].sampling, max_tokens=most))
    assert fitted(ask, [least], TOKENIZER) == [least]
    (clipped,) = fitted(replace(ask, fill_context=True), jobs, TOKENIZER)
    assert clipped.sampling.max_tokens == most, "nobody has asked for so many"
