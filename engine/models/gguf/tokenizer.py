"""The tokenizer that GGUF metadata describes, as a `tokenizers.Tokenizer` and a tokenizer_config.json.

    tokenizer.ggml.model  gpt2   byte-level BPE: tokens and merges; the split before BPE goes by tokenizer.ggml.pre
                          llama  SentencePiece BPE: tokens and scores, from which the merges follow (`spm.py`)

Everything else is refused by name: a tokenizer that is almost right makes text that is quietly wrong.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from contracts.errors import ModelLoadError
from engine.models.gguf.reading import GGUFFile
from engine.models.gguf.spm import spm_tokenizer

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LLAMA3_SPLIT = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


class TokenType(IntEnum):
    """tokenizer.ggml.token_type."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """How text is cut before BPE, for one value of tokenizer.ggml.pre; None is GPT-2's own pattern."""

    split: str | None
    single_digits: bool = False
    whole_words_first: bool = False  # a piece that is a token is taken as it is, without merging
    nfc: bool = False
    adds_bos: bool = False  # when the file does not say


_GPT2 = PreTokenizer(split=None)
_SMOLLM = PreTokenizer(split=None, single_digits=True)
_LLAMA3 = PreTokenizer(split=_LLAMA3_SPLIT, whole_words_first=True, adds_bos=True)
_QWEN2 = PreTokenizer(split=_QWEN2_SPLIT, nfc=True)
PRE_TOKENIZERS = {
    "gpt-2": _GPT2,
    "smollm": _SMOLLM,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
}


@dataclass(frozen=True, slots=True)
class SpecialIds:
    """Token ids with a task; None where the file names none. `ends` are all that end an answer."""

    bos: int | None
    eos: int | None
    unk: int | None
    pad: int | None
    ends: tuple[int, ...]
    add_bos: bool
    add_eos: bool


def build_tokenizer(file: GGUFFile) -> Tokenizer:
    """The tokenizer of a file; ModelLoadError for a kind or pre-tokenizer that is unknown, or lists that do not fit."""
    kind = file.text("tokenizer.ggml.model")
    tokens = file.texts("tokenizer.ggml.tokens")
    types = file.integers("tokenizer.ggml.token_type")
    if len(types) != len(tokens) or len(set(tokens)) != len(tokens):
        raise ModelLoadError(
            f"{file.path}: {len(tokens)} tokens, {len(set(tokens))} of them different, but {len(types)} token types"
        )
    ids = special_ids(file)
    if kind == "gpt2":
        tokenizer = _byte_level_bpe(file, tokens)
    elif kind == "llama":
        unk = None if ids.unk is None else tokens[ids.unk]
        scores = file.numbers("tokenizer.ggml.scores")
        if len(scores) != len(tokens):
            raise ModelLoadError(f"{file.path}: {len(tokens)} tokens but {len(scores)} scores")
        normal = [t in (TokenType.NORMAL, TokenType.USER_DEFINED) for t in types]
        tokenizer = spm_tokenizer(tokens, scores, normal, unk, file.flag("tokenizer.ggml.add_space_prefix", True))
    else:
        raise ModelLoadError(f"{file.path}: tokenizer {kind!r} is not known; known: gpt2, llama")
    _add_special_tokens(tokenizer, tokens, types)
    _add_affixes(tokenizer, tokens, ids)
    return tokenizer


def special_ids(file: GGUFFile) -> SpecialIds:
    """Which ids the metadata names; ModelLoadError when one is not in the vocabulary."""
    size = len(file.texts("tokenizer.ggml.tokens"))

    def token_id(name: str) -> int | None:
        key = f"tokenizer.ggml.{name}_token_id"
        if not file.has(key):
            return None
        value = file.integer(key)
        if not 0 <= value < size:
            raise ModelLoadError(f"{file.path}: {key} is {value}, the vocabulary has {size} tokens")
        return value

    ends = dict.fromkeys(value for name in ("eos", "eot", "eom") if (value := token_id(name)) is not None)
    pre = PRE_TOKENIZERS.get(file.text("tokenizer.ggml.pre", ""))
    adds_bos = pre.adds_bos if pre else file.text("tokenizer.ggml.model") == "llama"
    return SpecialIds(
        bos=token_id("bos"),
        eos=token_id("eos"),
        unk=token_id("unknown"),
        pad=token_id("padding"),
        ends=tuple(ends),
        add_bos=file.flag("tokenizer.ggml.add_bos_token", adds_bos),
        add_eos=file.flag("tokenizer.ggml.add_eos_token", False),
    )


def tokenizer_config(file: GGUFFile) -> dict[str, str | bool | int]:
    """The contents of tokenizer_config.json, chat template included when the file has one."""
    tokens, ids = file.texts("tokenizer.ggml.tokens"), special_ids(file)
    config: dict[str, str | bool | int] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "add_bos_token": ids.add_bos,
        "add_eos_token": ids.add_eos,
    }
    for name, token_id in (("bos", ids.bos), ("eos", ids.eos), ("unk", ids.unk), ("pad", ids.pad)):
        if token_id is not None:
            config[f"{name}_token"] = tokens[token_id]
    if file.has("tokenizer.chat_template"):
        config["chat_template"] = file.text("tokenizer.chat_template")
    return config


def _byte_level_bpe(file: GGUFFile, tokens: list[str]) -> Tokenizer:
    name = file.text("tokenizer.ggml.pre", "default")
    pre = PRE_TOKENIZERS.get(name)
    if pre is None:
        raise ModelLoadError(f"{file.path}: pre-tokenizer {name!r} is not known; known: {', '.join(PRE_TOKENIZERS)}")
    merges = [tuple(merge.split(" ")) for merge in file.texts("tokenizer.ggml.merges")]
    vocab = {token: index for index, token in enumerate(tokens)}
    for merge in merges:
        if len(merge) != 2 or not {*merge, "".join(merge)} <= vocab.keys():
            raise ModelLoadError(f"{file.path}: merge {' '.join(merge)!r} does not make a token of two tokens")
    pairs = [(left, right) for left, right in merges]
    tokenizer = Tokenizer(models.BPE(vocab, pairs, ignore_merges=pre.whole_words_first))
    if pre.nfc:
        tokenizer.normalizer = normalizers.NFC()
    steps: list[pre_tokenizers.PreTokenizer] = []
    if pre.single_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if pre.split is not None:
        steps.append(pre_tokenizers.Split(Regex(pre.split), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre.split is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _add_special_tokens(tokenizer: Tokenizer, tokens: list[str], types: list[int]) -> None:
    """Control tokens are recognised in text and skipped when decoding; user-defined ones are recognised and shown."""
    added = [
        AddedToken(token, normalized=False, special=kind != TokenType.USER_DEFINED)
        for token, kind in zip(tokens, types, strict=True)
        if kind in (TokenType.CONTROL, TokenType.UNKNOWN, TokenType.USER_DEFINED)
    ]
    tokenizer.add_tokens(added)


def _add_affixes(tokenizer: Tokenizer, tokens: list[str], ids: SpecialIds) -> None:
    """Byte-level offsets, then BOS and EOS where the file wants them added."""
    bos = tokens[ids.bos] if ids.add_bos and ids.bos is not None else None
    eos = tokens[ids.eos] if ids.add_eos and ids.eos is not None else None
    if bos is None and eos is None:
        return
    parts = [part for part in (bos, "$A", eos) if part is not None]
    pair = [part for part in (bos, "$A", eos, bos, "$B:1", eos) if part is not None]
    specials = [(token, i) for token, i in ((bos, ids.bos), (eos, ids.eos)) if token is not None and i is not None]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=" ".join(parts), pair=" ".join(pair), special_tokens=specials
    )
