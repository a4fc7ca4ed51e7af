"""Incremental text equals the text of all tokens at once, whatever the tokens; stop strings are found at any split."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from router.text.detokenizer import ByteLevelStream, ByteVocabulary, StopMatcher, WindowStream

TINY = Tokenizer.from_file(str(Path(__file__).parents[1] / "fixtures/tiny-austen/tokenizer.json"))
VOCABULARY = ByteVocabulary(TINY)
# Tokens that are pieces of characters, and whole ones, and marks.
NASTY = [TINY.encode(text).ids for text in ("日本", "🙂", "é", " wörld", "the", "\ufffd")]
NASTY_IDS = sorted({i for ids in NASTY for i in ids} | {0, 1})


def byte_fallback() -> Tokenizer:
    pieces = ["<unk>", "▁", "▁a", "b", "é", "."] + [f"<0x{b:02X}>" for b in range(256)]
    tokenizer = Tokenizer(models.BPE({p: i for i, p in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    return tokenizer


FALLBACK = byte_fallback()


def pieces_of(stream, ids):
    return [stream.push([i]) for i in ids] + [stream.flush()]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(NASTY_IDS) | st.integers(0, 1023), max_size=80), st.booleans())
@pytest.mark.parametrize("kind", ["bytes", "window"])
def test_pieces_joined_are_the_whole(kind, ids, skip):
    stream = ByteLevelStream(VOCABULARY, skip) if kind == "bytes" else WindowStream(TINY, skip)
    assert "".join(pieces_of(stream, ids)) == TINY.decode(ids, skip_special_tokens=skip)


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=40), st.booleans())
@pytest.mark.parametrize("kind", ["bytes", "window"])
def test_no_piece_has_half_a_character(kind, text, skip):
    text = text.replace("\ufffd", "")
    ids = TINY.encode(text).ids
    stream = ByteLevelStream(VOCABULARY, skip) if kind == "bytes" else WindowStream(TINY, skip)
    pieces = pieces_of(stream, ids)
    assert "\ufffd" not in "".join(pieces)
    assert "".join(pieces) == TINY.decode(ids, skip_special_tokens=skip)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(["▁", "▁a", "b", "é", ".", "日", "🙂"]), max_size=30))
def test_byte_fallback_and_leading_spaces(words):
    ids = []
    for word in words:
        known = FALLBACK.token_to_id(word)
        ids += [known] if known is not None else [FALLBACK.token_to_id(f"<0x{b:02X}>") for b in word.encode()]
    pieces = pieces_of(WindowStream(FALLBACK, True), ids)
    assert "".join(pieces) == FALLBACK.decode(ids)
    assert "\ufffd" not in "".join(pieces)


def test_bytes_that_never_complete_come_out_at_the_end():
    ids = TINY.encode("a🙂").ids[:-1]
    for stream in (ByteLevelStream(VOCABULARY, True), WindowStream(TINY, True)):
        pieces = pieces_of(stream, ids)
        assert "".join(pieces[:-1]) == "a"
        assert pieces[-1] == "\ufffd"


def test_a_run_of_noise_does_not_make_the_window_grow():
    lead = TINY.encode("日").ids[0]
    stream = WindowStream(TINY, True)
    text = "".join(stream.push([lead]) for _ in range(1000)) + stream.flush()
    assert text == "\ufffd" * 1000
    assert len(stream._context) < 300


def reference(text, stops):
    """The first stop string to be complete: smallest end, then the longest."""
    for end in range(1, len(text) + 1):
        ended = [s for s in stops if s and text[:end].endswith(s)]
        if ended:
            longest = max(ended, key=len)
            return text[: end - len(longest)], longest
    return text, None


@settings(max_examples=500, deadline=None)
@given(
    st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=5), max_size=4), st.data(), st.booleans()
)
def test_stop_strings_are_found_at_any_split(text, stops, data, include):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    matcher = StopMatcher(stops, include)
    shown = []
    for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        shown.append(matcher.push(text[start:end]))
        if matcher.matched is not None:
            break
    else:
        shown.append(matcher.flush())
    expected, stop = reference(text, stops)
    assert matcher.matched == stop
    assert "".join(shown) == expected + (stop or "" if include else "")


@settings(max_examples=200, deadline=None)
@given(st.text("abc", max_size=20), st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3))
def test_no_more_is_held_back_than_needed(text, stops):
    matcher = StopMatcher(stops)
    shown = "".join(matcher.push(char) for char in text if matcher.matched is None)
    if matcher.matched is None:
        held = text[len(shown) :]
        assert not held or any(s.startswith(held) and s != held for s in stops)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(NASTY_IDS) | st.integers(0, 1023), max_size=40), st.sampled_from([0, 1]))
@pytest.mark.parametrize("kind", ["bytes", "window"])
def test_special_tokens_that_are_kept_are_text(kind, ids, kept):
    """Those that spell the tags of calls; all others are left out as ever."""
    keep = frozenset({kept})
    stream = ByteLevelStream(VOCABULARY, True, keep) if kind == "bytes" else WindowStream(TINY, True, keep)
    left = [i for i in ids if i not in {0, 1} - keep]
    assert "".join(pieces_of(stream, ids)) == TINY.decode(left, skip_special_tokens=False)
