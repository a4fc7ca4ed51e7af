"""A caller's limits around a request: charged with what it may take, corrected by what it took."""

from dataclasses import replace

import pytest

from contracts.clock import VirtualClock, settle
from contracts.errors import RateLimited
from contracts.sampling import SamplingParams
from router.admission.limits import Kind, LocalBuckets, Rate, Wanted
from router.admission.quota import duration
from router.admission.rate_limits import Estimator, RateLimits
from router.caller import ANYBODY, Caller
from router.config import LimitsConfig
from router.exchange import Ask, ChatPrompt, TextPrompt, TokenPrompt
from router.text.chat_template import Conversation, Message

A = Caller(name="a", tokens_per_minute=600, requests_per_minute=10)


def limits(config=None, heard=None):
    return RateLimits(config or LimitsConfig(), LocalBuckets(VirtualClock()), heard)


async def left(limits, caller=A):
    rates = [(Kind.REQUESTS, caller.requests_per_minute), (Kind.TOKENS, caller.tokens_per_minute)]
    wanted = [Wanted(kind, Rate(limit), 0.0) for kind, limit in rates]
    await settle()
    return tuple(s.remaining for s in (await limits._buckets.take(caller.name, wanted)).standings)


async def test_a_request_is_charged_and_what_it_did_not_use_comes_back():
    rates = limits()
    async with rates.use(A, 500.0) as use:
        assert use.quota.words() == {
            "x-ratelimit-limit-requests": "10",
            "x-ratelimit-remaining-requests": "9",
            "x-ratelimit-reset-requests": "6s",
            "x-ratelimit-limit-tokens": "600",
            "x-ratelimit-remaining-tokens": "100",
            "x-ratelimit-reset-tokens": "50s",
        }
        use.tokens = 50.0
    assert await left(rates) == (9, 550)


async def test_a_request_that_was_let_in_nowhere_is_not_counted():
    rates = limits()
    with pytest.raises(RuntimeError):
        async with rates.use(A, 500.0):
            raise RuntimeError
    assert await left(rates) == (10, 600)
    await rates.close()


async def test_a_request_that_took_more_than_it_said_owes_it():
    rates = limits()
    async with rates.use(A, 100.0) as use:
        use.tokens = 650.0
    assert await left(rates) == (9, 0)
    with pytest.raises(RateLimited) as caught:
        async with rates.use(A, 10.0):
            pass
    assert caught.value.retry_after_s == pytest.approx(6.0)


async def test_over_the_limit_says_which_and_when():
    heard = []
    rates = limits(heard=heard.append)
    async with rates.use(A, 590.0) as use:
        with pytest.raises(RateLimited) as caught:
            async with rates.use(A, 40.0):
                pass
        use.tokens = 590.0
    assert caught.value.retry_after_s == pytest.approx(3.0)
    assert "600 tokens per minute for 'a': 40 tokens wanted, 10 left" in caught.value.message
    assert caught.value.quota["x-ratelimit-remaining-tokens"] == "10"
    assert heard == ["tokens"]


async def test_the_limits_of_the_configuration_are_for_keys_without_their_own():
    rates = limits(LimitsConfig(requests_per_minute=1))
    async with rates.use(ANYBODY, 1e9) as use:
        assert use.quota.words()["x-ratelimit-limit-requests"] == "1"
        with pytest.raises(RateLimited, match="of 1 request per minute: 1 request wanted, 0 left; again in 60 s"):
            async with rates.use(ANYBODY, 1.0):
                pass
        async with rates.use(A, 1.0) as other:
            assert other.quota.words()["x-ratelimit-limit-requests"] == "10"


async def test_without_limits_there_is_no_quota():
    async with limits().use(ANYBODY, 1e9) as use:
        assert use.quota is None


@pytest.mark.parametrize(
    ("prompt", "changes", "tokens"),
    [
        (TokenPrompt(tuple(range(100))), {}, 110),
        (TextPrompt("x" * 400), {}, 110),
        (ChatPrompt(Conversation((Message("user", "x" * 400), Message("assistant", None)))), {}, 110),
        (TokenPrompt(tuple(range(100))), {"n": 3}, 130),
        (TokenPrompt(tuple(range(100))), {"prompt_only": True}, 100),
        (TokenPrompt(tuple(range(100))), {"fill_context": True}, 356),
        (TokenPrompt(tuple(range(100))), {"fill_context": True, "fill_at_most": 20}, 120),
        (TextPrompt(""), {"prompt_only": True}, 1),
    ],
)
def test_what_a_request_is_charged_with(prompt, changes, tokens):
    ask = Ask(request_id="r", prompt=prompt, sampling=SamplingParams(max_tokens=10), **changes)
    assert Estimator().tokens(ask) == tokens


def test_tools_and_further_prompts_and_their_answers_are_charged_as_well():
    talk = Conversation((Message("user", "x" * 40),))
    plain, tools = (
        Ask(request_id="r", prompt=ChatPrompt(conversation), sampling=SamplingParams(max_tokens=7))
        for conversation in (talk, replace(talk, tools=({"name": "f" * 4000},)))
    )
    assert Estimator().tokens(tools) > Estimator().tokens(plain) + 900
    prompt = TokenPrompt((1, 2, 3))
    several = Ask(
        request_id="r", prompt=prompt, more_prompts=(prompt, prompt), n=2, sampling=SamplingParams(max_tokens=7)
    )
    assert Estimator().tokens(several) == 3 * 3 + 6 * 7


def test_an_answer_without_a_bound_is_taken_for_the_average_one():
    estimator = Estimator()
    for _ in range(200):
        estimator.ended(20)
    ask = Ask(request_id="r", prompt=TextPrompt(""), sampling=SamplingParams(), fill_context=True)
    assert estimator.tokens(ask) == pytest.approx(20, rel=0.01)


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0ms"), (0.02, "20ms"), (1.5, "1.5s"), (60, "1m0s"), (361.5, "6m1.5s")]
)
def test_times_as_openai_writes_them(seconds, text):
    assert duration(seconds) == text
