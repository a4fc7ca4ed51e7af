"""Which session a request belongs to: the first word of its client counts, and costs nothing however long."""

import pytest

from router.caller import Caller
from router.choosing.sessions import session_of
from router.exchange import Ask, TokenPrompt
from router.policies import Query, SessionAffinity
from tests.contract.test_policy import candidate


@pytest.mark.parametrize(
    ("said", "session"),
    [
        ((None, None, None), ""),
        (("", None, "u"), "u"),
        (("header", "key", "user"), "header"),
        ((None, "key", "user"), "key"),
    ],
)
def test_the_first_word_counts(said, session):
    assert session_of(*said) == session


def test_long_words_are_kept_short_and_apart():
    first, second = session_of("x" * 10_000 + "a"), session_of("x" * 10_000 + "b")
    assert first != second
    assert len(first) <= 64


def test_two_callers_sessions_of_one_name_are_two():
    asks = [
        Ask(request_id="r", prompt=TokenPrompt((1,)), sampling=None, session=session, caller=Caller(name=name))
        for name, session in (("a", "1"), ("b", "1"), ("a", ""), ("b", ""))
    ]
    keys = [ask.session_key for ask in asks]
    assert keys[0] != keys[1]
    assert keys[2:] == ["", ""]


def test_any_words_are_a_session():
    pool = [candidate("a"), candidate("b")]
    for session in ("\ud800", "\0", session_of("\udfff" * 100)):
        assert SessionAffinity().choose(pool, Query((1,), session)) in pool
