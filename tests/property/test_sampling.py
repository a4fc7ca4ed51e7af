"""A row's token is its own: any batch around it, in any order, gives the same token and the same log-probabilities, bit for bit."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts.sampling import SamplingParams
from engine.execution.interface import ScheduledRequest
from engine.sampling.sampler import Sampler

torch.set_num_threads(1)
VOCAB = 97
SAMPLER = Sampler(VOCAB, frozenset({0}))

token_ids = st.integers(0, VOCAB - 1)
# Half of the rows take the batch's fast path, so that batches mix both.
plain_params = st.just(SamplingParams(temperature=0.0, max_tokens=99))
any_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1e-6, 0.5, 1.0, 3.0]),
    top_k=st.sampled_from([0, 1, 5, 200]),
    top_p=st.sampled_from([1.0, 0.9, 0.1]),
    min_p=st.sampled_from([0.0, 0.1]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    presence_penalty=st.sampled_from([0.0, 0.5]),
    frequency_penalty=st.sampled_from([0.0, -0.5]),
    logit_bias=st.sampled_from([(), ((3, 4.0),)]),
    seed=st.integers(0, 2**63 - 1),
    max_tokens=st.just(99),
    min_tokens=st.sampled_from([0, 4]),
    stop_token_ids=st.sampled_from([(), (7, 8)]),
    logprobs=st.sampled_from([None, 0, 3]),
)


@st.composite
def requests(draw):
    prompt = draw(st.lists(token_ids, min_size=1, max_size=5))
    output = draw(st.lists(token_ids, max_size=5))
    known = prompt + output
    return ScheduledRequest("r", known, len(prompt), len(known) - 1, 1, [0], draw(st.one_of(plain_params, any_params)))


@settings(max_examples=60, deadline=None)
@given(data=st.data(), rows=st.lists(requests(), min_size=1, max_size=6))
def test_the_batch_around_a_row_does_not_matter(data, rows):
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    logits = (torch.randn(len(rows), VOCAB, generator=generator) * 3).to(dtype)  # bfloat16 makes ties
    alone = [SAMPLER.sample(logits[i : i + 1], [row])[0] for i, row in enumerate(rows)]
    assert list(SAMPLER.sample(logits, rows)) == alone
    chosen = data.draw(
        st.lists(st.sampled_from(range(len(rows))), min_size=1, max_size=8)
    )  # a subset, reordered, with repeats
    assert list(SAMPLER.sample(logits[chosen], [rows[i] for i in chosen])) == [alone[i] for i in chosen]


@settings(max_examples=60, deadline=None)
@given(row=requests(), seed=st.integers(0, 1000))
def test_a_token_is_one_that_its_parameters_allow(row, seed):
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
    token_id = SAMPLER.sample(logits, [row])[0].token_id
    assert 0 <= token_id < VOCAB
    if len(row.token_ids) - row.num_prompt_tokens < row.sampling.min_tokens:
        assert token_id not in {0, *row.sampling.stop_token_ids}
