"""Requests refuse what cannot work, naming field, value and limit."""

import math
from dataclasses import replace

import pytest

from contracts.errors import InvalidRequest
from contracts.request import GenerationRequest
from contracts.sampling import SamplingParams

GOOD = GenerationRequest("r", (1, 2, 3), SamplingParams(max_tokens=4))


def test_a_good_request_passes():
    GOOD.validate(vocab_size=10, max_model_len=8)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", math.nan),
        ("top_k", -1),
        ("min_p", -0.5),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", 1e-300),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("max_tokens", 0),
        ("min_tokens", 5),
        ("seed", -1),
        ("logprobs", 21),
        ("prompt_logprobs", -1),
        ("stop_token_ids", (10,)),
        ("logit_bias", ((10, 1.0),)),
        ("logit_bias", ((1, math.nan),)),
    ],
)
def test_each_sampling_field_is_bounded_and_named(field, value):
    bad = replace(GOOD, sampling=replace(GOOD.sampling, **{field: value}))
    with pytest.raises(InvalidRequest) as caught:
        bad.validate(vocab_size=10, max_model_len=8)
    assert caught.value.field == field
    assert field in caught.value.message


@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        ((), "prompt"),
        ((1,) * 8, "prompt"),
        ((1, 10), "prompt_token_ids"),
        ((3, -1), "prompt_token_ids"),
        ((1,) * 5, "max_tokens"),
    ],
)
def test_each_prompt_fault_is_named(prompt, field):
    with pytest.raises(InvalidRequest) as caught:
        replace(GOOD, prompt_token_ids=prompt).validate(vocab_size=10, max_model_len=8)
    assert caught.value.field == field
