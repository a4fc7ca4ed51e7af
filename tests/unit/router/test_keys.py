"""Key files and what they let in: a key is known by its hash alone, and nothing says it aloud."""

import datetime
import json
import logging
import os
import resource
import traceback

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts.errors import ConfigError, Unauthenticated
from router.caller import ANYBODY, Caller
from router.keys import HASH_PREFIX, KEY_PREFIX, KeyBook, OpenDoor, hash_of, new_key, read_key_file

TODAY = datetime.date(2026, 11, 30)


def write(path, *entries):
    path.write_text(json.dumps({"keys": list(entries)}))
    return path


def touched(path):
    """As if it had been written a second later: what is written within one tick of the clock looks the same."""
    os.utime(path, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns + 1_000_000_000))
    return path


def book(path):
    return KeyBook(path, lambda: TODAY)


def refused(keys, authorization) -> str:
    with pytest.raises(Unauthenticated) as caught:
        keys.caller(authorization)
    return caught.value.message


@pytest.fixture
def key() -> str:
    return new_key()


def test_a_key_brings_its_owner_with_the_limits(tmp_path, key):
    entry = {"name": "alice", "hash": hash_of(key), "weight": 2, "tokens_per_minute": 900, "best_priority": 1}
    keys = book(write(tmp_path / "keys.json", entry, {"name": "bob", "hash": hash_of("other")}))
    assert keys.caller(f"Bearer {key}") == Caller(name="alice", weight=2.0, tokens_per_minute=900, best_priority=1)
    assert keys.caller(f"bearer  {key} ").name == "alice"


def test_keys_are_long_unlike_and_not_in_their_file(tmp_path):
    many = {new_key() for _ in range(100)}
    assert len(many) == 100
    assert all(len(key) == len(KEY_PREFIX) + 43 for key in many)  # 256 bits, base64url
    assert all(key not in hash_of(key) and hash_of(key).startswith(HASH_PREFIX) for key in many)


@given(st.text(st.characters(codec="utf-8"), max_size=300))
def test_whatever_else_is_presented_is_refused_and_not_repeated(tmp_path_factory, presented):
    path = tmp_path_factory.getbasetemp() / "keys.json"
    if not path.exists():
        write(path, {"name": "alice", "hash": hash_of(new_key())})
    for authorization in (presented, f"Bearer {presented}"):
        with pytest.raises(Unauthenticated) as caught:
            book(path).caller(authorization)
        assert "alice" not in caught.value.message
        assert len(presented) < 12 or presented not in caught.value.message


def test_the_hash_itself_is_no_key(tmp_path, key):
    keys = book(write(tmp_path / "keys.json", {"name": "alice", "hash": hash_of(key)}))
    refused(keys, f"Bearer {hash_of(key)}")
    refused(keys, f"Basic {key}")
    refused(keys, key)
    refused(keys, "")


def test_a_key_is_good_through_its_last_day_and_not_after_it_was_revoked(tmp_path):
    today, past, revoked = new_key(), new_key(), new_key()
    keys = book(
        write(
            tmp_path / "keys.json",
            {"name": "a", "hash": hash_of(today), "expires": "2026-11-30"},
            {"name": "a", "hash": hash_of(past), "expires": "2026-11-29"},
            {"name": "a", "hash": hash_of(revoked), "disabled": True},
        )
    )
    assert keys.caller(f"Bearer {today}").name == "a"
    assert "expired on 2026-11-29" in refused(keys, f"Bearer {past}")
    assert "revoked" in refused(keys, f"Bearer {revoked}")


BAD = {
    "not JSON": ("{", "malformed|truncated"),
    "not an object": ("[]", "object"),
    "unknown field": ('{"keys": [{"name": "a", "hash": "HASH", "wieght": 2}]}', "wieght.*keys\\[0\\]"),
    "no hash": ('{"keys": [{"name": "a"}]}', "hash.*keys\\[0\\]"),
    "bad name": ('{"keys": [{"name": "a\\nb", "hash": "HASH"}]}', "name.*letters.*keys\\[0\\]"),
    "key as a field": ('{"keys": [{"KEY": "alice"}]}', "unknown field.*keys\\[0\\]"),
    "key as a name": ('{"keys": [{"name": "KEY", "hash": "HASH"}]}', "name: is a key"),
    "key in a name": ('{"keys": [{"name": "Bearer KEY", "hash": "HASH"}]}', "name: got 'Bearer"),
    "endless limit": (
        '{"keys": [{"name": "a", "hash": "HASH", "requests_per_minute": 1000000000000}]}',
        "at most 2147483647",
    ),
    "far priority": ('{"keys": [{"name": "a", "hash": "HASH", "best_priority": 2147483648}]}', "best_priority of a"),
    "key in clear": ('{"keys": [{"name": "a", "hash": "KEY"}]}', "hash of a.*64.*keys\\[0\\]"),
    "weight 0": ('{"keys": [{"name": "a", "hash": "HASH", "weight": 0}]}', "weight of a: got 0, must be above 0"),
    "limit 0": ('{"keys": [{"name": "a", "hash": "HASH", "tokens_per_minute": 0}]}', "tokens_per_minute of a: got 0"),
    "bad date": ('{"keys": [{"name": "a", "hash": "HASH", "expires": "soon"}]}', "date|RFC3339"),
    "twice": ('{"keys": [{"name": "a", "hash": "HASH"}, {"name": "a", "hash": "HASH"}]}', "twice"),
    "unlike limits": (
        '{"keys": [{"name": "a", "hash": "HASH"}, {"name": "a", "hash": "HASH2", "weight": 2}]}',
        "keys of a must have the same limits",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_file_is_refused_by_its_name_and_never_shows_a_key(tmp_path, key, case):
    text, said = BAD[case]
    path = tmp_path / "keys.json"
    path.write_text(text.replace("HASH2", hash_of("2")).replace("HASH", hash_of(key)).replace("KEY", key))
    with pytest.raises(ConfigError, match=f"(?s)keys\\.json.*({said})") as caught:
        book(path)
    assert key not in "".join(traceback.format_exception(caught.value))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.json: No such file"):
        book(tmp_path / "none.json")


def test_the_file_may_change_and_a_bad_one_changes_nothing(tmp_path, caplog):
    old, new = new_key(), new_key()
    path = write(tmp_path / "keys.json", {"name": "alice", "hash": hash_of(old)})
    keys = book(path)
    write(path, {"name": "alice", "hash": hash_of(new)})
    keys.refresh()
    assert keys.caller(f"Bearer {new}").name == "alice"
    refused(keys, f"Bearer {old}")
    with caplog.at_level(logging.INFO):
        for _ in range(3):  # complained of once
            path.write_text('{"keys": [')
            touched(path)
            keys.refresh()
            keys.refresh()
            path.unlink()
            keys.refresh()
            assert keys.caller(f"Bearer {new}").name == "alice"
            write(path, {"name": "alice", "hash": hash_of(new)})
            keys.refresh()
    assert sum(record.levelno == logging.ERROR for record in caplog.records) == 6
    assert new not in caplog.text and old not in caplog.text


def test_a_file_that_is_put_in_the_place_of_another_is_noticed(tmp_path):
    """Kubernetes and editors do that; time and size may be the same."""
    old, new = new_key(), new_key()
    path = write(tmp_path / "keys.json", {"name": "alice", "hash": hash_of(old)})
    keys = book(path)
    fresh = write(tmp_path / "fresh", {"name": "alice", "hash": hash_of(new)})
    os.utime(fresh, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns))
    fresh.replace(path)
    keys.refresh()
    assert keys.caller(f"Bearer {new}").name == "alice"


@pytest.mark.parametrize(("mode", "said"), [(0o600, False), (0o644, False), (0o620, True), (0o602, True)])
def test_a_key_file_that_others_may_write_is_spoken_of(tmp_path, caplog, mode, said):
    path = write(tmp_path / "keys.json")
    path.chmod(mode)
    book(path)
    assert ("let themselves in" in caplog.text) == said


def test_what_is_no_file_or_too_large_a_one_stops_nobody(tmp_path):
    path = tmp_path / "keys.json"
    os.mkfifo(path)  # who reads it waits until somebody writes
    with pytest.raises(ConfigError, match=r"keys\.json: is no file"):
        book(path)
    path.unlink()
    with path.open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(ConfigError, match=r"keys\.json: has 1099511627776 bytes"):
        book(path)


def test_a_change_that_could_not_be_read_is_read_as_soon_as_it_can(tmp_path, caplog):
    """As while this process has no file descriptor left: the file has not changed since, and a key is to go."""
    key = new_key()
    path = write(tmp_path / "keys.json", {"name": "alice", "hash": hash_of(key)})
    keys = book(path)
    write(path, {"name": "alice", "hash": hash_of(key), "disabled": True})
    with caplog.at_level(logging.ERROR):
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
        try:
            for _ in range(3):
                keys.refresh()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert keys.caller(f"Bearer {key}").name == "alice" and len(caplog.records) == 1
    keys.refresh()
    assert "revoked" in refused(keys, f"Bearer {key}")


def test_what_changes_nothing_but_the_files_state_is_noticed(tmp_path):
    """As by an operator who copies it, times and all, and gives the router the right to read it afterwards."""
    old, new = new_key(), new_key()
    path = write(tmp_path / "keys.json", {"name": "alice", "hash": hash_of(old)})
    keys, before = book(path), path.stat()
    write(path, {"name": "alice", "hash": hash_of(new)})
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat()[:7] == before[:7]
    keys.refresh()
    assert keys.caller(f"Bearer {new}").name == "alice"


def test_without_keys_everybody_is_anybody():
    assert OpenDoor().caller("Bearer whatever") is ANYBODY


def test_a_key_file_is_read_with_what_it_leaves_out(tmp_path):
    (entry,) = read_key_file(write(tmp_path / "k", {"name": "a", "hash": hash_of("k")})).keys
    assert (entry.weight, entry.tokens_per_minute, entry.expires, entry.disabled) == (1.0, None, None, False)
    assert entry.key_id == hash_of("k")[len(HASH_PREFIX) :][:8]
