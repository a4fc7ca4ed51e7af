"""Prompts from the command line and from files, checked one by one; the place of a bad one is named.

    prompts.txt      one prompt a line; empty lines are passed over
    prompts.jsonl    one JSON object a line: {"prompt": "text"} or {"messages": [{"role": "user", "content": "…"}, …]}

Does not know tokens.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from contracts.errors import ConfigError
from router.text.chat_template import Conversation, Message

MAX_FILE_BYTES = 256 * 2**20


class _Turn(msgspec.Struct, forbid_unknown_fields=True):
    role: str
    content: str


class _Line(msgspec.Struct, forbid_unknown_fields=True):
    prompt: str | None = None
    messages: list[_Turn] | None = None


Prompt = str | Conversation


def from_text(text: str, *, chat: bool) -> Prompt:
    """A prompt as it is, or as what a user says in a conversation."""
    return Conversation((Message("user", text),)) if chat else text


def from_file(path: Path, *, chat: bool) -> list[Prompt]:
    """All prompts of a .jsonl or text file. Raises ConfigError naming file, line and what is allowed."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(f"--file: {path} is larger than {MAX_FILE_BYTES // 2**20} MiB")
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ConfigError(f"--file: {path} is not UTF-8 at byte {error.start}") from error
    except OSError as error:
        raise ConfigError(f"--file: {path}: {error.strerror}") from error
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise ConfigError(f"--file: {path} has no prompts")
    if path.suffix == ".jsonl":
        return [_from_json(line, f"{path}:{number}", chat=chat) for number, line in numbered]
    return [from_text(line, chat=chat) for _, line in numbered]


def _from_json(line: str, where: str, *, chat: bool) -> Prompt:
    try:
        content = msgspec.json.decode(line, type=_Line)
    except msgspec.DecodeError as error:
        raise ConfigError(f'--file: {where}: {error}; must be {{"prompt": …}} or {{"messages": …}}') from error
    if (content.prompt is None) == (content.messages is None):
        raise ConfigError(f'--file: {where}: must have either "prompt" or "messages"')
    if content.messages is not None:
        return Conversation(tuple(Message(turn.role, turn.content) for turn in content.messages))
    return from_text(content.prompt or "", chat=chat)
