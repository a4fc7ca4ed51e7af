"""An answer's words: the tokens of a stop string, of a stop token, and their log-probabilities."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer as HFTokenizer

from contracts.request import FinishReason, TokenDelta, TokenLogprob
from router.text.detokenizer import ByteLevelStream, ByteVocabulary
from router.text.wording import Wording

HF = HFTokenizer.from_file(str(Path(__file__).parents[2] / "fixtures/tiny-austen/tokenizer.json"))
VOCABULARY = ByteVocabulary(HF)


def wording(stop=(), include=False, min_tokens=0):
    return Wording(ByteLevelStream(VOCABULARY, True), stop, include, min_tokens)


def ids(text):
    return tuple(HF.encode(text).ids)


def delta(token_ids, finish=None, stop_token_id=None):
    logprobs = tuple(TokenLogprob(i, -1.0, 1) for i in token_ids)
    return TokenDelta("r", 0, token_ids, logprobs, finish_reason=finish, stop_token_id=stop_token_id)


@pytest.mark.parametrize("stop", [(), ("zzz",)])
@pytest.mark.parametrize("by_token", [True, False])
def test_all_text_and_all_tokens_without_a_match(stop, by_token):
    text = "Emma Woodhouse, 日本 z"
    chunks = [(i,) for i in ids(text)] if by_token else [ids(text)]
    words = wording(stop)
    said = [words.feed(delta(c, FinishReason.LENGTH if n == len(chunks) - 1 else None)) for n, c in enumerate(chunks)]
    assert "".join(s.text for s in said) == text
    assert [i for s in said for i in s.token_ids] == list(ids(text))
    assert all(len(s.logprobs) == len(s.token_ids) for s in said)


@pytest.mark.parametrize("by_token", [True, False])
@pytest.mark.parametrize(("include", "shown"), [(False, "one "), (True, "one two")])
def test_tokens_behind_a_stop_string_are_dropped(by_token, include, shown):
    tokens = ids("one two three four")
    chunks = [(i,) for i in tokens] if by_token else [tokens]
    words = wording(("two",), include)
    said = []
    for chunk in chunks:
        said.append(words.feed(delta(chunk)))
        if said[-1].stop is not None:
            break
    assert said[-1].stop == "two"
    assert "".join(s.text for s in said) == shown
    kept = tuple(i for s in said for i in s.token_ids)
    assert kept == tokens[: len(kept)]
    assert "two" in HF.decode(list(kept))
    assert "two" not in HF.decode(list(kept[:-1]))
    assert sum(len(s.logprobs) for s in said) == len(kept)


@pytest.mark.parametrize(("include", "text"), [(False, "a"), (True, "a b")])
def test_a_stop_token_is_a_token_but_no_text(include, text):
    last = ids(" b")[-1]
    said = wording(include=include).feed(delta((*ids("a"), last), FinishReason.STOP, last))
    assert said.text == text
    assert said.token_ids == (*ids("a"), last)


def test_half_a_character_at_the_end_is_shown_as_such():
    said = wording().feed(delta(ids("🙂")[:-1], FinishReason.LENGTH))
    assert said.text == "\ufffd"


def test_what_was_held_back_comes_with_the_end():
    words = wording(("the end",))
    assert words.feed(delta(ids("the"))).text == ""
    assert words.feed(delta((1,), FinishReason.STOP, 1)).text == "the"


def test_no_stop_string_before_min_tokens():
    tokens = ids("no no no")
    words = wording(("no",), min_tokens=len(ids("no")))
    said = [words.feed(delta((i,))) for i in tokens]
    assert said[0].stop is None
    assert next(n for n, s in enumerate(said) if s.stop) >= len(ids("no"))
