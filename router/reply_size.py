"""How large the response to one request may become, judged before any worker is asked: what multiplies is refused by name.

    prompts that come before their answers, once for each of n  +  log-probabilities that are held to the end  <=  MAX_BYTES

The text of an answer does not count: `max_tokens` bounds it, and each token of it costs a step. A body of 8 MB that asks for its
prompt 128 times with 20 log-probabilities a token asks for 5 GB, and for minutes of this process's time. About as many bytes as
OpenAI's forms take; nobody is refused for a prompt of 128k tokens that is shown once. Does not know forms or transports.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from contracts.errors import InvalidRequest
from contracts.sampling import SamplingParams
from router.exchange import Ask
from router.serving.progress import Job
from router.text.tokenizer import Tokenizer

MAX_BYTES = 256 * 2**20
_LOGPROB_BYTES = 64  # of one token beside others: its text, the number, and what is around them
_ID_BYTES = 8
_LONGEST_TOKEN = 128  # bytes


def fitted(ask: Ask, jobs: Sequence[Job], tokenizer: Tokenizer) -> Sequence[Job]:
    """The jobs, their `max_tokens` as the response has room for where the client did not say it. Raises InvalidRequest."""
    of_prompts = _bytes_of_prompts(ask, jobs, tokenizer)
    times = ask.n if ask.each_says_prompt else 1
    if times * of_prompts > MAX_BYTES:
        most = MAX_BYTES // of_prompts
        said = f"{of_prompts} bytes for each answer, and a response has at most {MAX_BYTES}"
        if most:
            raise InvalidRequest("n", ask.n, f"at most {most}, where prompts and what is asked of them take {said}")
        named = "echo" if ask.sampling.prompt_logprobs is None else "prompt_logprobs"
        value = True if ask.sampling.prompt_logprobs is None else ask.sampling.prompt_logprobs
        raise InvalidRequest(named, value, f"of these prompts would take {said}")
    per_token = _logprob_bytes(ask.sampling.logprobs)
    if not ask.gathered or not per_token:
        return jobs
    room = max(1, (MAX_BYTES - times * of_prompts) // (per_token * ask.num_answers))
    if ask.fill_context:
        return [replace(job, sampling=_at_most(job.sampling, room)) for job in jobs]
    if max(job.sampling.max_tokens for job in jobs) > room:
        said = f"at most {room} in each of {ask.num_answers} answers, which have {per_token} bytes of log-probabilities a token"
        raise InvalidRequest(
            "max_tokens",
            jobs[0].sampling.max_tokens,
            f"{said}, and a response that is not streamed at most {MAX_BYTES}",
        )
    return jobs


def _bytes_of_prompts(ask: Ask, jobs: Sequence[Job], tokenizer: Tokenizer) -> int:
    """What is said of all prompts, once."""
    of_logprobs = _logprob_bytes(ask.sampling.prompt_logprobs)
    lengths = sum(len(job.prompt_token_ids) for job in jobs)
    if not ask.each_says_prompt:
        return lengths * of_logprobs
    least = lengths * (of_logprobs + _ID_BYTES)
    if ask.n == 1 or ask.n * (least + lengths * _LONGEST_TOKEN) <= MAX_BYTES:  # nearly always: nothing to be counted
        return least
    counts = Counter[int]()
    for job in jobs:
        counts.update(job.prompt_token_ids)
    text = sum(count * len(tokenizer.token_bytes(token_id)) for token_id, count in counts.items())
    return text + least


def _logprob_bytes(asked: int | None) -> int:
    return 0 if asked is None else (asked + 1) * _LOGPROB_BYTES


def _at_most(sampling: SamplingParams, room: int) -> SamplingParams:
    return replace(sampling, max_tokens=max(sampling.min_tokens, 1, min(sampling.max_tokens, room)))
