"""Proofs of calls: right ones count once; whatever is altered, made up, said again or of another life does not count."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts.errors import NotOfThisCluster
from contracts.secret import ClusterSecret, new_nonce
from rpc.call_proof import METADATA_KEY, CallProver, CallSession, Challenge
from rpc.replay import WINDOW, Replays

SECRET = ClusterSecret(b"a secret of this cluster")
METHOD = "/diptych.v1.Handoff/Commit"


def session(server: CallProver, secret: ClusterSecret = SECRET) -> CallSession:
    nonce = new_nonce()
    return CallSession(secret, nonce, server.begin(nonce))


def test_a_call_of_this_cluster_counts_once() -> None:
    server = CallProver(SECRET)
    caller = session(server)
    token = caller.token(METHOD, b"body")
    server.check([("x", "y"), token], METHOD, b"body")
    with pytest.raises(NotOfThisCluster, match="heard before"):
        server.check([token], METHOD, b"body")
    server.check([caller.token(METHOD, b"body")], METHOD, b"body")


@given(st.binary(max_size=200), st.data())
def test_nothing_may_be_altered(body: bytes, data: st.DataObject) -> None:
    server = CallProver(SECRET)
    key, token = session(server).token(METHOD, body)
    changed = data.draw(st.sampled_from(["token", "body", "method", "cut"]))
    method, said, proof = METHOD, body, token
    match changed:
        case "token":
            at, bit = data.draw(st.integers(0, len(token) - 1)), data.draw(st.integers(0, 7))
            proof = token[:at] + bytes((token[at] ^ 1 << bit,)) + token[at + 1 :]
        case "body":
            said = data.draw(st.binary(max_size=200).filter(lambda other: other != body))
        case "method":
            method = data.draw(st.sampled_from(["/diptych.v1.Handoff/Abort", "/diptych.v1.Handoff/Commit/", ""]))
        case "cut":
            proof = token[: data.draw(st.integers(0, len(token) - 1))]
    with pytest.raises(NotOfThisCluster):
        server.check([(key, proof)], method, said)
    server.check([(key, token)], METHOD, body)  # and what was refused has used nothing up


def test_without_a_proof_it_is_said_what_is_missing() -> None:
    server = CallProver(SECRET)
    for metadata in (None, (), [("authorization", "Bearer x")]):
        with pytest.raises(NotOfThisCluster, match="--cluster-secret-file"):
            server.check(metadata, METHOD, b"")
    with pytest.raises(NotOfThisCluster, match="cannot be read"):
        server.check([(METADATA_KEY, "text")], METHOD, b"")


def test_another_life_does_not_take_what_was_heard_by_the_last() -> None:
    before, after = CallProver(SECRET), CallProver(SECRET)
    tokens = [session(before).token(METHOD, b"body") for _ in range(3)]
    for _ in range(5):
        session(after)
    for token in tokens:
        with pytest.raises(NotOfThisCluster, match="earlier life"):
            after.check([token], METHOD, b"body")


def test_sessions_and_numbers_that_nobody_began_are_refused() -> None:
    server = CallProver(SECRET)
    key, token = session(server).token(METHOD, b"")
    proof = token[16:]
    for numbers in ((0, 1), (2, 1), (2**64 - 1, 1), (1, 0), (1, 2**64 - 1)):
        with pytest.raises(NotOfThisCluster):
            server.check([(key, struct.pack("<QQ", *numbers) + proof)], METHOD, b"")


def test_each_side_finds_out_that_the_other_has_another_secret() -> None:
    ours, theirs = CallProver(SECRET), ClusterSecret(b"another cluster's secret")
    with pytest.raises(NotOfThisCluster, match="another cluster secret"):
        session(ours, theirs)
    nonce = new_nonce()
    stolen = ours.begin(nonce)
    caller = CallSession.__new__(CallSession)  # one that does not look
    caller._calls, caller._challenge, caller._number = theirs.key("call"), stolen, 0
    with pytest.raises(NotOfThisCluster, match="proof is wrong"):
        ours.check([caller.token(METHOD, b"")], METHOD, b"")


def test_a_servers_answer_proves_nothing_to_another_caller() -> None:
    server = CallProver(SECRET)
    answer = server.begin(new_nonce())
    with pytest.raises(NotOfThisCluster):
        CallSession(SECRET, new_nonce(), answer)
    other = Challenge(answer.session + 1, answer.challenge, answer.proof)
    with pytest.raises(NotOfThisCluster):
        CallSession(SECRET, new_nonce(), other)
    with pytest.raises(NotOfThisCluster, match="16 bytes"):
        server.begin(b"short")


# Replays


@given(st.lists(st.integers(1, 5000), max_size=300))
def test_each_number_counts_once_and_what_is_new_enough_always_does(numbers: list[int]) -> None:
    replays, seen, highest = Replays(), set(), 0
    for number in numbers:
        taken = replays.take(1, number)
        assert taken == (number not in seen and number > highest - WINDOW)
        if taken:
            seen.add(number)
            highest = max(highest, number)


def test_a_session_that_was_forgotten_is_never_believed_again() -> None:
    replays = Replays(max_sessions=2)
    for number in (1, 2, 3):
        assert replays.knows(number)
        assert replays.take(number, 1)
    assert not replays.knows(1)
    assert replays.knows(2)
    assert replays.take(2, 2)
    assert replays.take(4, 1)
    assert not replays.knows(3), "2 was used after it"
    assert replays.knows(2)
    assert replays.knows(5)
    assert replays.take(5, 1)
    assert not replays.knows(2)
    assert not replays.knows(1)
    server = CallProver(SECRET, Replays(max_sessions=1))
    first, second = session(server), session(server)
    server.check([first.token(METHOD, b"")], METHOD, b"")
    server.check([second.token(METHOD, b"")], METHOD, b"")
    with pytest.raises(NotOfThisCluster, match="over"):
        server.check([first.token(METHOD, b"")], METHOD, b"")


# The secret


def test_a_secret_is_long_enough_and_never_shown() -> None:
    with pytest.raises(ValueError, match="15 bytes"):
        ClusterSecret(b"x" * 15)
    for thing in (SECRET, SECRET.key("call")):
        assert "secret of this" not in repr(thing)
        assert str(thing).endswith("(***)")


@given(st.lists(st.binary(max_size=8), max_size=5), st.lists(st.binary(max_size=8), max_size=5))
def test_parts_have_borders_and_purposes_have_keys(one: list[bytes], other: list[bytes]) -> None:
    key = SECRET.key("call")
    assert key.proves(key.proof(*one), *other) == (one == other)
    assert not SECRET.key("challenge").proves(key.proof(*one), *one)
