"""What the router knows of the model: its name, context, vocabulary, tokenizer and default sampling.

Read from a Hugging-Face-style directory: config.json, tokenizer.json, and where they are tokenizer_config.json,
chat_template.jinja and generation_config.json, whose sampling values are defaults as in vLLM. No weights, no torch.
"""

from __future__ import annotations

import hashlib
import json
import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tokenizers import Tokenizer as HFTokenizer

from contracts.context import context_of
from contracts.errors import InvalidRequest, ModelLoadError
from contracts.families import MAX_POSITIONS, VOCAB_SIZE, family_of
from contracts.sampling import MAX_SEED, SamplingParams
from router.text.chat_template import ChatTemplate, Conversation
from router.text.tokenizer import Tokenizer

_MORE_TEMPLATES = "additional_chat_templates"
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")


@dataclass(frozen=True, slots=True)
class ModelCard:
    """One served model. `max_model_len` is its context in tokens: workers may be set to less, never to more.
    `max_new_tokens` is the model's own bound on an answer of no stated length, or None.
    """

    name: str
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    tool_template: ChatTemplate | None  # in place of the other where tools are given
    vocab_size: int
    max_model_len: int
    defaults: SamplingParams
    max_new_tokens: int | None
    fingerprint: str

    def template_for(self, conversation: Conversation) -> ChatTemplate:
        """The template that renders this conversation. Raises InvalidRequest when the model has none."""
        if conversation.tools and self.tool_template is not None:
            return self.tool_template
        if self.chat_template is None:
            raise InvalidRequest("messages", "a conversation", "this model has no chat template; send a plain prompt")
        return self.chat_template

    async def encode_chat(self, conversation: Conversation) -> tuple[int, ...]:
        """A conversation's tokens, rendered in this process: for whoever runs a model that they trust. Raises InvalidRequest."""
        text = self.template_for(conversation).render(conversation)
        return await self.tokenizer.encode_text(text, add_special_tokens=False)

    def check_ids(self, token_ids: Sequence[int], place: str) -> None:
        """Raise InvalidRequest for the first id that the model does not have; `place` names that of an index, as in "tokens.{}"."""
        if not token_ids or (min(token_ids) >= 0 and max(token_ids) < self.vocab_size):  # many at a time, for speed
            return
        index, wrong = next((i, t) for i, t in enumerate(token_ids) if not 0 <= t < self.vocab_size)
        raise InvalidRequest(place.format(index), wrong, f"must be from 0 to {self.vocab_size - 1}")

    def sampling(self) -> SamplingParams:
        """The model's defaults with a seed of their own."""
        return replace(self.defaults, seed=self.new_seed())

    def new_seed(self) -> int:
        """One for a request whose client has none, so that every attempt of it makes the same tokens."""
        return secrets.randbits(MAX_SEED.bit_length())


def load_model_card(model_dir: Path, name: str) -> ModelCard:
    """Read the directory. Raises ModelLoadError that names the file and what is wrong with it."""
    config = _read_json(model_dir / "config.json", required=True)
    generation = _read_json(model_dir / "generation_config.json", required=False)
    tokenizer_config = _read_json(model_dir / "tokenizer_config.json", required=False)
    special = {key: token for key in _SPECIAL_TOKENS if (token := _token_text(tokenizer_config.get(key))) is not None}
    hf = _read_tokenizer(model_dir / "tokenizer.json")
    sources = _template_sources(model_dir, tokenizer_config)
    try:
        templates = {name: ChatTemplate(source, special) for name, source in sources.items()}
    except ModelLoadError as error:
        raise ModelLoadError(f"{model_dir}: {error.message}") from error
    digest = hashlib.sha256(json.dumps([config, generation], sort_keys=True).encode()).hexdigest()
    where = model_dir / "config.json"
    vocab_size = _positive(config, "vocab_size", VOCAB_SIZE, where)
    return ModelCard(
        name=name,
        tokenizer=Tokenizer(hf, special.get("bos_token", _id_text(hf, config.get("bos_token_id")))),
        chat_template=templates.get("default"),
        tool_template=templates.get("tool_use"),
        vocab_size=vocab_size,
        max_model_len=context_of(config, _positive(config, "max_position_embeddings", MAX_POSITIONS, where)),
        defaults=_sampling_defaults(generation, vocab_size, model_dir / "generation_config.json"),
        max_new_tokens=_optional_int(generation.get("max_new_tokens")),
        fingerprint=f"fp_{digest[:12]}",
    )


def _read_json(path: Path, *, required: bool) -> Mapping[str, object]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        if not required:
            return {}
        raise ModelLoadError(f"{path}: not there") from error
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path}: {error}") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path}: must be a JSON object")
    return value


def _read_tokenizer(path: Path) -> HFTokenizer:
    if not path.is_file():
        raise ModelLoadError(f"{path}: not there; the router needs the tokenizer in this form")
    try:
        hf = HFTokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise ModelLoadError(f"{path}: {error}") from error
    hf.no_truncation()
    hf.no_padding()
    return hf


def _template_sources(model_dir: Path, tokenizer_config: Mapping[str, object]) -> dict[str, str]:
    """Templates by their names, as Hugging Face has them: "default", and some models' "tool_use". Files go before the config."""
    source = tokenizer_config.get("chat_template")
    sources = {"default": source} if isinstance(source, str) else {}
    if isinstance(source, list):  # several by name
        named = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
        sources = {name: text for name, text in named.items() if isinstance(name, str) and isinstance(text, str)}
    default = model_dir / "chat_template.jinja"
    if not default.is_file():
        return sources
    files = {"default": default, **{file.stem: file for file in (model_dir / _MORE_TEMPLATES).glob("*.jinja")}}
    return {name: _read_text(file) for name, file in files.items()}


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{file}: {error}") from error


def _token_text(value: object) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _id_text(hf: HFTokenizer, value: object) -> str | None:
    return hf.id_to_token(value) if isinstance(value, int) and 0 <= value < hf.get_vocab_size() else None


def _positive(config: Mapping[str, object], field: str, defaults: Mapping[str, int], where: Path) -> int:
    """`defaults` has what the engine takes, by the model's family, where the field is left out."""
    value = config.get(field, defaults.get(family_of(config) or ""))
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelLoadError(f"{where}: {field} is {value!r}, must be a positive integer")
    return value


def _optional_int(value: object) -> int | None:
    return value if isinstance(value, int) and value > 0 else None


def _sampling_defaults(generation: Mapping[str, object], vocab_size: int, where: Path) -> SamplingParams:
    """Raises ModelLoadError for values that would have every request refused that does not bring its own."""
    base = SamplingParams()
    top_k = _number(generation, "top_k", base.top_k, where)
    if not math.isfinite(top_k) or int(top_k) != top_k:
        raise ModelLoadError(f"{where}: top_k is {top_k!r}, must be an integer")
    defaults = replace(
        base,
        temperature=_number(generation, "temperature", base.temperature, where),
        top_p=_number(generation, "top_p", base.top_p, where),
        min_p=_number(generation, "min_p", base.min_p, where),
        repetition_penalty=_number(generation, "repetition_penalty", base.repetition_penalty, where),
        top_k=0 if top_k == -1 else int(top_k),  # -1 is another word for all
    )
    try:
        defaults.validate(vocab_size)
    except InvalidRequest as error:
        raise ModelLoadError(f"{where}: {error.message}") from error
    return defaults


def _number(generation: Mapping[str, object], field: str, default: float, where: Path) -> float:
    value = generation.get(field)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ModelLoadError(f"{where}: {field} is {value!r}, must be a number")
    return float(value)
