"""A key file is changed in its place: through links, with its owner and mode, or not at all."""

import os
import stat

import pytest

from cli.keyfile import change, read
from cli.main import run
from contracts.errors import ConfigError
from router.keys import KeyEntry, hash_of

ENTRY = KeyEntry(name="alice", hash=hash_of("a"))


def add(keys):
    return (*keys, KeyEntry(name="bob", hash=hash_of(str(len(keys)))))


def test_a_new_file_is_its_owners_alone(tmp_path):
    path = tmp_path / "keys.json"
    change(path, lambda keys: (*keys, ENTRY))
    assert read(path).keys == (ENTRY,)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_link_stays_one_and_what_it_leads_to_is_changed(tmp_path):
    real, link = tmp_path / "real.json", tmp_path / "keys.json"
    change(real, add)
    link.symlink_to(real)
    change(link, add)
    assert link.is_symlink() and len(read(real).keys) == 2


def test_what_root_changes_the_router_can_still_read(tmp_path, monkeypatch):
    """As by `sudo diptych key revoke`: a file that the router cannot read would revoke nothing."""
    path = tmp_path / "keys.json"
    change(path, add)
    path.chmod(0o640)
    given = []
    monkeypatch.setattr(os, "fchown", lambda _, user, group: given.append((user, group)))
    change(path, add)
    assert given == []
    kept, found = path.stat(), os.fstat
    monkeypatch.setattr(os, "fstat", lambda fd: os.stat_result((*found(fd)[:4], kept.st_uid + 1, *found(fd)[5:])))
    change(path, add)
    assert given == [(kept.st_uid, kept.st_gid)]
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_a_change_that_fails_leaves_the_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "keys.json"
    change(path, add)
    before = path.read_bytes()

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ConfigError, match=r"keys\.json: No space left on device"):
        change(path, add)
    assert path.read_bytes() == before
    assert {found.name for found in tmp_path.iterdir()} <= {"keys.json", ".keys.json.lock"}


@pytest.mark.parametrize(("day", "code"), [("2020-01-01", 2), ("9999-12-31", 0)])
def test_no_key_is_made_that_is_dead_from_the_start(tmp_path, capsys, day, code):
    path = tmp_path / "keys.json"
    assert run(["key", "new", "--name", "alice", "--expires", day, "--file", str(path)]) == code
    said = capsys.readouterr().err
    assert path.exists() == (code == 0)
    assert code == 0 or ("--expires 2020-01-01" in said and said.count("\n") == 1)
