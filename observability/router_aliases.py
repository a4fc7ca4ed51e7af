"""The vllm:* series that make sense at a router, whose engine label is "0": of users' requests, whichever workers they ran on.

What only a worker knows (steps, preemptions, transfers) it has under vLLM's names itself: `observability.worker_aliases`.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from observability import names
from observability.buckets import N_BUCKETS, REQUEST_BUCKETS, TOKEN_BUCKETS
from observability.labels import FINISHED_REASON
from observability.samples import RequestSample
from observability.series import OneEngine, counter


class RouterAliases:
    """Counts into a router's registry, from one thread."""

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        labels = (model_name, "0")
        made = OneEngine(registry, labels)
        self._prompt = made.counter(names.V_PROMPT_TOKENS)
        self._generated = made.counter(names.V_GENERATION_TOKENS)
        self._queries = made.counter(names.V_CACHE_QUERIES)
        self._hits = made.counter(names.V_CACHE_HITS)
        sources = counter(registry, names.V_PROMPT_SOURCES)
        self._computed_here = sources.labels(*labels, "local_compute")
        self._cached_here = sources.labels(*labels, "local_cache_hit")
        success = counter(registry, names.V_SUCCESS)
        self._ended = {reason: success.labels(*labels, reason) for reason in FINISHED_REASON.values}
        self._queue = made.histogram(names.V_QUEUE_TIME, REQUEST_BUCKETS)
        self._prefill = made.histogram(names.V_PREFILL_TIME, REQUEST_BUCKETS)
        self._decode = made.histogram(names.V_DECODE_TIME, REQUEST_BUCKETS)
        self._inference = made.histogram(names.V_INFERENCE_TIME, REQUEST_BUCKETS)
        self._prompt_size = made.histogram(names.V_PROMPT_SIZE, TOKEN_BUCKETS)
        self._output_size = made.histogram(names.V_OUTPUT_SIZE, TOKEN_BUCKETS)
        self._max_output = made.histogram(names.V_MAX_OUTPUT, TOKEN_BUCKETS)
        self._computed = made.histogram(names.V_COMPUTED, TOKEN_BUCKETS)
        self._n = made.histogram(names.V_PARAM_N, N_BUCKETS)
        self._max_tokens = made.histogram(names.V_PARAM_MAX_TOKENS, TOKEN_BUCKETS)

    def observe(self, sample: RequestSample) -> None:
        """One request is over."""
        num_computed = max(0, sample.num_prompt_tokens - sample.num_cached_tokens)
        self._prompt.inc(sample.num_prompt_tokens)
        self._generated.inc(sample.num_output_tokens)
        self._queries.inc(sample.num_prompt_tokens)
        self._hits.inc(sample.num_cached_tokens)
        self._computed_here.inc(num_computed)
        self._cached_here.inc(sample.num_cached_tokens)
        if sample.route != "none":  # else it was refused, and never began
            self._ended[_reason(sample)].inc()
        if not sample.succeeded or sample.ttft_s is None:
            return
        stages, decode_s = sample.stages, sample.e2e_s - sample.ttft_s
        self._queue.observe(stages.admission_s + stages.prefill_queue_s)
        self._prefill.observe(stages.prefill_compute_s)
        self._decode.observe(decode_s)
        self._inference.observe(stages.prefill_compute_s + decode_s)
        self._prompt_size.observe(sample.num_prompt_tokens)
        self._output_size.observe(sample.num_output_tokens)
        self._max_output.observe(sample.num_longest_tokens)
        self._computed.observe(num_computed)
        self._n.observe(sample.num_answers)
        self._max_tokens.observe(sample.max_tokens)


def _reason(sample: RequestSample) -> str:
    """vLLM's word for how it ended."""
    if sample.succeeded:
        return sample.outcome
    return "abort" if sample.outcome == "CANCELLED" else "error"
