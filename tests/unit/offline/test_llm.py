"""`LLM` on the tiny model: answers that do not depend on company, faults that leave nothing behind."""

import threading

import pytest

from contracts.errors import ConfigError
from offline import LLM, SamplingParams

TINY = "tests/fixtures/tiny-austen"
PROMPTS = ["It is a truth", "She walked to the window and", "Mr. Darcy"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
OPTIONS = {"threads": 1, "kv_memory_bytes": 16 << 20}


@pytest.fixture(scope="module")
def llm():
    with LLM(TINY, **OPTIONS) as loaded:
        yield loaded


def ids(outputs):
    return [output.outputs[0].token_ids for output in outputs]


def test_alone_and_together_the_tokens_are_the_same(llm):
    params = SamplingParams(temperature=0.9, seed=5, max_tokens=16)
    together = llm.generate(PROMPTS, params)
    assert [output.prompt for output in together] == PROMPTS
    assert ids(together) == [ids(llm.generate(prompt, params))[0] for prompt in PROMPTS]
    assert ids(llm.generate([output.prompt_token_ids for output in together], params)) == ids(together)
    assert all(len(tokens) <= 16 for tokens in ids(together))


def test_each_prompt_may_have_parameters_of_its_own(llm):
    short, long = SamplingParams(temperature=0.0, max_tokens=2), SamplingParams(temperature=0.0, max_tokens=9)
    outputs = llm.generate(PROMPTS[:2], [short, long])
    assert [len(tokens) for tokens in ids(outputs)] == [2, 9]
    assert [output.outputs[0].finish_reason for output in outputs] == ["length", "length"]


def test_more_prompts_than_a_step_takes_are_all_answered():
    with LLM(TINY, **OPTIONS, max_num_seqs=2, max_num_batched_tokens=4) as small:
        outputs = small.generate(PROMPTS * 3, GREEDY)
    assert ids(outputs)[:3] == ids(outputs)[3:6] == ids(outputs)[6:]


def test_a_stop_text_ends_the_answer_before_it(llm):
    whole = llm.generate(PROMPTS[0], GREEDY)[0].outputs[0].text
    stop = whole[8:12]
    cut = llm.generate(PROMPTS[0], SamplingParams(temperature=0.0, max_tokens=12, stop=stop))[0].outputs[0]
    assert cut.text == whole[: whole.index(stop)] and cut.finish_reason == "stop"


def test_logprobs_where_they_are_asked_for(llm):
    (output,) = llm.generate(PROMPTS[0], SamplingParams(temperature=0.0, max_tokens=4, logprobs=2, prompt_logprobs=1))
    answer = output.outputs[0]
    assert [entry.token_id for entry in answer.logprobs] == list(answer.token_ids)
    assert all(entry.rank == 1 and len(entry.top) == 2 for entry in answer.logprobs)
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids) and output.prompt_logprobs[0] is None
    assert llm.generate(PROMPTS[0], GREEDY)[0].outputs[0].logprobs == ()


def test_the_prefix_cache_lives_from_call_to_call(llm):
    prompt = list(range(1, 65))
    llm.generate(prompt, GREEDY)
    again = llm.generate(prompt, GREEDY)[0]
    assert again.num_cached_tokens >= 48


def test_a_prompt_that_cannot_run_is_named_and_none_has_begun(llm):
    with pytest.raises(ValueError, match=r"prompt 2: prompt: got 0"):
        llm.generate([PROMPTS[0], []], GREEDY)
    with pytest.raises(ValueError, match=r"prompt 1: prompt_token_ids: got 999999"):
        llm.generate([999_999], GREEDY)
    with pytest.raises(ValueError, match=r"prompt 1: max_tokens: got 1000000"):
        llm.generate(PROMPTS[0], SamplingParams(max_tokens=1_000_000))
    with pytest.raises(TypeError, match="prompts"):
        llm.generate(5)
    assert ids(llm.generate(PROMPTS[0], GREEDY)) == ids(llm.generate(PROMPTS[:1], GREEDY))


def test_nothing_in_is_nothing_out(llm):
    assert llm.generate([], GREEDY) == []


def test_a_model_without_a_template_cannot_chat(llm):
    with pytest.raises(ValueError, match="conversation 1: messages"):
        llm.chat([{"role": "user", "content": "hello"}], GREEDY)


def test_without_a_tokenizer_there_are_ids_only(llm):
    with LLM(TINY, **OPTIONS, tokenizer=False) as bare:
        (output,) = bare.generate([5, 6, 7], GREEDY)
        assert output.prompt is None and output.outputs[0].text == ""
        assert ids([output]) == ids(llm.generate([5, 6, 7], GREEDY))
        with pytest.raises(ValueError, match="prompt 1: got a text"):
            bare.generate("text", GREEDY)
        with pytest.raises(ValueError, match="stop"):
            bare.generate([5], SamplingParams(stop="x"))
        with pytest.raises(ValueError, match="chat"):
            bare.chat([{"role": "user", "content": "hello"}])


def test_an_interruption_leaves_the_engine_as_it_was(llm, monkeypatch):
    before = ids(llm.generate(PROMPTS, GREEDY))
    real, calls = llm._engine.step, []

    def step():
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real()

    monkeypatch.setattr(llm._engine, "step", step)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, GREEDY)
    monkeypatch.undo()
    assert not llm._engine.has_work
    llm._engine.check_integrity()
    assert ids(llm.generate(PROMPTS, GREEDY)) == before


def test_a_second_threads_call_is_refused(llm, monkeypatch):
    inside, go_on = threading.Event(), threading.Event()
    real = llm._engine.step

    def step():
        inside.set()
        go_on.wait(60)
        return real()

    monkeypatch.setattr(llm._engine, "step", step)
    first = threading.Thread(target=llm.generate, args=(PROMPTS[0], GREEDY))
    first.start()
    assert inside.wait(60)
    with pytest.raises(RuntimeError, match="another thread"):
        llm.generate(PROMPTS[0], GREEDY)
    go_on.set()
    first.join(60)
    assert not first.is_alive()


def test_a_closed_one_says_so():
    closed = LLM(TINY, **OPTIONS)
    closed.close()
    closed.close()
    with pytest.raises(RuntimeError, match="closed"):
        closed.generate("x")


def test_a_model_that_is_not_there_is_named():
    with pytest.raises(ConfigError, match="nothing-here"):
        LLM("./nothing-here")
    with pytest.raises(TypeError, match="model: got 5"):
        LLM(5)
