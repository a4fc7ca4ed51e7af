"""Sampling parameters and options: the right kind of number, within its bounds, named when it is not."""

import pytest

from contracts import sampling
from offline import SamplingParams
from offline.options import LLMConfig, checked
from offline.prompts import conversations_of, params_for, prompts_of


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("max_tokens", 16.0, "max_tokens: got 16.0, must be an integer"),
        ("max_tokens", True, "max_tokens: got True, must be an integer"),
        ("max_tokens", "16", "max_tokens: got '16', must be an integer"),
        ("top_k", 5.0, "top_k: got 5.0"),
        ("seed", 1.5, "seed: got 1.5"),
        ("logprobs", False, "logprobs: got False"),
        ("temperature", "hot", "temperature: got 'hot', must be a number"),
        ("temperature", True, "temperature: got True"),
        ("top_p", None.__class__, "top_p"),
        ("ignore_eos", 1, "ignore_eos: got 1, must be True or False"),
        ("stop", 5, "stop: got 5"),
        ("stop", ["a", 5], "stop"),
        ("stop_token_ids", "12", "stop_token_ids: got '12', must be several integers"),
        ("stop_token_ids", [1, 2.0], r"stop_token_ids\[1\]: got 2.0"),
        ("logit_bias", [1], "logit_bias"),
        ("logit_bias", {1: "x"}, r"logit_bias\[1\]: got 'x'"),
        ("logit_bias", {1.0: 1.0}, "logit_bias: got 1.0"),
    ],
)
def test_the_wrong_kind_of_value_is_a_type_error_that_names_it(field, value, words):
    with pytest.raises(TypeError, match=words):
        SamplingParams(**{field: value})


@pytest.mark.parametrize(
    ("field", "value", "limit"),
    [
        ("max_tokens", 0, "1"),
        ("max_tokens", -1, "at least 0"),
        ("min_tokens", 17, "16"),
        ("temperature", -0.1, "at least 0"),
        ("temperature", float("nan"), "at least 0"),
        ("top_p", 0.0, "above 0"),
        ("top_p", 1.1, "at most 1"),
        ("top_k", -2, "at least -1"),
        ("min_p", 2, "at most 1"),
        ("seed", -1, "at least 0"),
        ("seed", sampling.MAX_SEED + 1, str(sampling.MAX_SEED)),
        ("logprobs", 21, "20"),
        ("repetition_penalty", 0, "0.01"),
        ("presence_penalty", 3, "2"),
        ("stop", "", "empty"),
        ("stop", ["a", ""], "empty"),
        ("stop", ["a"] * 129, "128"),
        ("logit_bias", {1: 101.0}, "100"),
        ("logit_bias", {-1: 1.0}, "at least 0"),
        ("stop_token_ids", [-1], "at least 0"),
    ],
)
def test_a_value_out_of_its_bounds_is_a_value_error_with_field_value_and_limit(field, value, limit):
    with pytest.raises(ValueError, match=field) as caught:
        SamplingParams(**{field: value})
    assert limit in str(caught.value)


def test_a_name_that_is_none_is_refused():
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=1.0)
    with pytest.raises(TypeError, match=r"'thread'.*threads"):
        checked({"thread": 2})


def test_what_is_left_out_is_the_models_and_what_is_said_is_not():
    model = sampling.SamplingParams(temperature=0.6, top_k=20, top_p=0.95, repetition_penalty=1.1)
    engine = SamplingParams(top_p=0.5, max_tokens=3).on(model)
    assert (engine.temperature, engine.top_k, engine.top_p, engine.repetition_penalty) == (0.6, 20, 0.5, 1.1)
    assert engine.max_tokens == 3
    engine = SamplingParams(temperature=0, top_k=-1, seed=5, stop_token_ids=[3], logit_bias={7: 1, 2: -1.5}).on(model)
    assert (engine.temperature, engine.top_k, engine.seed, engine.stop_token_ids) == (0, 0, 5, (3,))
    assert engine.logit_bias == ((2, -1.5), (7, 1))


def test_a_seed_that_is_left_out_is_a_new_one_each_time():
    params = SamplingParams()
    assert params.on(sampling.SamplingParams()).seed != params.on(sampling.SamplingParams()).seed


@pytest.mark.parametrize(
    ("field", "value", "kind"),
    [
        ("dtype", 16, TypeError),
        ("max_model_len", 1, ValueError),
        ("max_model_len", 100.0, TypeError),
        ("kv_memory_bytes", "1GiB", TypeError),
        ("kv_memory_bytes", 0, ValueError),
        ("threads", 0, ValueError),
        ("threads", 1.0, TypeError),
        ("max_num_seqs", None, TypeError),
        ("max_num_batched_tokens", 63, ValueError),
        ("prefix_caching", 1, TypeError),
        ("tokenizer", "yes", TypeError),
        ("cache_dir", 3, TypeError),
    ],
)
def test_options_are_checked_by_name(field, value, kind):
    with pytest.raises(kind, match=f"{field}: got"):
        checked({field: value})


def test_a_step_has_room_for_each_prompt():
    assert LLMConfig(max_num_seqs=4096).runtime("model").max_num_batched_tokens == 4096
    assert LLMConfig().runtime("model").max_num_batched_tokens == 2048


def test_one_prompt_or_several():
    assert prompts_of("a") == ["a"]
    assert prompts_of([1, 2]) == [[1, 2]]
    assert prompts_of((1, 2)) == [[1, 2]]
    assert prompts_of(["a", (1, 2)]) == ["a", (1, 2)]
    assert prompts_of([]) == []


@pytest.mark.parametrize("prompts", [5, {"prompt": "a"}, [1, "a"], [["a"]], [[1, 2.0]], [[True]], [None]])
def test_what_is_no_prompt_is_named(prompts):
    with pytest.raises(TypeError, match="prompt"):
        prompts_of(prompts)


def test_one_conversation_or_several():
    hello = {"role": "user", "content": "hello"}
    assert conversations_of([hello]) == conversations_of([[hello]])
    assert len(conversations_of([[hello], [hello, hello]])) == 2
    for wrong in (
        "hello",
        5,
        [5],
        [[]],
        [["x"]],
        [{"role": "user"}],
        [{**hello, "name": "x"}],
        [{"role": 1, "content": ""}],
    ):
        with pytest.raises((TypeError, ValueError)):
            conversations_of(wrong)


def test_parameters_are_for_all_or_for_each():
    one, other = SamplingParams(seed=1), SamplingParams(seed=2)
    assert params_for(None, 2) == [SamplingParams()] * 2
    assert params_for(one, 2) == [one, one]
    assert params_for([one, other], 2) == [one, other]
    with pytest.raises(ValueError, match="got 1"):
        params_for([one], 2)
    with pytest.raises(TypeError, match="sampling_params"):
        params_for({"temperature": 0}, 1)
