"""Prompts from files: lines, JSON lines with conversations, ShareGPT's JSON.

    prompts.txt       one prompt a line
    prompts.jsonl     {"prompt": "…", "output_tokens": 64} or {"messages": [{"role": …, "content": …}, …]}: a chat log; what the
                      assistant said last is not sent, its length is the answer's
    sharegpt.json     [{"conversations": [{"from": "human", "value": …}, {"from": "gpt", "value": …}, …]}, …]: the first two turns

Lengths are counted by a tokenizer where one is given, else as words. Does not know arrival times.
"""

from __future__ import annotations

from codecs import BOM_UTF8
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path

import msgspec

from bench.serving.requests import BenchRequest, Form, Prompt, Turn, checked_length
from contracts.errors import ConfigError

MAX_FILE_BYTES = 2 * 2**30
_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "assistant": "assistant"}
CountTokens = Callable[[str], int]


class _Message(msgspec.Struct):
    role: str
    content: str


class _Line(msgspec.Struct):
    prompt: str | None = None
    messages: list[_Message] | None = None
    output_tokens: int | None = None


class _Said(msgspec.Struct):
    value: str
    speaker: str = msgspec.field(name="from")


class _Conversation(msgspec.Struct):
    conversations: list[_Said] = []
    conversation: list[_Said] = []


@dataclass(frozen=True, slots=True)
class FileLoad:
    """How to read. `output_len` None takes the recorded answer's length, or `default_output_len` where there is none."""

    form: Form
    num_prompts: int
    output_len: int | None = None
    count: CountTokens = lambda text: len(text.split())
    default_output_len: int = 64


def lines_of(path: Path, most: int) -> Iterator[tuple[str, str]]:
    """The first `most` lines that are not empty, each with its place. Raises ConfigError; also when there is none."""
    found = 0
    try:
        with path.open(encoding="utf-8-sig") as file:
            for number, line in enumerate(file, 1):
                if line.strip() and found < most:
                    found += 1
                    yield f"{path}:{number}", line.strip()
                elif found >= most:
                    return
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 at byte {error.start}") from error
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    if not found:
        raise ConfigError(f"{path} has no requests")


def read_prompts(path: Path, load: FileLoad) -> tuple[BenchRequest, ...]:
    """Of a .jsonl or text file, in order, from the beginning again where there are too few. Raises ConfigError."""
    lines = lines_of(path, load.num_prompts)
    if path.suffix == ".jsonl":
        found = [_of_json(where, line, load) for where, line in lines]
    else:
        found = [_request(_as_form(line, load.form), load.count(line), None, load) for _, line in lines]
    return tuple(islice(cycle(found), load.num_prompts))


def read_sharegpt(path: Path, load: FileLoad) -> tuple[BenchRequest, ...]:
    """First prompts and the lengths of their answers, in order, from the beginning again where there are too few.

    Conversations that do not begin with a person's turn and an answer are left out. Raises ConfigError.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
        if len(content) > MAX_FILE_BYTES:
            raise ConfigError(f"{path} is larger than {MAX_FILE_BYTES // 2**30} GiB")
        listed = msgspec.json.decode(content.removeprefix(BOM_UTF8), type=list[_Conversation])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: {error}; must be ShareGPT's JSON") from error
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    found: list[BenchRequest] = []
    for said in (each.conversations or each.conversation for each in listed):
        roles = [_ROLES.get(turn.speaker) for turn in said[:2]]
        if roles == ["user", "assistant"] and said[0].value.strip() and said[1].value.strip():
            asked, answer = said[0].value, said[1].value
            found.append(_request(_as_form(asked, load.form), load.count(asked), load.count(answer), load))
        if len(found) == load.num_prompts:
            break
    if not found:
        raise ConfigError(f"{path} has no conversation of a person's turn and an answer")
    return tuple(islice(cycle(found), load.num_prompts))


def tokenizer_count(path: Path) -> CountTokens:
    """Counts by a tokenizer.json, or the one of a model's directory. Raises ConfigError."""
    from tokenizers import Tokenizer

    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(f"--tokenizer: {file} is not there")
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises Exception itself
        raise ConfigError(f"--tokenizer: {file}: {error}") from error
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids)


def _of_json(where: str, text: str, load: FileLoad) -> BenchRequest:
    try:
        line = msgspec.json.decode(text, type=_Line)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(f'{where}: {error}; must be {{"prompt": …}} or {{"messages": …}}') from error
    if (line.prompt is None) == (line.messages is None):
        raise ConfigError(f'{where}: must have either "prompt" or "messages"')
    if line.output_tokens is not None:
        checked_length(where, "output_tokens", line.output_tokens)
    if line.prompt is not None:
        return _request(_as_form(line.prompt, load.form), load.count(line.prompt), line.output_tokens, load)
    turns = tuple(Turn(message.role, message.content) for message in line.messages or ())
    recorded = line.output_tokens
    if turns and turns[-1].role == "assistant":
        recorded = recorded or load.count(turns[-1].content)
        turns = turns[:-1]
    if not turns:
        raise ConfigError(f"{where}: messages must have a turn before the answer")
    if load.form is not Form.CHAT:
        raise ConfigError(
            f"{where}: a conversation, and --form is text; chat takes it, with --backend openai-chat or diptych"
        )
    return _request(turns, sum(load.count(turn.content) for turn in turns), recorded, load)


def _request(prompt: Prompt, length: int, recorded: int | None, load: FileLoad) -> BenchRequest:
    return BenchRequest(prompt, load.output_len or max(1, recorded or load.default_output_len), length)


def _as_form(text: str, form: Form) -> Prompt:
    return (Turn("user", text),) if form is Form.CHAT else text
