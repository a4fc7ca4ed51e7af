"""Workers of different sizes: a request goes to those that can hold all of it; a tiny one makes nobody else smaller."""

from dataclasses import replace

import pytest

from contracts.clock import VirtualClock
from contracts.kv_layout import KVLayout
from contracts.sampling import SamplingParams
from contracts.worker import WorkerInfo, WorkerKind, WorkerRef
from router.choosing import fit
from router.choosing.route import Route
from router.config import RetryConfig
from router.serving.progress import Job, Progress

LAYOUT = KVLayout("m", "float32", 1, 1, 8, 16)
MODEL = 8192


def worker(kind, max_model_len, num_blocks=10_000):
    return WorkerInfo(WorkerRef(f"{kind}", 1), kind, "h:1", "m", LAYOUT, (), max_model_len, num_blocks)


def decode(max_model_len, num_blocks=10_000):
    return worker(WorkerKind.DECODE, max_model_len, num_blocks)


def prefill(max_model_len, num_blocks=10_000):
    return worker(WorkerKind.PREFILL, max_model_len, num_blocks)


def progress(num_prompt, max_tokens, num_made=0):
    sampling = replace(SamplingParams(), max_tokens=max_tokens)
    job = Job(request_id="r", prompt_token_ids=(1,) * num_prompt, sampling=sampling, deadline=60.0)
    made = Progress(job, VirtualClock(), RetryConfig())
    made.token_ids.extend([1] * num_made)
    return made


def test_the_whole_of_a_request_fits_the_context():
    for kind in (prefill, decode):
        assert fit.fits(kind(64), progress(60, 4))
        assert not fit.fits(kind(63), progress(60, 4))


def test_a_decode_worker_has_memory_for_all_and_a_prefill_worker_for_what_is_known():
    assert fit.fits(decode(1000, num_blocks=4), progress(61, 4)), "the last token's KV is never computed"
    assert not fit.fits(decode(1000, num_blocks=4), progress(61, 5))
    assert fit.fits(prefill(1000, num_blocks=4), progress(64, 500))
    assert not fit.fits(prefill(1000, num_blocks=4), progress(64, 500, num_made=1))


@pytest.mark.parametrize(
    ("workers", "alone", "handed_over"),
    [
        ([], MODEL, MODEL),
        ([decode(100)], 100, 100),
        ([decode(100), decode(3)], 100, 100),
        ([prefill(2), decode(100)], 100, 2),
        ([prefill(2), prefill(80), decode(100)], 100, 80),
        ([prefill(100), decode(1_000_000)], MODEL, 100),
        ([prefill(3)], MODEL, 3),
    ],
)
def test_the_longest_that_some_pair_takes(workers, alone, handed_over):
    assert fit.max_model_len(MODEL, workers) == alone
    assert fit.max_model_len(MODEL, workers, Route.COLOCATED) == alone
    assert fit.max_model_len(MODEL, workers, Route.DISAGGREGATED) == handed_over


def test_memory_and_context_must_be_in_one_worker():
    workers = [decode(4096, num_blocks=10), decode(512), prefill(8192)]
    assert fit.kv_capacity(4096, workers) == 160
    assert fit.kv_capacity(512, workers) == 160_000
    assert fit.kv_capacity(4097, workers) is None
    assert fit.most_tokens(MODEL, workers) == 512
    assert fit.most_tokens(MODEL, []) == MODEL
