"""`diptych generate`: the engine alone answers prompts from the command line or a file."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TypedDict, Unpack

import click

from cli.commands import flags
from cli.modelsource import fetch
from cli.options import SOME_TEXT, TEXT, SectionedCommand, apply, option
from cli.progress import working
from cli.prompts import Prompt, from_file, from_text
from contracts.errors import ConfigError, InvalidRequest
from contracts.request import GenerationRequest
from contracts.sampling import SamplingParams
from engine.build import ModelRuntimeConfig
from engine.models.store import model_name
from observability.log import configure_logging
from offline.run import OfflineAnswer, OfflineRun, OfflineTotals, TextWish, build_engine
from router.text.chat_template import Conversation
from router.text.model_card import ModelCard, load_model_card

USUAL_ANSWER_TOKENS = 128


class GenerateFlags(TypedDict):
    """What click hands over. Sampling flags have the names of SamplingParams' fields, None where not given."""

    model: str
    cache_dir: Path | None
    dtype: str
    quantization: str
    max_model_len: int | None
    prompt: tuple[str, ...]
    file: Path | None
    chat: bool
    max_tokens: int | None
    min_tokens: int
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float
    frequency_penalty: float
    seed: int
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    kv_memory: int | None
    max_num_batched_tokens: int | None
    max_num_seqs: int | None
    threads: int | None
    as_json: bool
    log_level: str


OPTIONS = (
    flags.model_option,
    flags.dtype_option,
    flags.quantization_option,
    flags.max_model_len_option,
    flags.cache_dir_option,
    option(
        "--prompt",
        section="Prompts",
        type=TEXT,
        multiple=True,
        metavar="TEXT",
        help="A prompt; may be given several times.",
    ),
    option(
        "--file",
        section="Prompts",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        help='Prompts: one a line, or .jsonl with {"prompt": …} or {"messages": [{"role": …, "content": …}]}.',
    ),
    option("--chat", section="Prompts", is_flag=True, help="Prompts are what a user says: use the chat template."),
    option(
        "--max-tokens",
        section="Sampling",
        type=click.IntRange(min=1),
        metavar="TOKENS",
        help=f"Most tokens of an answer. [default: {USUAL_ANSWER_TOKENS}, or what the context leaves]",
    ),
    option("--temperature", section="Sampling", type=float, help="0 is greedy. [default: the model's, else 1]"),
    option(
        "--top-k", section="Sampling", type=int, help="Only the k likeliest tokens; 0 is all. [default: the model's]"
    ),
    option("--top-p", section="Sampling", type=float, help="Nucleus, above 0 to 1. [default: the model's, else 1]"),
    option("--min-p", section="Sampling", type=float, help="Least share of the likeliest token's probability, 0 to 1."),
    option(
        "--repetition-penalty",
        section="Sampling",
        type=float,
        help="0.01 to 100; 1 is none. [default: the model's, else 1]",
    ),
    option("--presence-penalty", section="Sampling", type=float, default=0.0, help="-2 to 2."),
    option("--frequency-penalty", section="Sampling", type=float, default=0.0, help="-2 to 2."),
    option("--seed", section="Sampling", type=int, default=0, help="Same seed, same prompt: same answer."),
    option("--min-tokens", section="Sampling", type=int, default=0, metavar="TOKENS", help="Do not stop before."),
    option(
        "--stop",
        section="Sampling",
        type=SOME_TEXT,
        multiple=True,
        metavar="TEXT",
        help="Ends the answer; may be given several times.",
    ),
    option(
        "--stop-token-id",
        "stop_token_ids",
        section="Sampling",
        type=int,
        multiple=True,
        metavar="ID",
        help="Token that ends the answer; may be given several times.",
    ),
    option("--ignore-eos", section="Sampling", is_flag=True, help="Go on after an end-of-sequence token."),
    flags.kv_memory_option(None, "KV memory. [default: measured, half of what is free]"),
    flags.max_num_batched_tokens_option,
    flags.max_num_seqs_option,
    flags.threads_option("Compute threads. [default: all cores]"),
    option("--json", "as_json", section="Output", is_flag=True, help="One JSON object a prompt instead of text."),
    flags.log_level_option,
)


def sampling_params(given: GenerateFlags, card: ModelCard) -> SamplingParams:
    """The model's defaults with what was given; raises ConfigError naming the flag that is out of its range."""
    wanted = SamplingParams(
        temperature=_or(given["temperature"], card.defaults.temperature),
        top_k=int(_or(given["top_k"], card.defaults.top_k)),
        top_p=_or(given["top_p"], card.defaults.top_p),
        min_p=_or(given["min_p"], card.defaults.min_p),
        repetition_penalty=_or(given["repetition_penalty"], card.defaults.repetition_penalty),
        presence_penalty=given["presence_penalty"],
        frequency_penalty=given["frequency_penalty"],
        seed=given["seed"],
        max_tokens=given["max_tokens"] or max(USUAL_ANSWER_TOKENS, given["min_tokens"]),
        min_tokens=given["min_tokens"],
        stop_token_ids=given["stop_token_ids"],
        ignore_eos=given["ignore_eos"],
    )
    try:
        wanted.validate(card.vocab_size)
    except InvalidRequest as error:
        flag = "stop_token_id" if error.field == "stop_token_ids" else error.field
        raise ConfigError(f"--{flag.replace('_', '-')}: got {error.value}, {error.limit}") from error
    return wanted


def _or(given: float | None, default: float) -> float:
    return default if given is None else given


async def make_requests(
    prompts: Sequence[Prompt], card: ModelCard, sampling: SamplingParams, context: int, *, exact_length: bool
) -> list[GenerationRequest]:
    """Tokenise and check. Without `exact_length` an answer is shortened to what the context leaves."""
    requests = []
    for number, prompt in enumerate(prompts, 1):
        try:
            if isinstance(prompt, Conversation):
                token_ids = await card.encode_chat(prompt)
            else:
                token_ids = await card.tokenizer.encode_text(prompt)
            left = max(1, context - len(token_ids))
            own = sampling if exact_length else replace(sampling, max_tokens=min(sampling.max_tokens, left))
            request = GenerationRequest(f"prompt-{number}", token_ids, own)
            request.validate(card.vocab_size, context)
        except InvalidRequest as error:
            raise ConfigError(f"prompt {number}: {error.message}") from error
        requests.append(request)
    return requests


class Output:
    """Where texts and answers go: streamed for one prompt, in the order of the prompts for several, or as JSON."""

    def __init__(self, requests: Sequence[GenerationRequest], *, as_json: bool, say: Callable[[str], None]) -> None:
        self._stream = len(requests) == 1 and not as_json
        self._num = len(requests)
        self._as_json = as_json
        self._say = say
        self._done: dict[int, OfflineAnswer] = {}
        self._num_done = 0
        self._next = 0

    def text(self, _index: int, text: str) -> None:
        """A piece of an answer."""
        if self._stream:
            sys.stdout.write(text)
            sys.stdout.flush()

    def answer(self, answer: OfflineAnswer) -> None:
        """A whole answer; written once all before it are."""
        self._done[answer.index] = answer
        self._num_done += 1
        self._say(f"{self._num_done} of {self._num} prompts")
        while self._next in self._done:
            self._write(self._done.pop(self._next))
            self._next += 1

    def _write(self, answer: OfflineAnswer) -> None:
        if self._as_json:
            fields = {
                "index": answer.index,
                "text": answer.text,
                "token_ids": answer.token_ids,
                "prompt_tokens": answer.num_prompt_tokens,
                "finish_reason": answer.finish_reason.value,
            }
            sys.stdout.write(json.dumps(fields, ensure_ascii=False) + "\n")
        elif self._stream:
            sys.stdout.write("\n")
        else:
            sys.stdout.write(f"--- prompt {answer.index + 1}\n{answer.text}\n")
        sys.stdout.flush()


def read_prompts(given: GenerateFlags) -> list[Prompt]:
    """From --prompt and --file, in this order. Raises UsageError when there are none."""
    prompts = [from_text(text, chat=given["chat"]) for text in given["prompt"]]
    if given["file"] is not None:
        prompts += from_file(given["file"], chat=given["chat"])
    if not prompts:
        raise click.UsageError("give at least one --prompt TEXT, or --file PATH")
    return prompts


def runtime_config(given: GenerateFlags, model_dir: Path) -> ModelRuntimeConfig:
    """How the model is run; limits that were not given stay the engine's own."""
    base = ModelRuntimeConfig(
        model_dir,
        dtype=given["dtype"],
        quantization=given["quantization"],
        max_model_len=given["max_model_len"],
        threads=given["threads"],
    )
    max_num_seqs = given["max_num_seqs"] or base.max_num_seqs
    batched = given["max_num_batched_tokens"] or max(base.max_num_batched_tokens, max_num_seqs)
    return replace(base, max_num_seqs=max_num_seqs, max_num_batched_tokens=batched)


def answer_all(
    given: GenerateFlags, model_dir: Path, card: ModelCard, requests: list[GenerationRequest]
) -> OfflineTotals:
    """Load the model and run the requests; output as they come."""
    with working(f"Loading {card.name}"):
        engine = build_engine(runtime_config(given, model_dir), given["kv_memory"], max_waiting=len(requests))
    quiet = len(requests) == 1
    shown: AbstractContextManager[Callable[[str], None]] = nullcontext(_silent) if quiet else working("Answering")
    with shown as say:
        output = Output(requests, as_json=given["as_json"], say=say)
        wish = TextWish(card.tokenizer, given["stop"])
        return OfflineRun(engine, output.text, output.answer).run(requests, [wish] * len(requests))


def _silent(_text: str) -> None:
    """One prompt shows its text as it comes; that is progress enough."""


@click.command("generate", cls=SectionedCommand)
def generate(**given: Unpack[GenerateFlags]) -> None:
    """Answer prompts offline: the engine alone, in this process, all prompts in one batch.

    The text goes to stdout (streamed when there is one prompt), the speed to stderr.

    \b
    Examples:
      diptych generate --model smollm2-135m-instruct --chat --temperature 0 --prompt "What is the capital of France?"
      diptych generate --model ./my-model --file prompts.jsonl --max-tokens 64 --temperature 0 --json
    """
    prompts = read_prompts(given)
    configure_logging("generate", given["log_level"])
    model_dir = fetch(given["model"], given["cache_dir"])
    card = load_model_card(model_dir, model_name(model_dir))
    sampling = sampling_params(given, card)
    context = min(given["max_model_len"] or card.max_model_len, card.max_model_len)
    exact = given["max_tokens"] is not None
    requests = asyncio.run(make_requests(prompts, card, sampling, context, exact_length=exact))
    totals = answer_all(given, model_dir, card, requests)
    plural = "s" if len(requests) > 1 else ""
    counts = f"{totals.num_prompt_tokens} prompt tokens, {totals.num_new_tokens} new tokens"
    speed = f"{totals.elapsed_s:.2f} s: {totals.tokens_per_s:.1f} tokens/s"
    click.echo(f"{len(requests)} prompt{plural}, {counts} in {speed}", err=True)


apply(OPTIONS, generate)
