"""Tokenizers built from GGUF metadata cut and merge as their families do, or are refused by name."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from contracts.errors import ModelLoadError
from engine.models.gguf.reading import GGUFFile
from engine.models.gguf.spm import spm_tokenizer
from engine.models.gguf.tokenizer import PRE_TOKENIZERS, build_tokenizer, special_ids
from tests.unit.models.gguf_files import TOKENS, TYPES, Recipe, write_gguf

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


def tokenizer_of(tmp_path, **metadata):
    write_gguf(tmp_path / "t.gguf", Recipe(metadata={f"tokenizer.ggml.{k}": v for k, v in metadata.items()}))
    return build_tokenizer(GGUFFile(tmp_path / "t.gguf"))


def cut(tokenizer, text):
    """The pieces before BPE, spaces shown as spaces."""
    return [text[begin:end] for _, (begin, end) in tokenizer.pre_tokenizer.pre_tokenize_str(text)]


def test_merges_special_tokens_and_ids(tmp_path):
    tokenizer = tokenizer_of(tmp_path)
    assert tokenizer.encode("ab a12").tokens == ["ab", "Ġa", "1", "2"]
    encoded = tokenizer.encode("<s>ab<tool></s>")
    assert encoded.tokens == ["<s>", "ab", "<tool>", "</s>"]
    assert encoded.ids == [0, 6, 10, 1]
    assert tokenizer.decode(encoded.ids, skip_special_tokens=True) == "ab<tool>"
    assert tokenizer.get_vocab_size() == len(TOKENS)


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("gpt-2", "It's 2024, café  ok\n\n x", ["It", "'s", " 2024", ",", " café", " ", " ok", "\n\n", " x"]),
        ("smollm", "It's 2024, ok", ["It", "'s", " ", "2", "0", "2", "4", ",", " ok"]),
        ("qwen2", "IT'S 2024!\n\n  x", ["IT", "'S", " ", "2", "0", "2", "4", "!\n\n", " ", " x"]),
        ("llama-bpe", "IT'S 20245!\n\n  x", ["IT", "'S", " ", "202", "45", "!\n\n", " ", " x"]),
        ("llama-bpe", "don't(foo)\r\n", ["don", "'t", "(foo", ")\r\n"]),
    ],
)
def test_text_is_cut_as_the_family_cuts_it(tmp_path, pre, text, pieces):
    assert cut(tokenizer_of(tmp_path, pre=pre), text) == pieces


@pytest.mark.parametrize("pre", sorted(PRE_TOKENIZERS))
def test_any_text_comes_back(tmp_path, pre):
    write_gguf(
        tmp_path / "t.gguf",
        Recipe(
            vocab=256,
            metadata={
                "tokenizer.ggml.pre": pre,
                "tokenizer.ggml.tokens": [*ALPHABET, "ab"],
                "tokenizer.ggml.token_type": [1] * 257,
                "tokenizer.ggml.merges": ["a b"],
                "tokenizer.ggml.add_bos_token": False,
            },
        ),
    )
    tokenizer = build_tokenizer(GGUFFile(tmp_path / "t.gguf"))
    for text in ("", "a", " a  b\t\n", "naïve 漢字 🙂 12345", "'s 'LL", "\u00a0\u2003x", "ab" * 50):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_a_whole_word_wins_over_its_merges_only_for_llama3(tmp_path):
    """Llama 3 has words that no merges make; others reach tokens by merges alone."""
    lists = {"tokens": [*TOKENS[:6], "ca", *TOKENS[7:], "cab"], "token_type": [*TYPES, 1], "merges": ["c a", "Ġ a"]}
    assert tokenizer_of(tmp_path, pre="llama-bpe", add_bos_token=False, **lists).encode("cab").tokens == ["cab"]
    assert tokenizer_of(tmp_path, pre="qwen2", **lists).encode("cab").tokens == ["ca", "b"]


@pytest.mark.parametrize(
    ("metadata", "tokens"),
    [
        ({}, ["ab"]),
        ({"add_bos_token": True}, ["<s>", "ab"]),
        ({"add_bos_token": True, "add_eos_token": True}, ["<s>", "ab", "</s>"]),
        ({"pre": "llama-bpe"}, ["<s>", "ab"]),
        ({"pre": "llama-bpe", "add_bos_token": False}, ["ab"]),
    ],
)
def test_bos_is_added_when_the_file_says_so(tmp_path, metadata, tokens):
    tokenizer = tokenizer_of(tmp_path, **metadata)
    assert tokenizer.encode("ab").tokens == tokens
    assert tokenizer.encode("ab", add_special_tokens=False).tokens == ["ab"]


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"pre": "tekken"}, "pre-tokenizer 'tekken' is not known; known: gpt-2, smollm"),
        ({"pre": None}, "pre-tokenizer 'default' is not known"),
        ({"model": "t5"}, "tokenizer 't5' is not known"),
        ({"model": None}, "has no tokenizer.ggml.model"),
        ({"merges": ["a z"]}, "merge 'a z'"),
        ({"merges": ["a"]}, "merge 'a'"),
        ({"token_type": [1]}, "11 tokens, 11 of them different, but 1 token types"),
        ({"tokens": ["a"] * 11}, "11 tokens, 1 of them different"),
        ({"eos_token_id": 11}, "eos_token_id is 11, the vocabulary has 11 tokens"),
        ({"tokens": [1, 2]}, "tokenizer.ggml.tokens must be a list of str"),
        ({"model": "llama", "scores": [0.0]}, "11 tokens but 1 scores"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_tokenizer_that_would_be_wrong_is_refused(tmp_path, metadata, words):
    with pytest.raises(ModelLoadError, match=r"t\.gguf") as caught:
        tokenizer_of(tmp_path, **metadata)
    assert words in caught.value.message


# SentencePiece: "▁" is a space; a byte that is no token's becomes <0x..>.
PIECES = ["<unk>", "<s>", "</s>", "<0xE6>", "<0xBC>", "<0xA2>", "<0x21>", "▁", "a", "b", "c"]
PIECES += ["ab", "bc", "▁a", "abc", "▁ab", "aa", "▁▁", "ca"]
PIECE_TYPES = [2, 3, 3, 6, 6, 6, 6] + [1] * (len(PIECES) - 7)


def sentencepiece_merge(text, scores):
    """The published algorithm: join the neighbours with the best score, leftmost first, until none join."""
    pieces = list(text)
    while True:
        best = None
        for i in range(len(pieces) - 1):
            joined = pieces[i] + pieces[i + 1]
            if joined in scores and (best is None or scores[joined] > scores[pieces[best] + pieces[best + 1]]):
                best = i
        if best is None:
            return pieces
        pieces[best : best + 2] = [pieces[best] + pieces[best + 1]]


@settings(max_examples=200, deadline=None)
@given(text=st.text("abc ", min_size=1, max_size=12), ranks=st.permutations(range(len(PIECES) - 7)))
def test_a_sentencepiece_vocabulary_merges_as_sentencepiece_does(text, ranks):
    scores = [0.0] * 7 + [-float(rank) for rank in ranks]
    normal = [kind == 1 for kind in PIECE_TYPES]
    tokenizer = spm_tokenizer(PIECES, scores, normal, "<unk>", space_prefix=True)
    table = {piece: scores[i] for i, piece in enumerate(PIECES) if normal[i]}
    encoded = tokenizer.encode(text)
    assert encoded.tokens == sentencepiece_merge("▁" + text.replace(" ", "▁"), table)
    assert tokenizer.decode(encoded.ids) == text


def test_a_sentencepiece_file(tmp_path):
    tokenizer = tokenizer_of(
        tmp_path,
        model="llama",
        pre="default",
        tokens=PIECES,
        token_type=PIECE_TYPES,
        scores=[0.0] * 7 + [-float(i) for i in range(len(PIECES) - 7)],
        merges=None,
        bos_token_id=1,
        eos_token_id=2,
        unknown_token_id=0,
    )
    encoded = tokenizer.encode("ab 漢!")
    assert encoded.tokens == ["<s>", "▁ab", "▁", "<0xE6>", "<0xBC>", "<0xA2>", "<0x21>"]
    assert tokenizer.decode(encoded.ids, skip_special_tokens=True) == "ab 漢!"
    ids = special_ids(GGUFFile(tmp_path / "t.gguf"))
    assert (ids.add_bos, ids.ends, ids.unk) == (True, (2,), 0)
