"""The vllm:* series of a worker, whose engine label is the name of its pool: of requests as its engine saw them.

A prompt that is handed off counts as finished where it was read, by `length`, as with vLLM's own P/D, and once more where it is
written. Used from the engine's thread. Does not know engines.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from observability import names
from observability.buckets import REQUEST_BUCKETS, STEP_TOKEN_BUCKETS, TOKEN_BUCKETS
from observability.labels import SOURCE
from observability.samples import EngineSample
from observability.series import OneEngine, counter, gauge


class WorkerAliases:
    """Counts into a worker's registry."""

    def __init__(self, registry: CollectorRegistry, model_name: str, pool: str) -> None:
        labels = self._labels = (model_name, pool)
        made = OneEngine(registry, labels)
        self._registry = registry
        self._prompt = made.counter(names.V_PROMPT_TOKENS)
        self._generated = made.counter(names.V_GENERATION_TOKENS)
        self._preemptions = made.counter(names.V_PREEMPTIONS)
        sources = counter(registry, names.V_PROMPT_SOURCES)
        self._sources = {source: sources.labels(*labels, source) for source in SOURCE.values}
        success = counter(registry, names.V_SUCCESS)
        self._ended = {reason: success.labels(*labels, reason) for reason in ("stop", "length", "error")}
        self._iteration = made.histogram(names.V_ITERATION_TOKENS, STEP_TOKEN_BUCKETS)
        self._queue = made.histogram(names.V_QUEUE_TIME, REQUEST_BUCKETS)
        self._prefill = made.histogram(names.V_PREFILL_TIME, REQUEST_BUCKETS)
        self._decode = made.histogram(names.V_DECODE_TIME, REQUEST_BUCKETS)
        self._inference = made.histogram(names.V_INFERENCE_TIME, REQUEST_BUCKETS)
        self._prompt_size = made.histogram(names.V_PROMPT_SIZE, TOKEN_BUCKETS)
        self._output_size = made.histogram(names.V_OUTPUT_SIZE, TOKEN_BUCKETS)
        self._computed = made.histogram(names.V_COMPUTED, TOKEN_BUCKETS)
        self._max_tokens = made.histogram(names.V_PARAM_MAX_TOKENS, TOKEN_BUCKETS)

    def describe(self, block_size: int, num_blocks: int, caching: bool, dtype: str) -> None:
        """The KV memory's facts. Called once."""
        facts = str(block_size), str(num_blocks), str(caching), dtype
        gauge(self._registry, names.V_CACHE_CONFIG).labels(*self._labels, *facts).set(1)

    def step(self, num_scheduled: int, num_made: int, num_preempted: int) -> None:
        """One step: tokens computed, tokens sampled, requests preempted."""
        self._iteration.observe(num_scheduled)
        self._generated.inc(num_made)
        self.preempted(num_preempted)

    def preempted(self, num_requests: int) -> None:
        """So many were."""
        self._preemptions.inc(num_requests)

    def ended(self, sample: EngineSample) -> None:
        """One request has left."""
        num_prompt = sample.num_prompt_tokens
        self._ended[sample.reason].inc()
        if sample.reason == "error":
            return
        self._prompt.inc(num_prompt)
        self._queue.observe(sample.queue_s)
        self._inference.observe((sample.prefill_s or 0.0) + (sample.decode_s or 0.0))
        if sample.external:
            self._sources["external_kv_transfer"].inc(num_prompt)
        else:
            num_computed = max(0, num_prompt - sample.num_cached_tokens)
            self._sources["local_cache_hit"].inc(sample.num_cached_tokens)
            self._sources["local_compute"].inc(num_computed)
            self._computed.observe(num_computed)
        if sample.prefill_s is not None:
            self._prefill.observe(sample.prefill_s)
        if sample.decode_s is not None:
            self._decode.observe(sample.decode_s)
        self._prompt_size.observe(num_prompt)
        self._output_size.observe(sample.num_output_tokens)
        self._max_tokens.observe(sample.max_tokens)
